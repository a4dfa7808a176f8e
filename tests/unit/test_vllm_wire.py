"""vLLM's output messages: its own encoders' bytes, every cut, every fault, both decoders."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from vectors import Vector
from vllm_messages import (
    HUGE,
    MESSAGES,
    STATS,
    WIRE_ID,
    Decoder,
    array,
    both_decoders,
    logprobs,
    message,
    pack,
    parts_of,
    row,
)

from smg._codec import decode_vllm
from smg._decoded import DecodedOutput, DecodedOutputs, Load, WireId, parse_wire_id
from smg.errors import DecodeError
from smg.protocol import vllm
from smg.protocol.vllm_outputs import ENVELOPE, OUTPUT, OUTPUT_BEFORE_EC

# ---------------------------------------------------------- what messages say


def plain(part: Any, aux: Sequence[bytes]) -> Any:
    """An array's numbers, without the code under test."""
    dtype, shape, data = part
    size = {"i4": "i", "i8": "q", "f4": "f", "int32": "i", "float32": "f"}[dtype.lstrip("<")]
    content = data.data if isinstance(data, msgpack.ExtType) else aux[data - 1]
    flat = struct.unpack(f"<{math.prod(shape)}{size}", content)
    if len(shape) == 1:
        return list(flat)
    return [list(flat[at : at + shape[1]]) for at in range(0, len(flat), shape[1])]


def entries(value: Any, aux: Sequence[bytes]) -> list[Any] | None:
    if value is None:
        return None
    pairs = [list(zip(*both, strict=True)) for both in zip(plain(value[0], aux), plain(value[1], aux), strict=True)]
    return [(token, logprob, rest) for (token, logprob), *rest in pairs]


def meaning(elements: list[Any]) -> DecodedOutputs:
    """What a message with these elements says, its cold parts aside; put down independently of both decoders."""
    said = dict.fromkeys(ENVELOPE) | dict(zip(ENVELOPE, elements, strict=False))
    rows = []
    for output in said["outputs"] or []:
        names = OUTPUT_BEFORE_EC if len(output) == 13 else OUTPUT
        named: dict[str, Any] = dict.fromkeys(OUTPUT) | dict(zip(names, output, strict=False))
        reason, prefill = named["finish_reason"], named["prefill_stats"]
        known = ["stop", "length", "abort", "error", "repetition"]
        rows.append(
            DecodedOutput(
                rid=named["request_id"],
                wire_id=parse_wire_id(named["request_id"]),
                token_ids=named["new_token_ids"],
                finish_reason="" if reason is None else known[reason] if reason < 5 else "error",
                stop_reason=named["stop_reason"],
                counts=(prefill["num_prompt_tokens"], prefill["num_cached_tokens"]) if prefill else None,
                colds=[],
            )
        )
    stats, utility = said["scheduler_stats"], said["utility_output"]
    load = None
    if stats:
        waiting = stats["num_waiting_reqs"] + stats["num_skipped_waiting_reqs"]
        load = Load(stats["num_running_reqs"], waiting, stats["kv_cache_usage"])
    wave = None
    if said["wave_complete"] is not None:
        wave = ("complete", said["wave_complete"])
    if said["start_wave"] is not None:
        wave = ("start", said["start_wave"])
    return DecodedOutputs(
        rows,
        said["engine_index"],
        load,
        [(rid, parse_wire_id(rid)) for rid in said["finished_requests"] or []],
        (utility[0], pack(utility)) if utility else None,
        wave,
        said["weight_version"],
    )


@both_decoders
@pytest.mark.parametrize("vector", MESSAGES, ids=str)
def test_every_vector_decodes_to_what_it_says(vector: Vector, decode: Decoder) -> None:
    decoded = decode(parts_of(vector))
    without_cold = replace(decoded, rows=[replace(output, colds=[]) for output in decoded.rows])
    assert repr(without_cold) == repr(meaning(vector.decoded))  # repr tells 0.0 from -0.0
    for output, elements in zip(decoded.rows, vector.decoded[1], strict=True):
        named = dict.fromkeys(OUTPUT) | dict(zip(OUTPUT, elements, strict=False))
        cold = b"".join(output.colds)
        assert vllm.decode_logprobs(cold) == entries(named["new_logprobs"], vector.aux)
        of_prompt = entries(named["new_prompt_logprobs_tensors"], vector.aux)
        assert vllm.decode_prompt_logprobs(cold) == (None if of_prompt is None else [None, *of_prompt])
        assert vllm.decode_kv_transfer(cold) == named["kv_transfer_params"]


@both_decoders
@pytest.mark.parametrize("vector", MESSAGES, ids=str)
def test_every_truncation_of_every_vector_raises(vector: Vector, decode: Decoder) -> None:
    step = 1 if len(vector.frame) < 700 else 1 if decode is decode_vllm else 397
    for end in [*range(0, len(vector.frame), step), len(vector.frame) - 1]:
        with pytest.raises(DecodeError):
            decode([vector.frame[:end], *vector.aux])


@both_decoders
@pytest.mark.parametrize("vector", [v for v in MESSAGES if v.aux], ids=str)
def test_a_message_that_lost_or_cut_its_other_parts_raises(vector: Vector, decode: Decoder) -> None:
    whole = parts_of(vector)
    for damaged in (whole[:-1], whole[:1], [*whole[:-1], whole[-1][:-1]], [*whole[:-1], whole[-1] + b"\0"]):
        with pytest.raises(DecodeError):
            decode(damaged)


def test_the_vectors_have_both_layouts_and_arrays_of_both_kinds() -> None:
    assert {v.version for v in MESSAGES} >= {"0.26.0", "0.32.0"}
    assert any(v.aux for v in MESSAGES)


@both_decoders
@pytest.mark.parametrize("elements", range(2, 19))
def test_an_output_may_end_anywhere_after_its_two_required_elements(elements: int, decode: Decoder) -> None:
    whole = row(finish_reason=1, stop_reason=7, prefill_stats={"num_prompt_tokens": 5})
    (output,) = decode([message(whole[:elements])]).rows
    assert (output.rid, output.token_ids) == (WIRE_ID, [300])
    assert output.finish_reason == ("length" if elements > 5 else "")
    assert output.stop_reason == (7 if elements > 6 else None)
    assert output.counts == ((5, 0) if elements > 11 and elements != 13 else None)


@both_decoders
def test_counts_are_found_where_the_versions_before_the_encoder_cache_have_them(decode: Decoder) -> None:
    names = dict.fromkeys(OUTPUT_BEFORE_EC) | {"request_id": "r", "new_token_ids": [1]}
    old = names | {"num_nans_in_logits": 0, "prefill_stats": {"num_prompt_tokens": 9, "num_cached_tokens": 4}}
    assert len(old) == 13
    assert decode([message(list(old.values()))]).rows[0].counts == (9, 4)


@both_decoders
@pytest.mark.parametrize("elements", range(2, 10))
def test_a_message_may_end_anywhere_after_its_outputs(elements: int, decode: Decoder) -> None:
    whole = msgpack.unpackb(message(row(), scheduler_stats=STATS, finished_requests=["a"], weight_version="v"))
    decoded = decode([pack(whole[:elements])])
    assert (decoded.engine_index, len(decoded.rows)) == (1, 1)
    assert decoded.load == (Load(2, 7, 0.25) if elements > 2 else None)
    assert decoded.finished == ([("a", None)] if elements > 5 else [])
    assert decoded.weight_version == ("v" if elements > 8 else None)


@both_decoders
@pytest.mark.parametrize("extra", [[1], [None, "x", b"y", 2.5, -7], [[1, [2, {"a": [3]}]]], list(range(40))])
def test_additional_elements_are_skipped_at_both_levels(extra: list[Any], decode: Decoder) -> None:
    plain_message = decode([message(row())])
    longer = msgpack.unpackb(message([*row(), *extra])) + extra
    assert decode([pack(longer)]) == plain_message


SKIPPED = [
    b"\xc0",
    b"\xc3",
    pack([1, [2, {"a": [3]}]]),
    b"\x82\x91\x01\x02\x80\x03",  # keys that Python cannot have
    b"\xa2\xff\xfe",  # text that is not UTF-8
    b"\xc7\x03\xffodd",  # a timestamp that is none
    pack(msgpack.ExtType(1, b"a pickle, to be left alone")),
]


@both_decoders
@pytest.mark.parametrize("value", SKIPPED, ids=[v.hex()[:12] for v in SKIPPED])
@pytest.mark.parametrize(
    "name",
    [name for name in OUTPUT[7:] if name not in ("kv_transfer_params", "prefill_stats")],
)
def test_elements_of_no_use_to_a_router_are_skipped_whatever_they_are(name: str, value: bytes, decode: Decoder) -> None:
    marked = message(row(**{name: "PLACEHOLDER"})).replace(pack("PLACEHOLDER"), value)
    assert decode([marked]) == decode([message(row())])


@both_decoders
@pytest.mark.parametrize(
    ("stats", "load"),
    [
        (STATS, Load(2, 7, 0.25)),
        ({"num_running_reqs": 2, "num_waiting_reqs": 3}, Load(2, 3, 0.0)),
        ({**STATS, "kv_cache_usage": 1.5}, Load(2, 7, 1.0)),
        ({**STATS, "kv_cache_usage": -0.5}, Load(2, 7, 0.0)),
        ({**STATS, "kv_cache_usage": math.nan}, Load(2, 7, 0.0)),
        ({**STATS, "kv_cache_usage": 1}, Load(2, 7, 1.0)),
        ({"num_running_reqs": 2**32 - 1, "num_waiting_reqs": 2**32 - 1, "num_skipped_waiting_reqs": 2**32 - 1},
         Load(2**32 - 1, 2**33 - 2, 0.0)),
        ({"num_running_reqs": 2, "kv_cache_usage": 0.5}, None),
        ({"num_waiting_reqs": 2, "step_counter": 5}, None),
        ({}, None),
        ({**STATS, 5: 6, "new": {"deep": [1, {}]}, "perf_stats": None}, Load(2, 7, 0.25)),
    ],
)  # fmt: skip
def test_load_needs_both_queues_and_nothing_else(stats: Any, load: Load | None, decode: Decoder) -> None:
    assert decode([message(scheduler_stats=stats)]).load == load


@both_decoders
def test_both_queues_of_waiting_requests_count(decode: Decoder) -> None:
    assert decode([message(row(), scheduler_stats=STATS)]).load == Load(2, 3 + 4, 0.25)


@both_decoders
@pytest.mark.parametrize("reason", [5, 9, 255, 2**63, -1, -(2**63)])
def test_a_finish_reason_that_nobody_knows_ends_the_request_as_an_error(reason: int, decode: Decoder) -> None:
    assert decode([message(row(finish_reason=reason))]).rows[0].finish_reason == "error"


@both_decoders
@pytest.mark.parametrize("reason", [0, 151643, -1, -(2**63), 2**63 - 1, "", "repetition_detected", "ü", None])
def test_stop_reasons_are_numbers_or_text(reason: Any, decode: Decoder) -> None:
    rows = decode([message(row(finish_reason=0, stop_reason=reason), row(finish_reason=0))]).rows
    assert [output.stop_reason for output in rows] == [reason, None]


@both_decoders
def test_the_routers_ids_are_told_from_others_in_outputs_and_in_finished_requests(decode: Decoder) -> None:
    decoded = decode([message(row(), row(request_id="x"), finished_requests=["y", WIRE_ID, WIRE_ID + "-n"])])
    mine = WireId(0xC0FFEE, 0x2A, 7)
    assert [output.wire_id for output in decoded.rows] == [mine, None]
    assert [wire_id for _, wire_id in decoded.finished] == [None, mine, mine]


@both_decoders
@pytest.mark.parametrize(
    ("elements", "wave"),
    [
        ({"wave_complete": 4}, ("complete", 4)),
        ({"start_wave": 2**64 - 1}, ("start", 2**64 - 1)),
        ({"wave_complete": 0, "weight_version": "v"}, ("complete", 0)),
    ],
)
def test_wave_notices_name_their_wave(elements: Any, wave: Any, decode: Decoder) -> None:
    assert decode([message(**elements)]).wave == wave


REPLY = [5, None, [None, True]]


@both_decoders
@pytest.mark.parametrize(
    "reply", [[5], [5, None], REPLY, [-2, "failed", None], [2**63 - 1, None, [None, {"a": [1]}], "more"]]
)
def test_utility_replies_are_cut_out_whole(reply: Any, decode: Decoder) -> None:
    assert decode([message(utility_output=reply)]).utility == (reply[0], pack(reply))


NEITHER = "frame is neither a step's outputs nor a utility reply nor a wave notice"


@both_decoders
@pytest.mark.parametrize(
    "frame",
    [
        pack([]),
        pack([1]),
        pack([1, []]),
        message(),
        message(weight_version="v"),
        message(row(), utility_output=REPLY),
        message(scheduler_stats=STATS, utility_output=REPLY),
        message(finished_requests=["a"], wave_complete=1),
        message(row(), start_wave=1),
        message(utility_output=REPLY, start_wave=1),
    ],
)
def test_a_message_of_no_kind_or_of_two_is_refused(frame: bytes, decode: Decoder) -> None:
    with pytest.raises(DecodeError, match=NEITHER) as caught:
        decode([frame])
    assert caught.value.column == "frame"


# ---------------------------------------------------------- faults


BAD_TEXT = b"\xa2\xff\xfe"
TWO = "new_logprobs"
PROMPT = "new_prompt_logprobs_tensors"


def raw(placed: bytes, **changed: Any) -> bytes:
    """A frame with packed bytes in place of the output's element that is "PLACEHOLDER"."""
    return message(row(**changed)).replace(pack("PLACEHOLDER"), placed)


def bad_logprobs(at: int, value: Any) -> bytes:
    found = logprobs()
    found[at] = value
    return message(row(new_logprobs=found))


FAULTS: list[tuple[str, bytes, str, str]] = [
    ("nothing", b"", "frame", "goes on past the end"),
    ("not an array", pack({"outputs": []}), "frame", "must be an array, found a map"),
    ("trailing bytes", message(row()) + b"\xc0\xc0", "frame", "has 2 bytes after its end"),
    ("2**32 elements", b"\xdd" + HUGE + message(row())[1:], "frame", "goes on past the end"),
    ("index nil", pack([None, [row()]]), "engine_index", "must be an integer of 0 or more, found nil"),
    ("index negative", pack([-1, [row()]]), "engine_index", "is negative"),
    ("index a float", pack([1.0, [row()]]), "engine_index", "found a float"),
    ("outputs nil", pack([1, None]), "outputs", "must be an array, found nil"),
    ("2**32 outputs", b"\x92\x01\xdd" + HUGE + bytes(99), "outputs", "goes on past the end"),
    ("outputs fill the frame", pack([1, [[]] * 99]), "outputs", "has 99 entries, which do not fit"),
    ("output a map", message({"a": 1, "b": 2}), "outputs", "outputs[0] must be an array, found a map"),
    ("output empty", message(row(), row()[:1]), "outputs", "outputs[1] has 1 elements, needs 2"),
    ("rid nil", message(row(request_id=None)), "request_id", "request_id[0] must be text, found nil"),
    ("rid not UTF-8", raw(BAD_TEXT, request_id="PLACEHOLDER"), "request_id", "is not valid UTF-8"),
    ("rid of 4 GB", raw(b"\xdb" + HUGE, request_id="PLACEHOLDER"), "request_id", "past the end"),
    ("tokens nil", message(row(new_token_ids=None)), "new_token_ids", "must be an array, found nil"),
    ("token negative", message(row(new_token_ids=[1, -1])), "new_token_ids", "is negative"),
    ("token too big", message(row(new_token_ids=[2**32])), "new_token_ids", "is over 4294967295"),
    ("token a float", message(row(new_token_ids=[1.0])), "new_token_ids", "found a float"),
    ("token a bool", message(row(), row(new_token_ids=[True])), "new_token_ids", "[1] must be an integer"),
    ("2**32 tokens", raw(b"\xdd" + HUGE, new_token_ids="PLACEHOLDER"), "new_token_ids", "past the end"),
    ("finish text", message(row(finish_reason="stop")), "finish_reason", "must be an integer or nil, found text"),
    ("finish a bool", message(row(finish_reason=False)), "finish_reason", "found false"),
    ("stop an array", message(row(stop_reason=[1])), "stop_reason", "must be an integer, text or nil"),
    ("stop too big", message(row(stop_reason=2**63)), "stop_reason", "is over 9223372036854775807"),
    ("stop not UTF-8", raw(BAD_TEXT, stop_reason="PLACEHOLDER"), "stop_reason", "is not valid UTF-8"),
    ("kv params text", message(row(kv_transfer_params="x")), "kv_transfer_params", "must be a map or nil"),
    ("cut before the waves", message(row())[:-3], "wave_complete", "goes on past the end"),
    ("prefill an integer", message(row(prefill_stats=5)), "prefill_stats", "must be a map or nil, found an integer"),
    ("prompt negative", message(row(prefill_stats={"num_prompt_tokens": -1})), "prefill_stats", "is negative"),
    ("cached a float", message(row(prefill_stats={"num_cached_tokens": 1.0})), "prefill_stats", "found a float"),
    ("events too deep", raw(b"\x91" * 65 + b"\xc0", events="PLACEHOLDER"), "events", "64 levels"),
    ("extra too deep", message([*row(), "PLACEHOLDER"]).replace(pack("PLACEHOLDER"), b"\x91" * 70 + b"\xc0"),
     "extra", "64 levels"),
    ("reserved byte", raw(b"\xc1", trace_headers="PLACEHOLDER"), "trace_headers", "the reserved byte c1"),
    ("stats an array", message(scheduler_stats=[1]), "scheduler_stats", "must be a map or nil, found an array"),
    ("running negative", message(scheduler_stats={**STATS, "num_running_reqs": -1}), "scheduler_stats", "negative"),
    ("waiting nil", message(scheduler_stats={**STATS, "num_waiting_reqs": None}), "scheduler_stats", "found nil"),
    ("usage text", message(scheduler_stats={**STATS, "kv_cache_usage": "1"}), "scheduler_stats", "found text"),
    ("utility an integer", message(utility_output=5), "utility_output", "must be an array or nil"),
    ("utility empty", message(utility_output=[]), "utility_output", "has no call_id"),
    ("call id text", message(utility_output=["5"]), "utility_output", "must have an integer as call_id"),
    ("call id too big", message(utility_output=[2**63]), "utility_output", "is over 9223372036854775807"),
    ("failure an integer", message(utility_output=[5, 5]), "utility_output", "must have text as failure_message"),
    ("finished text", message(finished_requests="a"), "finished_requests", "must be an array or nil"),
    ("finished an id", message(finished_requests=["a", 5]), "finished_requests", "[1] must be text"),
    ("wave text", message(wave_complete="1"), "wave_complete", "must be an integer of 0 or more, found text"),
    ("wave negative", message(start_wave=-1), "start_wave", "is negative"),
    ("both waves", message(wave_complete=1, start_wave=1), "start_wave", "must be nil beside wave_complete"),
    ("version an integer", message(row(), weight_version=5), "weight_version", "must be text"),
    ("logprobs flat", message(row(new_logprobs=5)), TWO, "must be an array or nil, found an integer"),
    ("logprobs short", message(row(new_logprobs=logprobs()[:2])), TWO, "has 2 elements, needs 3"),
    ("logprobs as lists", message(row(new_logprobs=[[[1]], [[-1.0]], [1]])), TWO, "has an array of 1 parts"),
    ("logprobs of all", bad_logprobs(3, [0, 1]), TWO, "must have nil as cu_num_generated_tokens"),
    ("dtype an integer", bad_logprobs(0, [4, [2, 2], 1]), TWO, "must name its dtype"),
    ("dtype unknown", bad_logprobs(0, ["<c8", [1], msgpack.ExtType(3, bytes(8))]), TWO, "must be arrays of integers"),
    ("ids of floats", bad_logprobs(0, array("<f4", [[5, 6], [7, 8]])), TWO, "must be arrays of integers, floats"),
    ("values of integers", bad_logprobs(1, array("<i4", [[5, 6], [7, 8]])), TWO, "must be arrays of integers, floats"),
    ("values bfloat16", bad_logprobs(1, ["bfloat16", [2, 2], msgpack.ExtType(3, bytes(8))]), TWO, "must be arrays of"),
    ("shape missing", bad_logprobs(0, ["<i4", None, msgpack.ExtType(3, bytes(16))]), TWO, "must have a shape"),
    ("shape of text", bad_logprobs(0, ["<i4", ["2"], msgpack.ExtType(3, bytes(16))]), TWO, "a shape of lengths"),
    ("shape negative", bad_logprobs(0, ["<i4", [-2, -2], msgpack.ExtType(3, bytes(16))]), TWO, "is negative"),
    ("shape too big", bad_logprobs(0, ["<i4", [2**31, 4], msgpack.ExtType(3, bytes(16))]), TWO, "more numbers than"),
    ("data short", bad_logprobs(0, ["<i4", [2, 2], msgpack.ExtType(3, bytes(15))]), TWO, "has 15 bytes of data"),
    ("data a pickle", bad_logprobs(0, ["<i4", [2, 2], msgpack.ExtType(1, bytes(16))]), TWO, "of extension type 1"),
    ("data a map", bad_logprobs(0, ["<i4", [2, 2], {"shm": 1}]), TWO, "must have data as bytes or as a part's"),
    ("data in the frame", bad_logprobs(0, ["<i4", [2, 2], 0]), TWO, "in part 0 of a message of 1"),
    ("data in no part", bad_logprobs(0, ["<i4", [2, 2], 1]), TWO, "in part 1 of a message of 1"),
    ("data negative", bad_logprobs(0, ["<i4", [2, 2], -1]), TWO, "is negative"),
    ("one dimension", bad_logprobs(0, array("<i4", [5, 6])), TWO, "must be arrays of shapes [n, k]"),
    ("rows differ", bad_logprobs(1, array("<f4", [[0.5, 0.5]])), TWO, "must be arrays of shapes [n, k]"),
    ("columns differ", bad_logprobs(1, array("<f4", [[0.5], [1.5]])), TWO, "must be arrays of shapes [n, k]"),
    ("ranks differ", bad_logprobs(2, array("<i8", [1, 2, 3])), TWO, "must be arrays of shapes [n, k]"),
    ("no columns", message(row(new_logprobs=logprobs([[], []], [[], []]))), TWO, "must be arrays of shapes"),
    ("prompt ranks differ", message(row(new_prompt_logprobs_tensors=logprobs(ranks=[1]))), PROMPT, "must be arrays"),
    ("pooling flat", message(row(pooling_output=[1.0, 2.0])), "pooling_output", "has an array of 2 parts"),
    ("pooling short", message(row(pooling_output=["float32", [3], msgpack.ExtType(3, bytes(8))])), "pooling_output",
     "its shape needs 12"),
]  # fmt: skip


@pytest.mark.parametrize(("frame", "column", "text"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS])
def test_a_fault_names_its_column_and_what_was_found(frame: bytes, column: str, text: str) -> None:
    with pytest.raises(DecodeError) as compiled:
        decode_vllm([frame])
    assert compiled.value.column == column
    assert text in str(compiled.value)
    with pytest.raises(DecodeError) as reference:
        vllm.decode_outputs([frame])
    assert reference.value.column == column
