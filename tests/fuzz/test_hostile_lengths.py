"""Frames whose headers promise more than they hold cost no more memory than a multiple of what they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

import smg
from smg._codec import decode_tokenspeed, decode_vllm, measure_tokenspeed, measure_vllm
from smg.bench.decode import live_core
from smg.errors import DecodeError
from smg.mock import Simulator

FOUR_BILLION = b"\xff\xff\xff\xff"
TAG = msgpack.packb("BatchTokenIDOutSlim")
MEGABYTES = 1 << 20
MULTIPLE, LEAST = 16, 1024  # bytes of memory per byte of a frame, and for the first of each thing
PAGES = 256 << 10  # bytes that a process may come to use beside, for whatever reason
KEPT = 4 * MEGABYTES  # bytes that may stay for the next frame


def decode(backend: str, frame: bytes) -> object:
    return decode_tokenspeed(frame) if backend == "tokenspeed" else decode_vllm([frame])


def measure(backend: str, frame: bytes) -> tuple[int, int]:
    """Bytes of memory that decoding takes, and what it may take."""
    cost = measure_tokenspeed(frame) if backend == "tokenspeed" else measure_vllm([frame])
    return cost, MULTIPLE * len(frame) + LEAST


def slim(rows: int, tokens: bytes = b"\x90", rid: bytes = b"") -> bytes:
    """A frame of rows with this id and these tokens each."""
    header = b"\xdd" + rows.to_bytes(4, "big")
    rids = bytes((0xA0 + len(rid),)) + rid
    columns = [rids * rows, tokens * rows, b"\xa0" * rows, *[b"\0" * rows] * 3, *[b"\x90" * rows] * 2]
    return b"\x99" + TAG + b"".join(header + column for column in columns)


def core(rows: int, row: bytes = b"\x92\xa0\x90") -> bytes:
    """A frame of such rows: no id and no token if not said."""
    return b"\x92\0\xdd" + rows.to_bytes(4, "big") + row * rows


def dense(backend: str, size: int, rid: bytes) -> dict[str, bytes]:
    """The frames of about that size that take most, some of them with rows of a running request."""
    many = b"\xdd" + size.to_bytes(4, "big")
    if backend == "tokenspeed":
        return {
            "rows": slim(size // 8),
            "rows that go on": slim(size // 8)[: size // 2],
            "tokens": slim(1, many + bytes(size), rid),
        }
    no_ids = many + b"\xa0" * size
    return {
        "rows": core(size // 3),
        "rows that go on": core(size // 4, b"\x92\xa0\x91\0")[: size * 4 // 5],
        "tokens": core(1, b"\x92\xb8" + rid + many + bytes(size)),
        "tokens of many rows": core(size // 36, b"\x92\xb8" + rid + b"\x99" + bytes(9)),
        "stop reasons": core(size // 8, b"\x97\xa0\x90\xc0\xc0\xc0\xc0\0"),
        "values to keep": core(size // 10, b"\x99\xa0\x90\xc0\xc0\xc0\xc0\0\xc0\x80"),
        "finished ids": b"\x96\0\x90\xc0\0\xc0" + no_ids,
        "finished ids after a row": b"\x96" + core(1)[1:] + b"\xc0\0\xc0" + no_ids,
    }


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
RID = b"0" * 24
DENSE = [(backend, name) for backend in ("tokenspeed", "vllm") for name in dense(backend, 1, RID)]
CASES = [(backend, name) for backend, frames in HOSTILE.items() for name in frames]


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_a_hostile_length_is_refused_and_costs_no_more_than_its_frame(backend: str, name: str) -> None:
    frame = HOSTILE[backend][name]
    with pytest.raises(DecodeError):
        decode(backend, frame)
    cost, most = measure(backend, frame)
    assert cost <= most


@pytest.mark.parametrize("megabytes", [4, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("backend", "name"), DENSE)
def test_the_densest_frames_cost_no_more_than_their_multiple(backend: str, name: str, megabytes: int) -> None:
    size = megabytes * MEGABYTES
    frame = dense(backend, size, RID)[name]
    cost, most = measure(backend, frame)
    assert len(frame) >= size // 2
    assert cost <= most


def print_growth(backend: str, name: str) -> None:
    """In a process of its own: bytes by which its memory grew at most while it took a dense frame, and of those that it
    keeps; bytes of the frame. Then how many frames were taken, and whether the running request got tokens.
    """
    running, outlet, (stream,), _ = live_core(1, backend)
    frame = dense(backend, 4 * MEGABYTES, stream.request_id.encode())[name]
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use
    before = memory("VmRSS")
    running.feed(0, frame)
    peak = memory("VmHWM")
    outputs = len(outlet.take())
    stream.abort()
    print(peak - before, memory("VmRSS") - before, len(frame), running.counters()["frames"][0], outputs)


def memory(kind: str) -> int:
    """Bytes, as Linux counts them for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(kind))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's count of a process's pages")
@pytest.mark.parametrize(("backend", "name"), DENSE)
def test_a_router_that_takes_the_densest_frames_grows_by_no_more_than_their_multiple(backend: str, name: str) -> None:
    program = f"import test_hostile_lengths as t; t.print_growth({backend!r}, {name!r})"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths, "MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed is not kept
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    growth, kept, size, applied, outputs = map(int, done.stdout.split())
    assert applied == (name != "rows that go on")
    assert outputs == name.startswith("tokens")
    assert growth <= MULTIPLE * size + PAGES
    assert kept <= KEPT + PAGES
    assert growth > 2 * size or name.startswith("finished ids") or not applied  # of which there is no table


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
