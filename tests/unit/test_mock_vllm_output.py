"""The simulator's vLLM dialect: outputs and handshake as the engine's own encoders make them."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest
from mock_vllm import EOS, REPLIES, add, dialect_of, sampled
from vectors import Vector, of_kind
from vllm_messages import both_decoders
from vllm_values import VOCAB_SIZE

from smg._codec import decode_vllm
from smg._decoded import DecodedOutput, DecodedOutputs
from smg.errors import DecodeError
from smg.mock.dialect import Deadly
from smg.mock.model import Batch, Load
from smg.mock.vllm import SPOILABLE
from smg.protocol import handshake, vllm


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
