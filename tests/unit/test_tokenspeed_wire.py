"""TokenSpeed's output frames: its own encoders' bytes, every cut, every fault, both decoders."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vectors import Vector, of_kind

from smg._codec import decode_tokenspeed, measure_tokenspeed
from smg._decoded import DecodedBatch, DecodedRow, Load, WireId, parse_wire_id
from smg.errors import DecodeError
from smg.protocol import tokenspeed

OUTPUTS = of_kind("tokenspeed", "slim_")
REJECTED = of_kind("tokenspeed", "slim_", reject=True)
WIRE_ID = "00c0ffee0000002a00000007"

Decoder = Callable[[bytes], DecodedBatch]
both_decoders = pytest.mark.parametrize("decode", [decode_tokenspeed, tokenspeed.decode_outputs])


def pack(*elements: Any, tag: Any = "BatchTokenIDOutSlim") -> bytes:
    packed: bytes = msgpack.packb([tag, *elements])
    return packed


def good(**changed: Any) -> list[Any]:
    """The elements of a sound frame of three requests, after the tag, with some of them exchanged by name."""
    elements: dict[str, Any] = {
        "rids": ["a", WIRE_ID, "ü"],
        "output_ids": [[1, 2], [], [70000]],
        "finished_reasons": ["", "stop", "length"],
        "prompt_tokens": [3, 4, 500],
        "completion_tokens": [2, 9, 1],
        "cached_tokens": [0, 1, 2],
        "output_token_logprobs_val": [[-0.5, -1.5], [], [0]],
        "output_token_logprobs_idx": [[1, 2], [], [70000]],
        "engine_index": 1,
        "num_running": 2,
        "num_waiting": 3,
        "kv_active_pages": 1,
        "kv_total_pages": 4,
    }
    assert changed.keys() <= elements.keys()
    return list({**elements, **changed}.values())


def meaning(decoded: list[Any]) -> DecodedBatch:
    """What an output frame with these elements says, put down independently of either decoder."""
    _, rids, ids, reasons, prompts, completions, cached, values, indices, *tail = decoded
    rows = []
    for i, rid in enumerate(rids):
        counts = (prompts[i], completions[i], cached[i])
        rows.append(DecodedRow(rid, parse_wire_id(rid), ids[i], reasons[i], *counts, values[i], indices[i]))
    load = None
    if len(tail) >= 5 and tail[4]:
        load = Load(tail[1], tail[2], tail[3] / tail[4])
    return DecodedBatch(rows, tail[0] if tail else None, load)


# ---------------------------------------------------------- outputs


@both_decoders
@pytest.mark.parametrize("vector", OUTPUTS, ids=str)
def test_every_output_vector_decodes_to_what_it_says(vector: Vector, decode: Decoder) -> None:
    assert repr(decode(vector.frame)) == repr(meaning(vector.decoded))  # repr tells 0.0 from -0.0


@both_decoders
@pytest.mark.parametrize("vector", REJECTED, ids=str)
def test_every_vector_to_be_rejected_is(vector: Vector, decode: Decoder) -> None:
    with pytest.raises(DecodeError):
        decode(vector.frame)


@pytest.mark.parametrize("vector", OUTPUTS, ids=str)
def test_output_vectors_encode_to_the_same_bytes(vector: Vector) -> None:
    _, *columns = vector.decoded
    assert tokenspeed.encode_outputs(*columns[:8], tail=columns[8:]) == vector.frame


def test_columns_of_logprobs_that_are_off_encode_as_the_engine_writes_them() -> None:
    packed = tokenspeed.encode_outputs(["r1"], [[10]], [""], [3], [1], [0], tail=[1])
    assert packed == pack(["r1"], [[10]], [""], [3], [1], [0], [[]], [[]], 1)


@pytest.mark.parametrize("vector", OUTPUTS, ids=str)
def test_every_truncation_of_every_output_vector_raises(vector: Vector) -> None:
    frame = memoryview(vector.frame)
    for end in range(len(frame)):
        with pytest.raises(DecodeError):
            decode_tokenspeed(frame[:end])
    step = 1 if len(frame) < 1000 else 401
    for end in [*range(0, len(frame), step), len(frame) - 1]:
        with pytest.raises(DecodeError):
            tokenspeed.decode_outputs(bytes(frame[:end]))


def wrong(column: str, row: int, value: Any) -> bytes:
    elements = good()
    elements[list(good_names()).index(column)][row] = value
    return pack(*elements)


def good_names() -> list[str]:
    return [column.name for column in tokenspeed.COLUMNS] + list(tokenspeed.TAIL)


ZERO_ROWS: list[Any] = [[], [], [], [], [], [], [], []]
BAD_TEXT = msgpack.packb("\udcff\udcfe", unicode_errors="surrogateescape")

VAL, IDX = "output_token_logprobs_val", "output_token_logprobs_idx"
TAG = msgpack.packb("BatchTokenIDOutSlim")
HUGE = b"\xff\xff\xff\xff"

FAULTS = [
    ("nothing", b"", "frame", "goes on past the end"),
    ("not an array", msgpack.packb({"rids": []}), "frame", "must be an array, found a map"),
    ("too short", pack(*good()[:7]), "frame", "has 8 elements, needs 9"),
    ("wrong tag", pack(*good(), tag="BatchTokenIDOut"), "tag", "is not BatchTokenIDOutSlim"),
    ("tag no text", pack(*good(), tag=7), "tag", "must be text, found an integer"),
    ("trailing bytes", pack(*good()) + b"\xc0\xc0", "frame", "has 2 bytes after its end"),
    ("reserved byte", b"\x9e" + TAG + b"\xc1" * 13, "rids", "the reserved byte c1"),
    ("rids nil", pack(*good(rids=None)), "rids", "must be an array, found nil"),
    ("rid no text", pack(*good(rids=["a", b"b", "c"])), "rids", "rids[1] must be text, found bytes"),
    ("rid not UTF-8", pack(*good()).replace(b"\xa2\xc3\xbc", BAD_TEXT), "rids", "rids[2] is not valid UTF-8"),
    ("ids ragged", pack(*good(output_ids=[[1], [2]])), "output_ids", "has 2 entries, rids has 3"),
    ("ids of one flat", wrong("output_ids", 1, 5), "output_ids", "[1] must be an array, found an integer"),
    ("id a float", wrong("output_ids", 0, [1, 2.0]), "output_ids", "[0] must be an integer in 0..4294967295"),
    ("id a bool", wrong("output_ids", 2, [True]), "output_ids", "found true"),
    ("id negative", wrong("output_ids", 0, [1, -1]), "output_ids", "output_ids[0] is negative"),
    ("id too big", wrong("output_ids", 0, [2**32]), "output_ids", "output_ids[0] is over 4294967295"),
    (
        "reasons ragged",
        pack(*good(finished_reasons=[""] * 4)),
        "finished_reasons",
        "has 4 entries, rids has 3",
    ),
    ("reason nil", wrong("finished_reasons", 0, None), "finished_reasons", "[0] must be text, found nil"),
    (
        "reason not UTF-8",
        pack(*good()).replace(b"\xa4stop", BAD_TEXT),
        "finished_reasons",
        "[1] is not valid UTF-8",
    ),
    ("prompt ragged", pack(*good(prompt_tokens=[1])), "prompt_tokens", "has 1 entries, rids has 3"),
    ("prompt nil", wrong("prompt_tokens", 1, None), "prompt_tokens", "prompt_tokens[1] must be an integer"),
    ("completion negative", wrong("completion_tokens", 2, -5), "completion_tokens", "[2] is negative"),
    ("cached too big", wrong("cached_tokens", 0, 2**32), "cached_tokens", "[0] is over 4294967295"),
    ("values text", wrong(VAL, 0, "x"), VAL, "found text"),
    ("value nil", wrong(VAL, 0, [0.5, None]), VAL, "must hold floats"),
    ("values more", wrong(VAL, 1, [0.5]), IDX, "[1] has 0 entries"),
    ("value ids more", wrong(IDX, 0, [1, 2, 3]), IDX, "[0] has 3 entries, output_token_logprobs_val has 2"),
    ("value id negative", wrong(IDX, 0, [1, -2]), IDX, "is negative"),
    ("index nil", pack(*good(engine_index=None)), "engine_index", "in 0..2**64-1, found nil"),
    ("index negative", pack(*good(engine_index=-1)), "engine_index", "is negative"),
    ("running a float", pack(*good(num_running=1.0)), "num_running", "found a float"),
    ("waiting a bool", pack(*good(num_waiting=False)), "num_waiting", "found false"),
    ("pages a list", pack(*good(kv_active_pages=[])), "kv_active_pages", "found an array"),
    ("total text", pack(*good(kv_total_pages="")), "kv_total_pages", "found text"),
    ("extra too deep", pack(*good(), None)[:-1] + b"\x91" * 65 + b"\xc0", "extra", "64 levels"),
    ("extra far too deep", pack(*good(), None)[:-1] + b"\x91" * 10_000, "extra", "64 levels"),
    ("extra missing", pack(*good(), None)[:-1], "extra", "extra[14] goes on past the end"),
    ("2**32 elements", b"\xdd" + HUGE + pack(*good())[1:], "frame", "goes on past the end"),
    ("2**32 rids", b"\x9e" + TAG + b"\xdd" + HUGE + bytes(99), "rids", "past"),
    ("rid of 4 GB", pack([], *ZERO_ROWS[1:]).replace(b"\x90", b"\x91\xdb" + HUGE, 1), "rids", "past the end"),
    (
        "2**32 ids",
        pack(*good()).replace(b"\x93\x92\x01\x02", b"\x93\xdd" + HUGE + b"\x01\x02", 1),
        "output_ids",
        "output_ids[0] goes on past the end",
    ),
    ("more rids than room", pack(["r"] * 50, *ZERO_ROWS[1:]), "output_ids", "has 0 entries, rids has 50"),
    ("rids fill the frame", pack(["r"] * 50)[:-1].replace(b"\x92", b"\x99", 1), "rids", "past the end"),
]


@pytest.mark.parametrize(
    ("frame", "column", "message"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS]
)
def test_a_fault_names_its_column_and_what_was_found(frame: bytes, column: str, message: str) -> None:
    with pytest.raises(DecodeError) as compiled:
        decode_tokenspeed(frame)
    assert compiled.value.column == column
    assert message in str(compiled.value)
    with pytest.raises(DecodeError) as reference:
        tokenspeed.decode_outputs(frame)
    assert reference.value.column == column


@both_decoders
@pytest.mark.parametrize("elements", range(9, 14))
def test_a_frame_may_end_anywhere_after_its_nine_required_elements(elements: int, decode: Decoder) -> None:
    batch = decode(pack(*good()[: elements - 1]))
    assert batch.engine_index == (1 if elements > 9 else None)
    assert batch.load is None


def longer(*extra: bytes) -> bytes:
    """A sound frame with these packed elements after its fourteenth."""
    return b"\xdc" + struct.pack(">H", 14 + len(extra)) + pack(*good())[1:] + b"".join(extra)


EXTRA = {
    "one": [b"\x01"],
    "scalars": [
        b"\xc0",
        b"\xc3",
        msgpack.packb(2.5),
        msgpack.packb(-7),
        msgpack.packb("x"),
        msgpack.packb(b"y"),
    ],
    "nested": [msgpack.packb([1, [2, {"a": [3]}]]), b"\x80"],
    "keys that Python cannot have": [b"\x82\x91\x01\x02\x80\x03"],
    "text that is not UTF-8": [BAD_TEXT],
    "a timestamp that is none": [b"\xc7\x03\xffodd"],
    "long extension": [msgpack.packb(msgpack.ExtType(5, b"x" * 300))],
    "forty": [b"\x00"] * 40,
}


@both_decoders
@pytest.mark.parametrize("extra", EXTRA.values(), ids=EXTRA)
def test_elements_after_the_fourteenth_are_skipped_whatever_they_are(extra: list[bytes], decode: Decoder) -> None:
    assert decode(longer(*extra)) == decode(pack(*good()))


@both_decoders
@pytest.mark.parametrize(
    ("active", "total", "usage"),
    [
        (0, 4, 0.0),
        (1, 4, 0.25),
        (4, 4, 1.0),
        (9, 4, 1.0),
        (2**64 - 1, 2**64 - 1, 1.0),
        (1, 0, None),
        (0, 0, None),
    ],
)
def test_load_is_there_only_with_pages_and_stays_within_one(
    active: int, total: int, usage: float | None, decode: Decoder
) -> None:
    batch = decode(pack(*good(kv_active_pages=active, kv_total_pages=total)))
    assert batch.load == (None if usage is None else Load(2, 3, usage))


@both_decoders
def test_an_unknown_finish_reason_keeps_its_text(decode: Decoder) -> None:
    batch = decode(pack(*good(finished_reasons=["abort", "preempted", ""])))
    assert [row.finish_reason for row in batch.rows] == ["abort", "preempted", ""]


@both_decoders
def test_integers_are_taken_for_floats_and_signed_encodings_for_unsigned(decode: Decoder) -> None:
    frame = (
        pack(*good())
        .replace(msgpack.packb([0]), b"\x91\xd3" + struct.pack(">q", -7))
        .replace(b"\xcd\x01\xf4", b"\xd1\x01\xf4")
    )
    row = decode(frame).rows[2]
    assert (row.logprob_values, row.prompt_tokens) == ([-7.0], 500)


# ---------------------------------------------------------- wire ids


def decoded_id(rid: str) -> WireId | None:
    frame = tokenspeed.encode_outputs([rid], [[1]], [""], [1], [1], [0])
    compiled, reference = decode_tokenspeed(frame), tokenspeed.decode_outputs(frame)
    assert compiled == reference
    return compiled.rows[0].wire_id


def test_the_routers_own_ids_are_parsed() -> None:
    assert decoded_id(WIRE_ID) == WireId(0xC0FFEE, 0x2A, 7)
    assert decoded_id("0123456789abcdeffedcba98") == WireId(0x01234567, 0x89ABCDEF, 0xFEDCBA98)
    for name in ("x", "A.b_c-9", "n" * 32):
        assert decoded_id(f"{WIRE_ID}-{name}") == WireId(0xC0FFEE, 0x2A, 7)


@pytest.mark.parametrize(
    "rid",
    [
        "",
        WIRE_ID[:-1],
        WIRE_ID + "0",
        WIRE_ID + "-",
        WIRE_ID + "-" + "n" * 33,
        WIRE_ID + "_x",
        WIRE_ID + "-x y",
        WIRE_ID + "-ü",
        WIRE_ID + "-x\n",
        WIRE_ID.upper(),
        WIRE_ID[:-1] + "g",
        " " + WIRE_ID[1:],
        "0x" + WIRE_ID[2:],
        "٣" * 12,
    ],
)
def test_other_ids_are_nobodys(rid: str) -> None:
    assert decoded_id(rid) is None


@pytest.mark.parametrize("at", range(24))
def test_every_character_in_every_digits_place_is_judged(at: int) -> None:
    for code in range(0x80):
        rid = WIRE_ID[:at] + chr(code) + WIRE_ID[at + 1 :]
        assert (decoded_id(rid) is not None) is (chr(code) in "0123456789abcdef"), rid


@given(st.tuples(*[st.integers(0, 2**32 - 1)] * 3))
def test_any_three_numbers_come_back_from_their_digits(parts: tuple[int, int, int]) -> None:
    assert decoded_id("".join(f"{part:08x}" for part in parts)) == parts


# ---------------------------------------------------------- memory


@pytest.mark.parametrize("vector", OUTPUTS + REJECTED, ids=str)
def test_scratch_is_at_most_16_times_the_frame(vector: Vector) -> None:
    assert measure_tokenspeed(vector.frame) <= 16 * len(vector.frame)


@pytest.mark.parametrize("rows", [0, 1, 2, 100, 5000])
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_scratch_is_at_most_16_times_the_densest_frames(rows: int, tokens: int) -> None:
    zeros = [0] * rows
    frame = tokenspeed.encode_outputs([""] * rows, [[0] * tokens] * rows, [""] * rows, zeros, zeros, zeros)
    assert len(decode_tokenspeed(frame).rows) == rows
    assert measure_tokenspeed(frame) <= 16 * len(frame)


def test_a_frame_that_claims_more_rows_than_it_has_takes_no_memory_for_them() -> None:
    frame = pack([""] * 100_000, *ZERO_ROWS[1:])
    assert measure_tokenspeed(frame) == 0


@both_decoders
def test_a_frame_over_4_gib_is_refused_unread(decode: Decoder) -> None:
    frame = np.zeros(2**32, dtype=np.uint8)  # never touched, so never there
    with pytest.raises(DecodeError, match="4294967296 bytes") as caught:
        decode(frame.data)  # type: ignore[arg-type]
    assert caught.value.column == "frame"


# ---------------------------------------------------------- logprobs on demand


def test_logprobs_decode_from_the_spans_of_several_outputs() -> None:
    spans = b"".join(msgpack.packb(part) for part in ([-0.5, -1], [10, 11], [-2.0], [12]))
    assert tokenspeed.decode_logprobs(spans) == [(10, -0.5, []), (11, -1.0, []), (12, -2.0, [])]
    assert tokenspeed.decode_logprobs(b"") == []
