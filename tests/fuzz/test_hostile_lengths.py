"""Frames whose headers promise more than they hold cost no more memory than a multiple of what they are."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest

import smg
from smg._codec import decode_tokenspeed, decode_vllm, measure_tokenspeed, measure_vllm
from smg.errors import DecodeError
from smg.mock import Simulator

FOUR_BILLION = b"\xff\xff\xff\xff"
TAG = msgpack.packb("BatchTokenIDOutSlim")
MEGABYTES = 1 << 20
SLIM, CORE, LEAST = 16, 32, 1024  # bytes of memory per byte of a frame, and for the first of each thing


def decode(backend: str, frame: bytes) -> object:
    return decode_tokenspeed(frame) if backend == "tokenspeed" else decode_vllm([frame])


def measure(backend: str, frame: bytes) -> tuple[int, int]:
    """Bytes of memory that decoding takes, and what it may take."""
    if backend == "tokenspeed":
        return measure_tokenspeed(frame), SLIM * len(frame) + LEAST
    return measure_vllm([frame]), CORE * len(frame) + LEAST


def slim(rows: int, tokens: bytes = b"\x90") -> bytes:
    """A frame of rows with no id, each with these tokens."""
    header = b"\xdd" + rows.to_bytes(4, "big")
    columns = [b"\xa0" * rows, tokens * rows, b"\xa0" * rows, *[b"\0" * rows] * 3, *[b"\x90" * rows] * 2]
    return b"\x99" + TAG + b"".join(header + column for column in columns)


def core(rows: int) -> bytes:
    return b"\x92\0\xdd" + rows.to_bytes(4, "big") + b"\x92\xa0\x90" * rows


HOSTILE = {
    "tokenspeed": {
        "rows": b"\x99" + TAG + b"\xdd" + FOUR_BILLION + bytes(100),
        "tokens": b"\x99" + TAG + b"\x91\xa1x\x91\xdd" + FOUR_BILLION + bytes(100),
        "text": b"\x99" + TAG + b"\x91\xdb" + FOUR_BILLION + bytes(100),
        "elements": b"\xdd" + FOUR_BILLION + TAG,
        "logprobs": slim(1)[:-6] + b"\xdd\0\0\0\1\xdd" + FOUR_BILLION,
        "depth": b"\x9f" + slim(1)[1:] + bytes(5) + b"\x91" * 10_000,
        "map": b"\x9f" + slim(1)[1:] + bytes(5) + b"\xdf" + FOUR_BILLION,
        "bin": b"\x9f" + slim(1)[1:] + bytes(5) + b"\xc6" + FOUR_BILLION,
    },
    "vllm": {
        "rows": b"\x92\0\xdd" + FOUR_BILLION + bytes(100),
        "tokens": b"\x92\0\x91\x92\xa1x\xdd" + FOUR_BILLION + bytes(100),
        "text": b"\x92\0\x91\x92\xdb" + FOUR_BILLION + bytes(100),
        "elements": b"\xdd" + FOUR_BILLION + bytes(100),
        "finished": b"\x96\0\x90\xc0\0\xc0\xdd" + FOUR_BILLION + bytes(100),
        "stats": b"\x93\0\x90\xdf" + FOUR_BILLION + bytes(100),
        "depth": b"\x9a\0" + b"\x91\x92\xa0\x90" + b"\xc0" * 7 + b"\x91" * 10_000,
        "shape": b"\x92\0\x91\x93\xa0\x90\x93\x93\xa3<i4\x92\xce" + FOUR_BILLION + b"\xce" + FOUR_BILLION + b"\xc7\0\3",
        "part": b"\x92\0\x91\x93\xa0\x90\x93\x93\xa3<i4\x92\1\1\xce" + FOUR_BILLION,
    },
}
CASES = [(backend, name) for backend, frames in HOSTILE.items() for name in frames]


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_a_hostile_length_is_refused_and_costs_no_more_than_its_frame(backend: str, name: str) -> None:
    frame = HOSTILE[backend][name]
    with pytest.raises(DecodeError):
        decode(backend, frame)
    cost, most = measure(backend, frame)
    assert cost <= most


@pytest.mark.parametrize("backend", ["tokenspeed", "vllm"])
@pytest.mark.parametrize("megabytes", [4, pytest.param(64, marks=pytest.mark.slow)])
def test_the_densest_frame_costs_no_more_than_its_multiple(backend: str, megabytes: int) -> None:
    size = megabytes * MEGABYTES
    frame = slim(size // 8) if backend == "tokenspeed" else core(size // 3)
    cost, most = measure(backend, frame)
    assert len(frame) > size // 2
    assert cost <= most


@pytest.mark.parametrize("backend", ["tokenspeed", "vllm"])
def test_64_megabytes_of_one_byte_cost_no_more_than_their_multiple(backend: str) -> None:
    for byte in (b"\xc1", b"\x90", b"\x91", b"\xdd", b"\xa0", b"\0"):
        frame = byte * (64 * MEGABYTES)
        with pytest.raises(DecodeError):
            decode(backend, frame)
        cost, most = measure(backend, frame)
        assert cost <= most


def test_token_ids_are_taken_up_to_32_bits_and_no_further() -> None:
    assert decode_tokenspeed(slim(1, b"\x92\xce\x80\0\0\0\xce" + FOUR_BILLION)).rows[0].token_ids == [2**31, 2**32 - 1]
    with pytest.raises(DecodeError, match="over 4294967295"):
        decode_tokenspeed(slim(1, b"\x91\xcf\0\0\0\1\0\0\0\0"))


def test_a_group_survives_hostile_frames_among_good_ones(ipc_dir: Path) -> None:
    frames = [*HOSTILE["tokenspeed"].values(), b"\xc1" * (64 * MEGABYTES), slim(100_000)[:-1]]
    url = f"ipc://{ipc_dir}/g"
    with (
        smg.EngineGroup(url, backend="tokenspeed", handshake_address="tcp://127.0.0.1:0") as group,
        Simulator(url, ranks=1, handshake_address=group.handshake_address, hold=True, step_ms=0, record=True) as mock,
    ):
        group.wait_ready(10)
        stream = group.submit([1, 2, 3], smg.SamplingParams(max_tokens=len(frames), seed=7))
        outputs = stream.blocking(timeout=10)
        tokens: list[int] = []
        mock.wait_for("add")
        for frame in frames:
            mock.raw(0, frame)
            mock.step()
            tokens += next(outputs).token_ids
        assert tokens == mock.reply(7, len(frames))
        assert group.counters["undecodable"] == [len(frames)]
        assert next(outputs, None) is None


def test_rows_with_one_id_twice_in_a_frame_are_taken_in_their_order() -> None:
    columns = [["x", "x"], [[1], [2]], ["", ""], [1, 1], [1, 2], [0, 0], [[], []], [[], []]]
    rows = decode_tokenspeed(msgpack.packb(["BatchTokenIDOutSlim", *columns])).rows
    assert [(row.rid, row.token_ids) for row in rows] == [("x", [1]), ("x", [2])]
