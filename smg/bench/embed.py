"""`smg bench embed`: the library in a serving process, over sockets, beside what one would write without it.

One token per step and request. Every receiver and every rank is a process of its own; CPU is what the operating system
accounts to the receiver, libzmq's thread included. consume.py, vllm_front.py, arrival.py and submitting.py say what
exactly is done, and run one contestant alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from smg.bench import frames
from smg.bench.accounting import percentile
from smg.bench.results import OURS, Measurement
from smg.bench.simulator import frame_of
from smg.bench.turns import Plan, Receiver, child

TITLES = {"outlet": "batch outlet", "streams": "`async for` per request"}
VLLM_KINDS = {"outlet": ("vllm client", "client"), "streams": ("vllm AsyncLLM", "llm")}  # rival, kind in vllm_front


def measure(plan: Plan) -> Iterator[Measurement]:
    for part in (consumers, arrival, requests):
        yield from part(plan)


# -------------------------------------------------------------- consumers


def consumers(plan: Plan) -> Iterator[Measurement]:
    """Outlets and streams against a queue per request, and above what receiving alone costs."""
    made = frame_of(300)
    if frames.reencode(made) != made:
        raise AssertionError("the simulator's frames are not msgspec's")
    paces = [("paced", 10.0 if plan.step_ms is None else plan.step_ms, plan.tokens or (100 if plan.quick else 200))]
    if plan.step_ms is None:
        paces.append(("saturated", 0.0, plan.tokens or 1000))
    for engine in plan.engines:
        for pace, step_ms, tokens in paces:
            for loop in ("asyncio", "uvloop"):
                if engine == "tokenspeed" or loop == "uvloop":  # which vLLM's own server has
                    yield from _consumers(plan, engine, pace, loop, step_ms, tokens)


def _consumers(plan: Plan, engine: str, pace: str, loop: str, step_ms: float, tokens: int) -> Iterator[Measurement]:
    case = f"embed.{engine}.{pace}.{loop}"
    kinds = [kind for kind in TITLES if plan.wants(f"{case}.{kind}")]
    if not kinds:
        return
    streams = plan.streams or 256
    # vLLM's own client balances over two ranks or more
    ranks = max(plan.ranks or 1, 2 if engine == "vllm" else 1)
    common = ["--loop", loop, "--streams", streams, "--step-ms", step_ms, "--tokens", tokens]
    with ExitStack() as stack:

        def receiver(module: str, kind: str, *options: object, python: str = sys.executable) -> Callable[[], float]:
            return stack.enter_context(Receiver(module, kind, *common, *options, python=python)).per_token

        contestants = {kind: receiver("consume", kind, "--engine", engine, "--ranks", ranks) for kind in kinds}
        rivals: dict[str, list[str]] = {kind: [] for kind in kinds}
        if engine == "tokenspeed":
            contestants |= {name: receiver("consume", name) for name in ("pyzmq", "receive")}
            rivals = {kind: ["pyzmq", "receive"] for kind in kinds}
        elif plan.vllm_python:
            for kind in kinds:
                name, theirs = VLLM_KINDS[kind]
                contestants[name] = receiver("vllm_front", theirs, "--ranks", ranks, python=plan.vllm_python)
                rivals[kind].append(name)
        else:
            plan.progress(
                f"{case}: vLLM's own front takes no part; --vllm-python PYTHON names an environment with vllm "
                "(scripts/make_engines_env.py makes one)"
            )
        given = plan.turns(case, contestants)
    shown = f"{step_ms:g} ms steps" if step_ms else "unthrottled"
    for kind in kinds:
        yield Measurement(
            f"{case}.{kind}",
            f"{engine}: {TITLES[kind]}, {streams} running, {shown}, {loop}",
            "µs CPU/token",
            {OURS: given[kind], **{name: given[name] for name in rivals[kind]}},
            {"engine": engine, "streams": streams, "step_ms": step_ms, "tokens": tokens, "ranks": ranks, "loop": loop},
        )


# -------------------------------------------------------------- frame to counters


def arrival(plan: Plan) -> Iterator[Measurement]:
    """Delays, and the part of them that is not a wait for a CPU."""
    count = 150 if plan.quick else 400
    loads = {"spin": "a Python thread spinning", "asyncio": "an asyncio loop at 100 %", "idle": "nothing"}
    for load, beside in loads.items():
        if not plan.wants(f"embed.arrival.{load}"):
            continue
        taken: dict[str, list[list[tuple[float, float]]]] = {"pump": [], "thread": []}

        def worst(kind: str, load: str = load, taken: Any = taken) -> float:
            delays = child("arrival", kind, load, count)
            taken[kind].append(delays)
            return percentile([delay for delay, _ in delays], 0.99)

        plan.turns(f"embed.arrival.{load}, p99 ms", {kind: partial(worst, kind) for kind in taken})
        for what, less, share in (("", "", 0.0), (".own", " less the wait for a CPU", 1.0)):
            for label, q in (("p50", 0.5), ("p99", 0.99)):
                values = {
                    name: [percentile([max(0.0, d - share * wait) for d, wait in run], q) for run in taken[kind]]
                    for name, kind in ((OURS, "pump"), ("python thread", "thread"))
                }
                yield Measurement(
                    f"embed.arrival.{load}{what}.{label}",
                    f"frame sent to counters up to date{less}, beside {beside}, {label}",
                    "ms",
                    values,
                    {"frames": count},
                )


# -------------------------------------------------------------- requests


def requests(plan: Plan) -> Iterator[Measurement]:
    """Submitting, waking, and requests that wait."""
    if plan.wants("embed.submit"):
        calls = plan.turns("embed.submit", {OURS: lambda: _median(child("submitting", "call", 2000))})
        yield Measurement("embed.submit", "`group.submit`, 100 prompt tokens", "µs CPU/call", calls)
    if plan.wants("embed.reach"):
        count, reached = 500 if plan.quick else 2000, []
        for repeat in range(plan.repeats):
            reached.append(child("submitting", "reach", count))
            plan.progress(f"embed.reach: {repeat + 1}/{plan.repeats}")
        for label, q in (("p50", 0.5), ("p99", 0.99)):
            values = {OURS: [percentile(run, q) for run in reached]}
            title = f"`submit` to the engine's read of it, one a millisecond, {label}"
            yield Measurement(f"embed.reach.{label}", title, "µs", values)
    if plan.wants("embed.wake"):
        counts = (64, 8, 1) if plan.ranks is None else (plan.ranks, 1)
        wakes = plan.turns("embed.wake", {_of(n): partial(_first, "wake", n) for n in counts})
        for count in counts[:-1]:
            samples = {_of(count): wakes[_of(count)], _of(1): wakes[_of(1)]}
            title = f"a frame and the wake for it, {count} ranks; rival: one rank"
            yield Measurement(f"embed.wake.ranks{count}", title, "µs CPU", samples, {"ranks": count})
    if plan.wants("embed.idle"):
        added = plan.turns("embed.idle", {OURS: partial(_first, "idle")})
        yield Measurement("embed.idle", "10,000 running requests that get nothing, resident memory", "MB", added)


def _first(*arguments: object) -> float:
    return float(child("submitting", *arguments)[0])


def _of(ranks: int) -> str:
    return f"{ranks} rank" + "s" * (ranks > 1)


def _median(values: list[float]) -> float:
    return percentile(values, 0.5)
