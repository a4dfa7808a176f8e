"""The simulator's vLLM dialect: requests as the engine reads them, bytes as its encoders make them."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest
import vllm_structs
from hypothesis import given
from hypothesis import strategies as st
from vectors import Vector, of_kind
from vllm_messages import both_decoders
from vllm_values import CONTEXT_LENGTH, VOCAB_SIZE, Call, calls

from smg._codec import decode_vllm
from smg._decoded import DecodedOutput, DecodedOutputs
from smg.errors import DecodeError, InvalidRequest
from smg.mock.dialect import Deadly, Deafening, Taken
from smg.mock.model import Batch, Engine, Load
from smg.mock.replies import make_replies
from smg.mock.settings import Settings
from smg.mock.vllm import SPOILABLE, VLLM
from smg.mock.vllm_request import LONGEST, SAMPLING, read_add
from smg.protocol import handshake, vllm

REPLIES = make_replies(Settings(vocab_size=VOCAB_SIZE))
EOS = VOCAB_SIZE - 1
ADD, ABORT, WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"
VERSION = "0.32.0"


def dialect_of(**options: Any) -> tuple[VLLM, Engine]:
    settings = Settings(**{"backend": "vllm", "vocab_size": VOCAB_SIZE, **options})
    engine = Engine(settings, make_replies(settings), VLLM.ending)
    return VLLM(settings, engine, settings.vocab_size), engine


def payload(version: str = VERSION, sampling: Any = None, **elements: Any) -> bytes:
    """An ADD that the engine takes, with some of its elements exchanged."""
    given = {"request_id": "a", "prompt_token_ids": [1, 2, 3], "arrival_time": 1.5, "sampling_params": sampling or {}}
    return vllm.encode_request({**given, **elements}, version)


def add(**elements: Any) -> list[bytes]:
    return [ADD, payload(**elements)]


def sampled(**sampling: Any) -> list[bytes]:
    return add(sampling=sampling)


def packed(kind: bytes, value: Any) -> list[bytes]:
    return [kind, msgpack.packb(value)]


def taken(frames: list[bytes], **options: Any) -> Taken:
    return dialect_of(**options)[0].take(frames, 0.0)


# Requests


@pytest.mark.parametrize(
    "vector", [v for v in of_kind("vllm", "request_add") if v.version in ("0.26.0", "0.32.0")], ids=str
)
def test_captured_requests_are_read_as_the_engines_own_decoder_reads_them(vector: Vector) -> None:
    request = read_add(vector.frame, vector.version)
    seen = vllm_structs.read(vector.frame, vector.version)
    for name in ("request_id", "prompt_token_ids", "arrival_time", "cache_salt", "priority", "client_index"):
        assert request[name] == getattr(seen, name)
    if seen.lora_request is not None:
        assert request["lora_request"]["lora_path"] == seen.lora_request.lora_path
    if seen.sampling_params is not None:
        sampling = request["sampling_params"]
        for name in ("temperature", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "logit_bias"):
            assert sampling[name] == getattr(seen.sampling_params, name)
        assert sampling["_eos_token_id"] == seen.sampling_params.eos_token_id
        assert set(sampling["_all_stop_token_ids"]) == seen.sampling_params.all_stop_token_ids


def test_a_prefix_of_nine_elements_is_a_request_in_every_version() -> None:
    for version in vllm_structs.VERSIONS:
        frame = vllm.encode_add("a", [1], version=version)
        assert frame[0] == 0x99
        assert taken([ADD, frame], vllm_version=version).outcome == "queued"


def test_elements_shift_between_versions() -> None:
    for version, place in (("0.20.2", 10), ("0.26.0", 11), ("0.32.0", 11)):
        elements = ["a", [1], None, {}, None, 1.5, None, None, None, *[None] * (place - 9), 7]
        with pytest.raises(Deadly, match="client_index=7"):
            taken(packed(ADD, elements), vllm_version=version)


texts = st.text("ab", min_size=1, max_size=2)  # the struct of the tests takes empty stop strings
values = (
    st.none()
    | st.booleans()
    | st.integers(-3, 20)
    | st.sampled_from([2**31, 2**63 - 1, 2**64 - 1, -(2**63), 16384, 16385])
    | st.floats(-3, 3)
    | st.sampled_from([float("nan"), float("inf"), 1e-7])
    | texts
    | st.lists(st.integers(-2, 9) | texts, max_size=3)
    | st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=2)
    | st.dictionaries(st.integers(0, 9) | texts, st.floats(-3, 3) | texts, max_size=2)
    | st.fixed_dictionaries({}, optional={"json": st.just("{}"), "regex": st.just("a"), "_backend": st.text("a")})
    | st.fixed_dictionaries(
        {"max_pattern_size": st.integers(-1, 3)},
        optional={"min_pattern_size": st.integers(-1, 3), "min_count": st.integers(0, 3)},
    )
)
KNOWN = {field.encode_name for field in msgspec.structs.fields(vllm_structs.Sampling)}
KNOWN.remove("output_kind")  # an enum, of which the struct of the tests takes any int


@given(st.dictionaries(st.sampled_from(sorted(KNOWN)), values, max_size=3))
def test_the_engines_own_decoder_and_the_simulator_refuse_the_same_sampling_values(sampling: dict[str, Any]) -> None:
    if "n" in sampling:
        sampling["n"] = 1  # the struct of the tests takes no other
    frame = payload(sampling=sampling)
    assert refused(lambda: read_add(frame, VERSION)) == refused(lambda: vllm_structs.read(frame, VERSION))


ELEMENTS = sorted(element.name for element in vllm.REQUEST)


@given(st.dictionaries(st.sampled_from(ELEMENTS), values, max_size=2), st.sampled_from(vllm_structs.VERSIONS))
def test_the_engines_own_decoder_and_the_simulator_refuse_the_same_elements(
    elements: dict[str, Any], version: str
) -> None:
    for name in ("pooling_params", "mm_features", "sampling_params", "lora_request"):
        elements.pop(name, None)  # which the struct of the tests does not type in full, or others test
    frame = payload(version, **elements)
    assert refused(lambda: read_add(frame, version)) == refused(lambda: vllm_structs.read(frame, version))


def refused(read: Any) -> bool:
    try:
        read()
    except (Deafening, vllm_structs.Refused):
        return True
    return False


@given(call=calls())
def test_whatever_passes_the_routers_checks_is_queued(call: Call) -> None:
    options = {"max_model_len": CONTEXT_LENGTH, "max_loras": int(call.model.lora)}
    for version in ("0.23.0", "0.32.0"):
        try:
            frame = vllm.encode_add(
                "a", call.prompt, call.params, context_length=CONTEXT_LENGTH, priority=call.priority, version=version,
                model=call.model,
            )  # fmt: skip
        except InvalidRequest:
            return
        assert taken([ADD, frame], vllm_version=version, **options).outcome == "queued"


@given(kind=st.sampled_from([ADD, ABORT, WAVE, UTILITY, b"\x04", b"\x05"]) | st.binary(max_size=2), data=st.data())
def test_no_message_does_more_than_deafen_or_kill(kind: bytes, data: Any) -> None:
    value = data.draw(
        st.binary(max_size=40) | values.map(msgpack.packb) | st.lists(values, max_size=9).map(msgpack.packb)
    )
    dialect, engine = dialect_of(lockstep=True, ranks=2)
    try:
        dialect.take([kind, value], 0.0)
    except (Deafening, Deadly):
        assert engine.due is None
    dialect.between_steps(0)


# What an engine does not survive (WIRE: fatal inputs)


STRUCTURED = {"json": "{}", "_backend": "xgrammar"}
DEAF: dict[str, list[bytes]] = {
    "an unknown type byte": packed(b"\x07", []),
    "a type of two bytes": packed(b"\x00\x00", []),
    "no type": packed(b"", []),
    "the coordinator's READY": packed(b"READY", []),
    "no payload": [ADD],
    "an empty payload": [ADD, b""],
    "no msgpack": [ADD, b"\xc1"],
    "a truncated request": [ADD, payload()[:-1]],
    "a request with something after it": [ADD, payload() + b"\xc0"],
    "a map": packed(ADD, {"request_id": "a"}),
    "eight elements": packed(ADD, ["a", [1], None, {}, None, 1.0, None, None]),
    "the layout with eos_token_id": packed(ADD, ["a", [1], None, {}, None, 2, 1.0, None, None, None]),
    "an id that is no text": add(request_id=7),
    "a float among the tokens": add(prompt_token_ids=[1, 2.0]),
    "no arrival time": add(arrival_time=None),
    "a bool as a number": add(priority=True),
    "a number as a bool": add(resumable=0),
    "sampling params as an array": add(sampling_params=[1]),
    "an extension that is no array": add(reasoning_parser_kwargs={"a": msgpack.ExtType(1, b"x")}),
    "an adapter of another layout": add(lora_request=["a", 1, "/a", None, {}, False, False]),
    "an adapter without a path": add(lora_request=["a", 1]),
    "an adapter with the id 0": add(lora_request=["a", 0, "/a"]),
    "temperature": sampled(temperature=3.0),
    "temperature below 0": sampled(temperature=-0.1),
    "temperature nan": sampled(temperature=float("nan")),
    "temperature nil": sampled(temperature=None),
    "top_p": sampled(top_p=0),
    "top_p above 1": sampled(top_p=1.01),
    "top_k": sampled(top_k=-2),
    "a float in an int": sampled(top_k=5.0),
    "min_p": sampled(min_p=1.1),
    "max_tokens": sampled(max_tokens=0),
    "min_tokens": sampled(min_tokens=-1),
    "min_tokens above max_tokens": sampled(min_tokens=17),
    "presence_penalty": sampled(presence_penalty=-2.1),
    "frequency_penalty": sampled(frequency_penalty=2.1),
    "repetition_penalty": sampled(repetition_penalty=0),
    "repetition_penalty inf": sampled(repetition_penalty=float("inf")),
    "logprobs": sampled(logprobs=-2),
    "prompt_logprobs": sampled(prompt_logprobs=-2),
    "n": sampled(n=0),
    "n with greedy sampling": sampled(n=2, temperature=0),
    "thinking_token_budget": sampled(thinking_token_budget=-2),
    "stop without detokenize": sampled(stop=["x"], detokenize=False),
    "an empty stop": sampled(stop=[""]),
    "an empty stop alone": sampled(stop=""),
    "an empty bad word": sampled(bad_words=[""]),
    "str keys in logit_bias": sampled(logit_bias={"5": 1.0}),
    "an output kind": sampled(output_kind=3),
    "no constraint": sampled(structured_outputs={"_backend": "xgrammar"}),
    "two constraints": sampled(structured_outputs={**STRUCTURED, "regex": "a"}),
    "pattern sizes": sampled(repetition_detection={"max_pattern_size": 1, "min_pattern_size": 2}),
    "a count of patterns": sampled(repetition_detection={"max_pattern_size": 1, "min_count": 1}),
    "a utility of three elements": packed(UTILITY, [0, 1, "is_sleeping"]),
    "a utility that is no array": packed(UTILITY, {"a": 1}),
    "fault tolerance without arguments": packed(UTILITY, [0, 1, "handle_fault_tolerance", []]),
    "an abort that is no msgpack": [ABORT, b"\xc1"],
    "a wave that is no msgpack": [WAVE, b""],
}  # fmt: skip
DEADLY: dict[str, list[bytes]] = {
    "a prompt as long as the context": add(prompt_token_ids=[1] * CONTEXT_LENGTH),
    "a longer prompt": add(prompt_token_ids=[1] * (CONTEXT_LENGTH + 1)),
    "an empty prompt": add(prompt_token_ids=[]),
    "a token beyond the vocabulary": add(prompt_token_ids=[1, VOCAB_SIZE]),
    "a negative token": add(prompt_token_ids=[1, -1]),
    "a stop id beyond the vocabulary": sampled(stop_token_ids=[VOCAB_SIZE]),
    "a bias beyond the vocabulary": sampled(logit_bias={VOCAB_SIZE: 1.0}),
    "a bad word beyond the vocabulary": sampled(_bad_words_token_ids=[[1, VOCAB_SIZE]]),
    "no allowed ids": sampled(allowed_token_ids=[]),
    "an empty list of a bad word": sampled(_bad_words_token_ids=[[]]),
    "too many tokens of bad words": sampled(_bad_words_token_ids=[[1] * 9] * 120),
    "more logprobs than there are tokens": sampled(logprobs=VOCAB_SIZE + 1),
    "a seed of 64 bits": sampled(seed=2**63),
    "min_tokens of 32 bits": sampled(min_tokens=2**31 - 1, max_tokens=2**31 - 1),
    "an adapter, which it has none of": add(lora_request=["a", 1, "/a"]),
    "pooling": add(pooling_params=[None, None, None, None, "embed"]),
    "prompt embeds": add(prompt_embeds=["float32", [1, 2], msgpack.ExtType(3, bytes(8))]),
    "a second client": add(client_index=1),
    "a utility of a second client": packed(UTILITY, [1, 1, "is_sleeping", []]),
    "an abort of a number": packed(ABORT, 5),
    "the executor's failure": packed(b"\x04", None),
    **{
        f"a table of {name}": sampled(**{name: value})
        for name, value in (
            ("logit_bias", dict.fromkeys([*range(VOCAB_SIZE), *range(-25, 0)], 1.0)),
            ("_bad_words_token_ids", [[1]] * 129),
        )
    },
    **{
        f"a table of {name}": sampled(**{name: [*range(longest), *range(9)]})
        for name, longest in LONGEST.items()
        if name in ("allowed_token_ids", "logprob_token_ids")
    },
}  # fmt: skip
ANSWERED: dict[str, list[bytes]] = {
    "max_tokens nil": sampled(max_tokens=None),
    "no sampling params": add(sampling_params=None),
    "no prompt": add(prompt_token_ids=None),
    "an unknown backend of grammars": sampled(structured_outputs={"json": "{}"}),
    "a schema that is no JSON": sampled(structured_outputs={**STRUCTURED, "json": "{"}),
    "a structural tag that is no object": sampled(structured_outputs={"structural_tag": "[]", "_backend": "xgrammar"}),
    "an empty grammar": sampled(structured_outputs={"grammar": "", "_backend": "xgrammar"}),
}
HARMLESS: dict[str, list[bytes]] = {
    "temperature 2": sampled(temperature=2),
    "a key from the future": sampled(whatever=[1]),
    "top_k of all": sampled(top_k=-1),
    "a seed of -1": sampled(seed=-1),
    "bias of int": sampled(logit_bias={5: 1}),
    "a constraint": sampled(structured_outputs=STRUCTURED),
    "an element from the future": [ADD, b"\xdc\x00\x17" + payload()[3:] + b"\x91\x01"],
    "n": sampled(n=2),
    "a stop string": sampled(stop="ab"),
    "stop strings": sampled(stop=["a", "b"]),
}


def cases(table: dict[str, list[bytes]]) -> Any:
    return pytest.mark.parametrize("frames", [pytest.param(frames, id=name) for name, frames in table.items()])


@cases(DEAF)
def test_what_the_engine_cannot_read_leaves_it_deaf_and_changes_nothing(frames: list[bytes]) -> None:
    dialect, engine = dialect_of(max_loras=1)
    with pytest.raises(Deafening):
        dialect.take(frames, 0.0)
    assert engine.due is None


@cases(DEADLY)
def test_what_trips_the_engine_later_kills_it(frames: list[bytes]) -> None:
    with pytest.raises(Deadly) as caught:
        taken(frames, max_model_len=CONTEXT_LENGTH)
    assert caught.value.said is ("client" not in str(caught.value))  # these end the output thread without a word


def test_an_id_in_use_kills_it_and_a_free_one_may_come_again() -> None:
    dialect, engine = dialect_of()
    dialect.take(add(), 0.0)
    with pytest.raises(Deadly, match="in use"):
        dialect.take(add(), 0.0)
    dialect.take(packed(ABORT, ["a"]), 0.0)
    assert dialect.take(add(), 0.0).outcome == "queued"
    assert "a" in engine


@cases(ANSWERED)
def test_what_fails_while_it_is_prepared_is_answered_with_an_error(frames: list[bytes]) -> None:
    dialect, engine = dialect_of()
    what = dialect.take(frames, 0.0)
    assert (what.outcome, engine.due) == ("rejected", None)
    assert what.reason
    assert what.answer is not None
    (frame,) = dialect.encode(what.answer, 3)
    ((rid, tokens, *_, reason), finished) = outputs_of(frame)[0][0][:6], msgpack.unpackb(frame)[5]
    assert (rid, tokens, reason, finished) == ("a", [], 3, ["a"])
    decoded = decode_vllm([frame])
    assert (decoded.rows[0].finish_reason, decoded.engine_index, decoded.load) == ("error", 3, None)


@cases(HARMLESS)
def test_what_the_engine_takes_is_queued(frames: list[bytes]) -> None:
    assert taken(frames).outcome == "queued"


def test_a_message_of_a_kind_that_means_nothing_is_ignored() -> None:
    assert taken(packed(WAVE, [1, None])).event == "ignored"  # to a dense rank
    assert taken(packed(b"\x05", None)).event == "ignored"
    assert taken(packed(UTILITY, [0, 1, "handle_fault_tolerance", [1]])).event == "ignored"


def test_a_lockstep_rank_dies_of_a_wave_that_is_no_pair() -> None:
    lockstep = {"lockstep": True, "ranks": 2}
    what = taken(packed(WAVE, [4, 1]), **lockstep)
    assert (what.event, what.wave, what.exclude) == ("wave", 4, 1)
    for value in ([4], [4, 1, 2], 4, ["4", None]):
        with pytest.raises(Deadly):
            taken(packed(WAVE, value), **lockstep)


def test_aborts_are_silent_and_unknown_ids_mean_nothing() -> None:
    dialect, engine = dialect_of()
    for rid in "abc":
        dialect.take(add(request_id=rid), 0.0)
    what = dialect.take(packed(ABORT, ["a", "x", 5, "c"]), 1.0)
    assert (what.rids, what.answer) == (["a", "x", "c"], None)
    assert [rid in engine for rid in "abc"] == [False, True, False]
    assert dialect.between_steps(0) == []


def test_further_frames_are_noted_by_their_lengths() -> None:
    assert taken([*add(), b"12345"]).request["aux_bytes"] == [5]


def test_every_default_is_the_engines_own() -> None:
    own = vllm_structs.Sampling()
    for field in msgspec.structs.fields(vllm_structs.Sampling):
        default = next(f.default for f in SAMPLING if f.name == field.encode_name)
        value = getattr(own, field.name)
        assert default == (sorted(value) if isinstance(value, set) else value), field.name


# Outputs


class Prefill(msgspec.Struct, forbid_unknown_fields=True):
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_local_cached_tokens: int
    num_external_cached_tokens: int
    num_cache_creation_tokens: int


class Event(msgspec.Struct):
    type: int
    timestamp: float


Tensor = tuple[str, list[int], msgspec.msgpack.Ext | int]


class Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """EngineCoreOutput of 0.32."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: tuple[Tensor, Tensor, Tensor, list[int] | None] | None
    new_prompt_logprobs_tensors: tuple[Tensor, Tensor, Tensor, None, None] | None
    pooling_output: Tensor | None
    finish_reason: int | None
    stop_reason: int | str | None
    events: list[Event] | None
    kv_transfer_params: dict[str, Any] | None
    ec_transfer_params: dict[str, Any] | None
    trace_headers: dict[str, str] | None
    prefill_stats: Prefill | None
    routed_experts: Tensor | None
    num_nans_in_logits: int
    mm_cache_miss_hashes: list[str] | None
    new_sampling_mask: list[Any] | None
    spec_decode_metrics: dict[str, Any] | None
    prompt_token_id_logprobs: Tensor | None


class Outputs(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """EngineCoreOutputs of 0.32."""

    engine_index: int
    outputs: list[Row]
    scheduler_stats: dict[str, Any] | None
    timestamp: float
    utility_output: tuple[int, str | None, tuple[None, Any] | None] | None
    finished_requests: set[str] | None
    wave_complete: int | None
    start_wave: int | None
    weight_version: str | None


def typed(frame: bytes) -> Outputs:
    return msgspec.msgpack.decode(frame, type=Outputs)


def outputs_of(frame: bytes) -> tuple[list[list[Any]], dict[str, Any] | None]:
    elements = msgpack.unpackb(frame)
    return elements[1], elements[2]


def messages_of(frames: list[bytes], **options: Any) -> list[list[bytes]]:
    """The messages of one request's life, as a rank sends them."""
    dialect, engine = dialect_of(**options)
    assert dialect.take(frames, 0.0).outcome == "queued"
    messages = []
    while engine.due is not None:
        batch = engine.step(engine.due)
        if batch is not None:
            messages.append(dialect.encode(batch, 5))
    return messages


def rows_of(frames: list[bytes], **options: Any) -> list[DecodedOutput]:
    return [row for message in messages_of(frames, **options) for row in decoded(message).rows]


def decoded(message: list[bytes]) -> DecodedOutputs:
    """A message as the compiled decoder, and the reference decoder, have it."""
    found = decode_vllm(message)
    assert found == vllm.decode_outputs(message)
    return found


def tokens_of(rows: list[DecodedOutput]) -> list[int]:
    return [token for row in rows for token in row.token_ids]


def test_every_message_is_what_the_engines_own_structs_say() -> None:
    first, *_, last = [typed(message[0]) for message in messages_of(sampled(logprobs=1, prompt_logprobs=0))]
    assert (first.engine_index, first.weight_version, first.outputs[0].num_nans_in_logits) == (5, "default", 0)
    assert first.outputs[0].prefill_stats is not None
    assert first.outputs[0].events is not None
    assert [event.type for event in first.outputs[0].events] == [1, 2]
    assert (last.outputs[0].prefill_stats, last.outputs[0].events) == (None, None)
    assert last.timestamp >= first.timestamp > 0


def test_outputs_bring_new_tokens_and_the_counts_come_with_the_first() -> None:
    rows = rows_of(sampled(max_tokens=4, temperature=0.0), cached_tokens=2)
    assert [row.token_ids for row in rows] == [[token] for token in REPLIES.window(REPLIES.start(0), 0, 4)]
    assert [row.counts for row in rows] == [(3, 2), None, None, None]
    assert [row.finish_reason for row in rows] == ["", "", "", "length"]


def test_speculative_steps_bring_several_tokens() -> None:
    rows = rows_of(sampled(max_tokens=8, seed=7), tokens_per_step=3)
    assert tokens_of(rows) == REPLIES.window(REPLIES.start(7), 0, 8)
    assert max(len(row.token_ids) for row in rows) == 3


def test_sixteen_tokens_are_the_default_and_the_context_is_the_limit() -> None:
    assert len(rows_of(add())) == 16
    assert len(rows_of(sampled(max_tokens=100), max_model_len=10)) == 7
    assert len(rows_of(sampled(max_tokens=100), kv_pages=1, page_size=16)) == 12


def test_replies_follow_from_the_seed() -> None:
    assert tokens_of(rows_of(sampled(seed=7))) == REPLIES.window(REPLIES.start(7), 0, 16)
    assert tokens_of(rows_of(sampled(temperature=0.0, seed=7))) == REPLIES.window(REPLIES.start(0), 0, 16)
    assert tokens_of(rows_of(add(request_id="a"))) != tokens_of(rows_of(add(request_id="b")))


def ends(**sampling: Any) -> tuple[int, str, Any]:
    """(tokens, finish reason, stop reason) of a reply that would end by itself after 5 tokens."""
    rows = rows_of(sampled(seed=7, **sampling), output_tokens="5")
    return len(tokens_of(rows)), rows[-1].finish_reason, rows[-1].stop_reason


def test_eos_ends_a_reply_only_when_the_request_names_it() -> None:
    assert ends(_eos_token_id=EOS) == (5, "stop", None)
    assert ends(stop_token_ids=[EOS]) == (5, "stop", EOS)
    assert ends(_eos_token_id=EOS, stop_token_ids=[EOS]) == (5, "stop", None)
    assert ends() == (16, "length", None)
    assert ends(_eos_token_id=EOS - 1) == (16, "length", None)
    assert ends(ignore_eos=True, _eos_token_id=EOS) == (5, "stop", None)  # the frontend's business
    assert ends(_eos_token_id=EOS, min_tokens=9) == (9, "stop", None)
    assert ends(_eos_token_id=EOS, max_tokens=5) == (5, "stop", None)  # before the limit, where both are


def test_a_stop_token_is_the_stop_reason() -> None:
    stop = REPLIES.window(REPLIES.start(7), 3, 4)[0]
    rows = rows_of(sampled(seed=7, stop_token_ids=[stop]))
    assert (len(rows), rows[-1].finish_reason, rows[-1].stop_reason) == (4, "stop", stop)
    rows = rows_of(sampled(seed=7, stop_token_ids=[stop], min_tokens=4, max_tokens=4))
    assert (len(rows), rows[-1].stop_reason) == (4, stop)
    rows = rows_of(sampled(seed=7, _eos_token_id=stop))
    assert (len(rows), rows[-1].stop_reason) == (4, None)


@pytest.mark.parametrize(("more", "parts"), [(0, 0), (2, 0), (70, 2)])
def test_logprobs_come_with_each_token_and_large_ones_in_parts(more: int, parts: int) -> None:
    messages = messages_of(sampled(seed=7, max_tokens=3, logprobs=more))
    assert [len(message) - 1 for message in messages] == [parts] * 3
    found = [vllm.decode_logprobs(decoded(message).rows[0].colds[0]) for message in messages]
    values = REPLIES.logprob_window(REPLIES.start(7), 0, 3)
    for (entry,), token, value in zip(found, REPLIES.window(REPLIES.start(7), 0, 3), values, strict=True):
        assert entry[:2] == (token, value)
        assert len(entry[2]) == more
        assert not more or entry[2][0] == (token, value)


def test_logprobs_of_chosen_tokens() -> None:
    (row,) = rows_of(sampled(seed=7, max_tokens=1, logprob_token_ids=[8, 4]))
    assert [token for token, _ in vllm.decode_logprobs(row.colds[0])[0][2]] == [8, 4]


def test_all_logprobs_are_the_vocabulary() -> None:
    ((frame, ids, _values),) = messages_of(sampled(max_tokens=1, logprobs=-1))
    assert len(ids) == 4 * (VOCAB_SIZE + 1)
    assert typed(frame).outputs[0].new_logprobs is not None


@pytest.mark.parametrize(("version", "elements"), [("0.32.0", 5), ("0.26.0", 4)])
def test_prompt_logprobs_come_once_with_the_first_output(version: str, elements: int) -> None:
    frames = add(version=version, prompt_token_ids=list(range(50)), sampling={"prompt_logprobs": 1, "max_tokens": 2})
    first, second = messages_of(frames, vllm_version=version)
    assert (len(first), len(second)) == (3, 1)
    (row,) = decoded(first).rows
    nothing, *scored = vllm.decode_prompt_logprobs(row.colds[0])
    assert nothing is None
    assert [entry[0] for entry in scored] == list(range(1, 50))
    assert len(outputs_of(first[0])[0][0][3]) == elements
    assert decoded(second).rows[0].colds == []


def test_the_load_is_that_after_the_step() -> None:
    first, last = (decoded(message).load for message in messages_of(sampled(max_tokens=2), kv_pages=2))
    assert first is not None and last is not None  # noqa: PT018
    assert (first.running, first.waiting, first.kv_usage) == (1, 0, 0.5)
    assert (last.running, last.kv_usage) == (0, 0.0)


@pytest.mark.parametrize(
    ("version", "envelope", "output"), [("0.23.0", 8, 13), ("0.26.0", 8, 14), ("0.28.1", 8, 18), ("0.32.0", 9, 18)]
)
def test_versions_have_their_own_lengths(version: str, envelope: int, output: int) -> None:
    first, *_, (last,) = messages_of(add(version=version, sampling={"seed": 7}), vllm_version=version)
    elements = msgpack.unpackb(last)
    assert (len(elements), len(elements[1][0])) == (envelope, output)
    assert decoded(first).rows[0].counts == (3, 0)


def test_a_version_without_a_known_layout_is_refused() -> None:
    for version in ("0.19.0", "main"):
        with pytest.raises(ValueError, match="--vllm-version"):
            dialect_of(vllm_version=version)


def vector_of(name: str) -> Vector:
    (found,) = [v for v in of_kind("vllm", "") if v.name == f"0.32.0.{name}"]
    return found


def test_a_steps_message_has_the_bytes_of_the_engines_own_encoder() -> None:
    vector = vector_of("out_tokens_and_stats")
    dialect, _ = dialect_of()
    for rid in "ab":
        dialect.take(add(request_id=rid), 0.0)
    dialect.encode(batch_of("a", "b"), 1)  # their first outputs
    said = msgpack.unpackb(dialect.encode(batch_of("a", "b", tokens=[[1], [2, 3]]), 1)[0])
    wanted = vector.decoded
    assert said[1] == wanted[1]
    assert list(said[2]) == list(wanted[2])
    assert [type(value) for value in said] == [type(value) for value in wanted]


LOAD = Load(1, 0, 1, 9)


def batch_of(*rids: str, tokens: Any = None, reason: str = "", load: Load | None = LOAD) -> Batch:
    count = len(rids)
    new = tokens or [[1] for _ in rids]
    return Batch(
        list(rids), new, [reason] * count, [3] * count, [1] * count, [0] * count, [[]] * count, [[]] * count, load
    )


@both_decoders
@pytest.mark.parametrize("kind", ["garbage", "empty", "truncated", "trailing", "tag", "short", "map", "ragged"])
def test_spoiled_messages_are_refused(kind: str, decode: Any) -> None:
    dialect, _ = dialect_of()
    for column in SPOILABLE if kind == "ragged" else [""]:
        with pytest.raises(DecodeError):
            decode(dialect.spoil(kind, batch_of("a", "b"), 0, column))


def test_spoiling_needs_a_known_kind_and_column_and_leaves_the_requests_alone() -> None:
    dialect, _ = dialect_of()
    dialect.take(add(), 0.0)
    for kind, column in (("worse", ""), ("ragged", "nope")):
        with pytest.raises(ValueError, match=kind if column == "" else "must be one of request_id"):
            dialect.spoil(kind, batch_of("a"), 0, column)
    dialect.spoil("ragged", batch_of("a"), 0, "stop_reason")
    assert decode_vllm(dialect.encode(batch_of("a"), 0)).rows[0].counts == (3, 0)


# Handshake


@pytest.mark.parametrize("name", ["hs_hello_headless", "hs_ready_dp1", "hs_ready_moe_dp"])
def test_hello_and_ready_equal_the_engines_own_bytes(name: str) -> None:
    lockstep = {"lockstep": True, "ranks": 2} if name == "hs_ready_moe_dp" else {}
    dialect, _ = dialect_of(**lockstep)
    assert (dialect.hello() if "hello" in name else dialect.ready()) == vector_of(name).frame


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0"])
def test_registrations_have_the_engines_keys_in_its_order(version: str) -> None:
    (vector,) = [v for v in of_kind("vllm", "ready_response") if v.name == f"{version}.hs_registration"]
    said = msgpack.unpackb(dialect_of(vllm_version=version)[0].registration(3))
    assert list(said) == list(vector.decoded)
    assert said["vllm_version"] == version


def test_a_registration_tells_the_simulators_own_figures() -> None:
    options = {"ranks": 4, "max_model_len": 999, "kv_pages": 77, "page_size": 16, "max_running": 5, "max_loras": 2}
    for lockstep, size in ((False, 1), (True, 4)):
        payload = dialect_of(lockstep=lockstep, **options)[0].registration(3)
        said, raw = handshake.decode_registration(payload), msgpack.unpackb(payload)
        assert (said.family, said.data_parallel_size, said.data_parallel_rank) == ("vllm", size, 3)
        assert (said.max_model_len, said.num_gpu_blocks, said.block_size, said.max_num_seqs) == (999, 77, 16, 5)
        assert (raw["supports_lora"], raw["max_loras"]) == (True, 2)


def test_the_context_is_shortened_to_what_the_cache_holds() -> None:
    dialect, _ = dialect_of(kv_pages=2, page_size=16)
    context = handshake.decode_registration(dialect.registration(0)).max_model_len
    assert context == 31
    assert dialect.take(add(prompt_token_ids=[1] * (context - 1)), 0.0).outcome == "queued"
    with pytest.raises(Deadly):
        dialect.take(add(request_id="b", prompt_token_ids=[1] * context), 0.0)


def test_a_registration_can_be_overlaid_and_keys_taken_out() -> None:
    dialect, _ = dialect_of(registration='{"data_parallel_size": 2, "dtype": null, "new": [1]}')
    said = msgpack.unpackb(dialect.registration(0))
    assert (said["data_parallel_size"], said["new"], "dtype" in said) == (2, [1], False)
