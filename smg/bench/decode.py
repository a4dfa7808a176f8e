"""`smg bench decode`: a step decoded, checked and applied in a core without sockets, beside decoding it alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import msgpack

from smg._fastpath import Core
from smg._outlets import Outlet, new_outlet
from smg._streams import submit
from smg.bench import frames, vllm_frames
from smg.bench.results import OURS, Measurement
from smg.bench.turns import Plan
from smg.protocol import tokenspeed, vllm
from smg.sampling import SamplingParams

LIVE = 2  # as Core.set_state numbers lifecycle.State
FRAMES: dict[str, ModuleType] = {"tokenspeed": frames, "vllm": vllm_frames}
ROWS = (32, 256, 1024)


def live_core(requests: int, engine: str = "tokenspeed") -> tuple[Core, Outlet, list[Any], bytes]:
    """A core with one live rank, its outlet, the running requests' streams and a step's frame for them."""
    core = Core(1, backend=engine, decode_cold=lambda data, top: None, stall_timeout=0, max_inflight=0)
    core.set_state(0, LIVE)
    outlet = new_outlet(core)
    params = SamplingParams(max_tokens=1 << 20)
    if engine == "vllm":
        payload, offset = vllm.encode_add("0" * 24, [1, 2, 3], params), vllm.RID_OFFSET
    else:
        payload, offset = tokenspeed.encode_add("0" * 24, [1, 2, 3], params), tokenspeed.RID_OFFSET
    streams = [submit(core, payload, offset, outlet=outlet) for _ in range(requests)]
    frame: bytes = FRAMES[engine].encode([stream.request_id for stream in streams], range(1234, 1234 + requests))
    return core, outlet, streams, frame


def measure(plan: Plan) -> Iterator[Measurement]:
    for engine in plan.engines:
        for rows in (plan.streams,) if plan.streams else ROWS:
            if plan.wants(f"decode.{engine}.rows{rows}"):
                yield _frame(plan, engine, rows)


def _frame(plan: Plan, engine: str, rows: int) -> Measurement:
    core, outlet, streams, frame = live_core(rows, engine)
    decode = FRAMES[engine].decoder().decode
    times = 50 if plan.quick else 200

    def apply() -> float:
        begin = time.thread_time()
        core.feed(0, frame, times=times)
        cost = time.thread_time() - begin
        outlet.take()
        return cost / times * 1e6

    def plainly(decode: Callable[[bytes], Any]) -> float:
        begin = time.thread_time()
        for _ in range(times):
            decode(frame)
        return (time.thread_time() - begin) / times * 1e6

    contestants: dict[str, Callable[[], float]] = {
        OURS: apply,
        "msgspec": lambda: plainly(decode),
        "msgpack": lambda: plainly(msgpack.unpackb),
    }
    name = f"decode.{engine}.rows{rows}"
    for contestant in contestants.values():  # caches
        contestant()
    samples = replace(plan, repeats=10 * plan.repeats, progress=lambda line: None).turns(name, contestants)
    plan.progress(f"{name}: {10 * plan.repeats} × {times} frames each")
    counters = core.counters()
    if counters["late"] != [0] or counters["undecodable"] != [0] or len(streams) != rows:
        raise AssertionError(f"{name}: not every row was applied: {counters}")
    return Measurement(
        name,
        f"{engine} frame of {rows} rows: decode, check and apply; rivals decode alone",
        "µs",
        samples,
        {"engine": engine, "streams": rows},
    )
