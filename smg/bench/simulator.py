"""Simulated TokenSpeed or vLLM ranks that cost little: the handshake in Python, every step in C (native/engine.c).

As a process of its own (`Simulator` starts and drives it), so that what it costs is not the router's. `smg mock`
behaves like an engine in every respect; this one only makes tokens, at a tenth of the cost, and stamps when.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import zmq
import zmq.backend.cython._zmq as pyzmq

from smg.bench import native
from smg.bench.turns import environment
from smg.protocol import handshake

TOTALS = ("adds", "aborts", "frames", "tokens", "undecodable")
VLLM_ONLY = {  # of its registration, what others do not say
    "supports_lora": False,
    "max_loras": 0,
    "mamba_block_size": None,
    "weight_transfer_backend": None,
    "enable_sleep_mode": False,
    "supports_draft_weight_updates": False,
    "effective_attention_block_size": None,
}
IDS = [f"{i:024x}" for i in range(4096)]  # of the requests that `fill` makes


class Simulator:
    """A simulator process that dials `address`, or, with `plain`, only pushes to that address.

    `stamps[row, 0]` is when the request with `seed` row arrived and `stamps[row, 1 + k]` when its token k was sent,
    in CLOCK_MONOTONIC nanoseconds. `engine`: whose wire. `elements`: of a TokenSpeed frame. `token_ids`: what it
    answers with. `start_at`: requests that must run before the first step is made.
    """

    def __init__(
        self,
        address: str,
        *,
        plain: bool = False,
        ranks: int = 1,
        step_ms: float = 10.0,
        start_at: int = 1,
        engine: str = "tokenspeed",
        elements: int = 10,
        token_ids: Sequence[int] = range(1000, 1256),
        rows: int = 4096,
        columns: int = 2,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="smg-stamps-")  # noqa: SIM115  closed with the simulator
        self._file.truncate(rows * columns * 8)
        self._map = mmap.mmap(self._file.fileno(), rows * columns * 8)
        self.stamps: npt.NDArray[np.uint64] = np.frombuffer(self._map, np.uint64).reshape(rows, columns)
        self.stamps_path = self._file.name
        self.rows, self.columns = rows, columns
        options: dict[str, Any] = {
            "address": address, "plain": plain, "ranks": ranks, "step_ms": step_ms, "start_at": start_at,
            "engine": engine, "elements": elements, "token_ids": list(token_ids), "rows": rows, "columns": columns,
            "stamps": self.stamps_path,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "smg.bench.simulator", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            pass_fds=pass_fds,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, op: str, **fields: Any) -> Any:
        """Have the process do one of the operations of `_operate`, and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the simulator ended with status {self.process.wait(5)}")
        return json.loads(answer)

    def totals(self) -> dict[str, int]:
        return dict(zip(TOTALS, self.call("totals"), strict=True))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._file.close()

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# -------------------------------------------------------------- the process


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(native.build("engine", shared=True)))
    void, u32, i64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int64
    library.engine_new.restype = void
    library.engine_new.argtypes = [u32, i64, u32, u32, void, u32, void, u32, u32]
    library.engine_rank.argtypes = [void, u32, void, ctypes.c_int, void]
    library.engine_add.argtypes = [void, u32, ctypes.c_char_p, u32, u32, i64]
    library.engine_wire.argtypes = [void, u32]
    library.engine_pace.argtypes = [void, i64, u32]
    library.engine_run.argtypes = [void, ctypes.c_int]
    library.engine_totals.argtypes = [void, void]
    library.engine_frame.argtypes = [void, u32, void]
    library.engine_frame.restype = ctypes.c_size_t
    if library.engine_libzmq(pyzmq.__file__.encode()):
        raise SystemExit("pyzmq's extension module does not give access to libzmq")
    return library


WIRES = ("tokenspeed", "vllm")  # as engine.c numbers them


def dial(context: zmq.Context[Any], address: str, ranks: int, engine: str = "tokenspeed") -> list[tuple[Any, Any]]:
    """The handshake of every rank, as the engine's own: (input, output) sockets."""
    said: dict[str, Any] = {"local": False} if engine == "vllm" else {"parallel_config_hash": None}
    dealers = []
    for index in range(ranks):
        dealer = context.socket(zmq.DEALER)
        dealer.identity = handshake.identity(index)
        dealer.connect(address)
        dealer.send(handshake.encode_status("HELLO", **said))
        dealers.append(dealer)
    sockets = []
    for index, dealer in enumerate(dealers):
        while not dealer.poll(1000):
            if os.getppid() == 1:
                raise SystemExit("nobody waits for this simulator any more")
        init = handshake.decode_init(dealer.recv())
        dealer.send(handshake.encode_status("READY", **said))
        taking, giving = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
        taking.identity = handshake.identity(index)
        taking.connect(init.inputs[0])
        giving.connect(init.outputs[0])
        taking.send(_registration(engine, ranks, index))
        sockets.append((taking, giving))
    return sockets


def _registration(engine: str, ranks: int, index: int) -> bytes:
    said = handshake.Registration(
        vllm_version="0.32.0" if engine == "vllm" else "tokenspeed-0.1.1",
        max_model_len=1 << 20,
        num_gpu_blocks=1 << 20,
        block_size=64,
        data_parallel_size=1 if engine == "vllm" else ranks,  # vLLM's dense ranks are each their own
        data_parallel_rank=index,
        max_num_seqs=4096,
    )
    payload = handshake.encode_registration(said)
    if engine == "vllm":
        values = msgpack.unpackb(payload)
        values["block_size"] = values.pop("prefix_granularity")
        payload = msgpack.packb({**values, **VLLM_ONLY})
    return bytes(payload)


def frame_of(requests: int, engine: str = "tokenspeed") -> bytes:
    """A step's frame for the first `requests` of IDS, as the C code makes it."""
    library = _library()
    tokens, stamps = (ctypes.c_uint32 * 256)(*range(1000, 1256)), (ctypes.c_uint64 * 2)()
    made = library.engine_new(1, 0, 10, 1, tokens, len(tokens), stamps, 1, 2)
    library.engine_wire(made, WIRES.index(engine))
    for row in range(requests):
        library.engine_add(made, 0, IDS[row].encode(), 100 * row, 1 + row % 2, -1)
    at = ctypes.c_void_p()
    size = library.engine_frame(made, 0, ctypes.byref(at))
    return ctypes.string_at(at, size)


def _operate(library: ctypes.CDLL, engine: int, message: dict[str, Any]) -> Any:
    op = message["op"]
    if op == "pace":  # step_ms, start_at
        library.engine_pace(engine, int(message["step_ms"] * 1e6), message["start_at"])
    elif op == "fill":  # count, limit: requests 0..count-1, as if they had arrived at rank 0
        for row in range(message["count"]):
            library.engine_add(engine, 0, IDS[row].encode(), 100, message["limit"], row)
    elif op == "totals":
        totals = (ctypes.c_uint64 * len(TOTALS))()
        library.engine_totals(engine, totals)
        return list(totals)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m smg.bench.simulator", description=__doc__)
    parser.add_argument("options", type=json.loads, help="JSON object; `Simulator` writes it")
    options = parser.parse_args().options
    library = _library()
    tokens = (ctypes.c_uint32 * len(options["token_ids"]))(*options["token_ids"])
    with open(options["stamps"], "r+b") as file:
        stamps = mmap.mmap(file.fileno(), 0)
    engine = library.engine_new(
        options["ranks"],
        int(options["step_ms"] * 1e6),
        options["elements"],
        options["start_at"],
        tokens,
        len(tokens),
        ctypes.addressof(ctypes.c_char.from_buffer(stamps)),
        options["rows"],
        options["columns"],
    )
    library.engine_wire(engine, WIRES.index(options["engine"]))
    context: zmq.Context[Any] = zmq.Context()
    context.linger = 0
    if options["plain"]:
        giving = context.socket(zmq.PUSH)
        giving.connect(options["address"])
        sockets = [(None, giving)]
    else:
        sockets = dial(context, options["address"], options["ranks"], options["engine"])
    for index, (taking, giving) in enumerate(sockets):
        taken = (None, -1) if taking is None else (taking.underlying, taking.fileno())
        library.engine_rank(engine, index, *taken, giving.underlying)
    commands = b""
    while True:
        if library.engine_run(engine, 0):
            raise SystemExit("an output socket refused a frame")
        got = os.read(0, 65536)
        if not got:
            break
        *lines, commands = (commands + got).split(b"\n")
        for line in lines:
            print(json.dumps(_operate(library, engine, json.loads(line))), flush=True)
    context.destroy(0)


if __name__ == "__main__":
    main()
