"""The compiled decoder and its twin in Python agree on any message: on its value, or on the column at fault."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vectors import of_kind

from smg._codec import decode_vllm, measure_vllm
from smg._decoded import DecodedOutputs
from smg.errors import DecodeError
from smg.protocol.vllm_outputs import decode_outputs

ROUNDS = 10
MUTATIONS = 12_000  # in each round

TELLING = bytes([0x00, 0x7F, 0x80, 0x81, 0x90, 0x91, 0x93, 0xA0, 0xA1, 0xB8, *range(0xC0, 0xE1), 0xFF])


def outcome(decode: Any, parts: Sequence[bytes]) -> DecodedOutputs | str:
    """The decoded message, or the column of the fault."""
    try:
        decoded: DecodedOutputs = decode(parts)
    except DecodeError as error:
        return error.column
    return decoded


def agreed(parts: Sequence[bytes]) -> DecodedOutputs | str:
    """What both decoders say about a message, which is the same."""
    compiled, reference = outcome(decode_vllm, parts), outcome(decode_outputs, parts)
    if compiled != reference:
        pytest.fail(f"compiled {compiled!r}, reference {reference!r} of {[part.hex() for part in parts]}")
    return compiled


def corpus() -> list[list[bytes]]:
    """Small good messages: vectors, the layouts between theirs, and one of every feature."""
    messages = [
        [v.frame, *v.aux]
        for v in of_kind("vllm", "outputs", "utility_output", "dp_control")
        if len(v.frame) < 600 and sum(map(len, v.aux)) < 2000
    ]
    rid = f"{0xC0FFEE:08x}{9:08x}{7:08x}"
    stats = {"num_running_reqs": 1, "num_waiting_reqs": 300, "num_skipped_waiting_reqs": 2, "kv_cache_usage": 0.5}
    counts = {"num_prompt_tokens": 70000, "num_cached_tokens": 64, "num_new_tokens": 1}
    inline = [["<i4", [1, 2], msgpack.ExtType(3, bytes(8))], ["<f4", [1, 2], msgpack.ExtType(3, bytes(8))]]
    apart = [["<i8", [1, 1], 1], ["float64", [1, 1], 2], ["<i8", [1], 3], None]
    older = [[rid, [5], *[None] * 8, counts, None, 0], [rid + "-n", [], None, None, None, 1, 7, *[None] * 5, 0]]
    ranks = ["int64", [1], msgpack.ExtType(3, bytes(8))]
    newer = [
        [rid, [1, 2, 70000], [*inline, ranks, None], None, None, 0, "word", None, {"a": [1]}, *[None] * 9],
        [rid, [200], None, [*inline, ranks, None, None], *[None] * 7, counts, None, 0, None, None, None, None],
        ["", [9], apart, None, ["bool", [2], msgpack.ExtType(3, bytes(2))], *[None] * 13],
    ]
    messages.append([msgpack.packb([1, older, stats, 1.5, None, [rid, "x"], None, None])])
    messages.append([msgpack.packb([1, newer, stats, 1.5, None, None, None, None, "v", {"a": 1}]), *[bytes(8)] * 3])
    # The densest messages, where one more output is one too many for the bytes there are.
    messages += [[msgpack.packb([0, [["", []]] * count])] for count in (1, 5, 15)]
    return messages


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
def test_both_decoders_agree_on_mutated_messages(seed: int) -> None:
    rng = random.Random(seed)
    messages = corpus()
    accepted = 0
    faults: set[str] = set()
    for _ in range(MUTATIONS):
        frame, *aux = rng.choice(messages)
        if aux and rng.random() < 0.1:
            aux[rng.randrange(len(aux))] += b"\0"
        result = agreed([mutate(frame, rng), *aux])
        if isinstance(result, str):
            faults.add(result)
        else:
            accepted += 1
    assert accepted > MUTATIONS // 50
    assert len(faults) > 20  # nearly every column was at fault once


def test_the_default_run_makes_100_000_mutations() -> None:
    assert ROUNDS * MUTATIONS >= 100_000


u32 = st.integers(0, 2**32 - 1)
number = u32 | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.booleans() | st.none()
rid = st.text(max_size=40) | st.from_regex(r"[0-9a-f]{24}(-[A-Za-z0-9._-]{1,32})?", fullmatch=True)
anything = st.recursive(
    st.none() | number | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
DTYPES = {"<i4": 4, "<i8": 8, "int32": 4, "|u1": 1, "<f4": 4, ">f8": 8, "float32": 4, "bfloat16": 2, "<c16": 16}


class Parts:
    """Arrays of a message in the making, some of them in parts of their own."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.aux: list[bytes] = []

    def array(self, dtypes: Sequence[str], shape: Sequence[int]) -> list[Any]:
        dtype = self.draw(st.sampled_from(dtypes))
        size = DTYPES[dtype]
        for length in shape:
            size *= length
        if self.draw(st.booleans()):
            return [dtype, list(shape), msgpack.ExtType(3, bytes(size))]
        self.aux.append(bytes(size))
        return [dtype, list(shape), len(self.aux)]

    def logprobs(self) -> list[Any]:
        rows, columns = self.draw(st.integers(0, 3)), self.draw(st.integers(1, 3))
        integers, floats = ["<i4", "<i8", "int32", "|u1"], ["<f4", ">f8", "float32"]
        ids, values = self.array(integers, (rows, columns)), self.array(floats, (rows, columns))
        return [ids, values, self.array(integers, (rows,)), None][: self.draw(st.integers(3, 4))]


@st.composite
def good_messages(draw: st.DrawFn) -> list[bytes]:
    """A step's outputs as the wire allows them, of any layout."""
    parts = Parts(draw)

    def maybe(strategy: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | strategy)

    rows = []
    for _ in range(draw(st.integers(0, 5))):
        counts = st.dictionaries(st.sampled_from(["num_prompt_tokens", "num_cached_tokens", "other"]), u32)
        output = [
            draw(rid),
            draw(st.lists(u32, max_size=20)),
            parts.logprobs() if draw(st.booleans()) else None,
            parts.logprobs() if draw(st.booleans()) else None,
            parts.array(list(DTYPES), draw(st.lists(st.integers(0, 3), max_size=3))) if draw(st.booleans()) else None,
            maybe(st.integers(-5, 300)),
            maybe(st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8)),
            maybe(anything),
            maybe(st.dictionaries(st.text(max_size=3), anything, max_size=3)),
            maybe(anything),
            maybe(counts),
            maybe(counts),
            *draw(st.lists(anything, max_size=7)),
        ]
        rows.append(output[: draw(st.integers(2, len(output)))])
    stats = {"num_running_reqs": draw(u32), "num_waiting_reqs": draw(u32), "kv_cache_usage": draw(st.floats())}
    envelope = [
        draw(st.integers(0, 2**64 - 1)),
        rows,
        maybe(st.just(stats | draw(st.dictionaries(st.text(max_size=4), anything, max_size=3)))) if rows else stats,
        draw(anything),
        None,
        maybe(st.lists(rid, max_size=4)),
        None,
        None,
        maybe(st.text(max_size=4)),
        *draw(st.lists(anything, max_size=3)),
    ]
    return [msgpack.packb(envelope[: draw(st.integers(3, len(envelope)))]), *parts.aux]


@st.composite
def doubtful_messages(draw: st.DrawFn) -> list[bytes]:
    """Messages with the right outline and anything in it."""
    tensor = st.tuples(
        st.sampled_from(list(DTYPES)) | anything,
        st.lists(st.integers(0, 3), max_size=3) | anything,
        st.builds(msgpack.ExtType, st.sampled_from([1, 3]), st.binary(max_size=16)) | number,
    ).map(list)
    element = anything | st.lists(tensor, max_size=5) | tensor
    row = st.tuples(rid | anything, st.lists(number, max_size=3) | anything).flatmap(
        lambda start: st.lists(element, max_size=18).map(lambda rest: [*start, *rest])
    )
    rows = st.lists(row | anything, max_size=4)
    envelope = draw(st.tuples(number, rows | anything, *[anything] * 7).map(list) | st.lists(anything, max_size=9))
    return [msgpack.packb(envelope), *draw(st.lists(st.binary(max_size=16), max_size=3))]


@given(good_messages())
def test_both_decoders_take_every_message_that_the_wire_allows(parts: list[bytes]) -> None:
    assert isinstance(agreed(parts), DecodedOutputs)
    assert measure_vllm(parts) <= 16 * sum(map(len, parts)) + 1024


@given(doubtful_messages())
def test_both_decoders_agree_on_messages_of_the_right_outline(parts: list[bytes]) -> None:
    agreed(parts)
    assert measure_vllm(parts) <= 16 * sum(map(len, parts)) + 1024


@given(good_messages(), st.data())
def test_both_decoders_refuse_every_cut_of_a_message(parts: list[bytes], data: st.DataObject) -> None:
    frame, *aux = parts
    assert isinstance(agreed([frame[: data.draw(st.integers(0, len(frame) - 1))], *aux]), str)


@given(st.binary(max_size=80))
def test_both_decoders_agree_on_any_bytes(data: bytes) -> None:
    agreed([data])
    agreed([b"\x92\x00\x91" + data])
    agreed([b"\x92\x00\x91\x93\xa1r\x90" + data])
