"""The simulator's vLLM dialect: requests as the engine reads them, bytes as its encoders make them."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest
import vllm_structs
from hypothesis import given
from hypothesis import strategies as st
from mock_vllm import ABORT, ADD, UTILITY, VERSION, WAVE, add, dialect_of, packed, payload, sampled
from vectors import Vector, of_kind
from vllm_values import CONTEXT_LENGTH, VOCAB_SIZE, Call, calls

from smg._codec import decode_vllm
from smg.errors import InvalidRequest
from smg.mock.dialect import Deadly, Deafening, Taken
from smg.mock.vllm_request import LONGEST, SAMPLING, read_add
from smg.protocol import vllm


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
    out = decode_vllm([frame])
    assert (out.engine_index, out.load, [rid for rid, _ in out.finished]) == (3, None, ["a"])
    assert [(row.rid, row.token_ids, row.finish_reason) for row in out.rows] == [("a", [], "error")]


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
