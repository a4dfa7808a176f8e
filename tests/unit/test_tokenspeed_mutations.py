"""The compiled decoder and its twin in Python agree on any frame: on its value, or on the column at fault."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vectors import of_kind

from smg._codec import decode_tokenspeed, measure_tokenspeed
from smg._decoded import DecodedBatch
from smg.errors import DecodeError
from smg.protocol.tokenspeed import decode_outputs, encode_outputs

ROUNDS = 10
MUTATIONS = 22_000  # in each round

TELLING = bytes([0x00, 0x7F, 0x80, 0x81, 0x90, 0x91, 0x9F, 0xA0, 0xA1, 0xB8, 0xBF, *range(0xC0, 0xE1), 0xFF])


def outcome(decode: Any, frame: bytes) -> DecodedBatch | str:
    """The decoded frame, or the column of the fault."""
    try:
        batch: DecodedBatch = decode(frame)
    except DecodeError as error:
        return error.column
    return batch


def agreed(frame: bytes) -> DecodedBatch | str:
    """What both decoders say about a frame, which is the same."""
    compiled, reference = outcome(decode_tokenspeed, frame), outcome(decode_outputs, frame)
    if compiled != reference and repr(compiled) != repr(reference):  # a NaN equals its repr only
        pytest.fail(f"compiled {compiled!r}, reference {reference!r} of {frame.hex()}")
    return compiled


def corpus() -> list[bytes]:
    """Small and middling good frames: vectors, and one of every feature."""
    frames = [v.frame for v in of_kind("tokenspeed", "slim_") if len(v.frame) < 400]
    rids = [f"{0xC0FFEE:08x}{slot:08x}{7:08x}" for slot in range(6)]
    rids[4] += "-name.4"
    columns = [rids, [[1], [200], [70000, 5], [], [2**31], [9]], ["", "stop", "", "length", "", "odd"]]
    columns += [
        [5] * 6,
        [300] * 6,
        [0] * 6,
        [[-0.5], [], [1, 2.5], [], [], []],
        [[1], [], [70000, 5], [], [], []],
    ]
    tail = [3, 4, 5, 6, 7, {"a": [1, [2, b"x"], None]}, "extra"]
    frames += [msgpack.packb(["BatchTokenIDOutSlim", *columns, *tail[:length]]) for length in (0, 1, 5, 7)]
    # The densest frames, where one more rid is one too many for the bytes there are.
    frames += [encode_outputs([""] * n, [[]] * n, [""] * n, *[[0] * n] * 3) for n in (1, 12, 15)]
    return frames


def mutate(frame: bytes, rng: random.Random) -> bytes:
    """One to three small changes anywhere."""
    data = bytearray(frame)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(7)
        if how == 0:
            data[at : at + 1] = bytes((rng.randrange(256),))
        elif how == 1:
            data[at : at + 1] = bytes((rng.choice(TELLING),))
        elif how == 2 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif how == 3 and at < len(data):
            data[at] = (data[at] + rng.choice((-1, 1))) & 0xFF
        elif how == 4:
            data[at:at] = bytes((rng.choice(TELLING),))
        elif how == 5:
            del data[at : at + rng.randint(1, 4)]
        else:
            start = rng.randrange(len(data) + 1)
            data[at:at] = data[start : start + rng.randint(1, 12)]
    return bytes(data)


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_both_decoders_agree_on_mutated_frames(seed: int) -> None:
    rng = random.Random(seed)
    frames = corpus()
    accepted = 0
    faults: set[str] = set()
    for _ in range(MUTATIONS):
        result = agreed(mutate(rng.choice(frames), rng))
        if isinstance(result, str):
            faults.add(result)
        else:
            accepted += 1
    assert accepted > MUTATIONS // 50
    assert len(faults) > 12  # nearly every column was at fault once


def test_the_default_run_makes_200_000_mutations() -> None:
    assert ROUNDS * MUTATIONS >= 200_000


u32 = st.integers(0, 2**32 - 1)
number = u32 | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.booleans() | st.none()
rid = st.text(max_size=60) | st.from_regex(r"[0-9a-f]{24}(-[A-Za-z0-9._-]{1,32})?", fullmatch=True)
reason = st.sampled_from(["", "stop", "length", "abort", "else"])
anything = st.recursive(
    st.none() | number | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def good_frames(draw: st.DrawFn) -> bytes:
    """Frames that the wire allows, of any size and length."""
    rows = draw(st.integers(0, 12))

    def column(entry: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(entry, min_size=rows, max_size=rows))

    pairs = column(st.lists(st.tuples(st.floats() | st.integers(-5, 5), u32), max_size=3))
    elements = [
        "BatchTokenIDOutSlim",
        column(rid),
        column(st.lists(u32, max_size=20)),
        column(reason),
        *(column(u32) for _ in range(3)),
        [[value for value, _ in row] for row in pairs],
        [[token for _, token in row] for row in pairs],
        *draw(st.lists(st.integers(0, 2**64 - 1), min_size=5, max_size=5)),
        *draw(st.lists(anything, max_size=3)),
    ]
    packed: bytes = msgpack.packb(elements[: draw(st.integers(9, len(elements)))])
    return packed


@st.composite
def doubtful_frames(draw: st.DrawFn) -> bytes:
    """Frames with the right outline and anything in it."""
    rows = st.integers(0, 4)

    def column(entry: st.SearchStrategy[Any]) -> Any:
        size = draw(rows)
        return draw(st.lists(entry | anything, min_size=size, max_size=size) | anything)

    elements = [
        draw(st.sampled_from(["BatchTokenIDOutSlim"] * 9 + ["BatchTokenIDOut"])),
        column(rid),
        column(st.lists(number, max_size=3)),
        column(reason),
        *(column(number) for _ in range(3)),
        column(st.lists(number, max_size=2)),
        column(st.lists(number, max_size=2)),
        *draw(st.lists(number | anything, max_size=8)),
    ]
    packed: bytes = msgpack.packb(elements)
    return packed


@given(good_frames())
def test_both_decoders_take_every_frame_that_the_wire_allows(frame: bytes) -> None:
    assert isinstance(agreed(frame), DecodedBatch)
    assert measure_tokenspeed(frame) <= 16 * len(frame)


@given(doubtful_frames())
def test_both_decoders_agree_on_frames_of_the_right_outline(frame: bytes) -> None:
    agreed(frame)
    assert measure_tokenspeed(frame) <= 16 * len(frame)


@given(good_frames(), st.data())
def test_both_decoders_refuse_every_cut_of_a_frame(frame: bytes, data: st.DataObject) -> None:
    assert isinstance(agreed(frame[: data.draw(st.integers(0, len(frame) - 1))]), str)


@given(st.binary(max_size=80))
def test_both_decoders_agree_on_any_bytes(data: bytes) -> None:
    agreed(data)
    agreed(b"\x99" + msgpack.packb("BatchTokenIDOutSlim") + data)
