"""`smg bench scaling`: what a token costs as running requests, ranks and groups grow, over paced steps.

Each is varied by itself. With more ranks or groups at the same number of requests a frame holds fewer rows, so that
what a frame and a wake cost is shared by fewer tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

from smg.bench.results import OURS, Measurement
from smg.bench.turns import Plan, Receiver

STREAMS, QUICK_STREAMS = (1, 4, 16, 64, 256, 1024, 4096), (1, 16, 256, 4096)
RANKS, QUICK_RANKS = (1, 2, 4, 8, 16, 32, 64), (1, 8, 64)
GROUPS, QUICK_GROUPS = (1, 2, 4, 8), (1, 8)
REQUESTS = 256  # while ranks or groups vary
STEP_MS = 20.0  # 4,096 requests are 200,000 tokens a second then


def measure(plan: Plan) -> Iterator[Measurement]:
    yield from _sweep(plan, "streams", QUICK_STREAMS if plan.quick else STREAMS, ("outlet", "pyzmq", "receive"))
    yield from _sweep(plan, "ranks", QUICK_RANKS if plan.quick else RANKS, ("outlet", "streams"))
    yield from _sweep(plan, "groups", QUICK_GROUPS if plan.quick else GROUPS, ("outlet", "streams"))


def _sweep(plan: Plan, what: str, values: tuple[int, ...], kinds: tuple[str, ...]) -> Iterator[Measurement]:
    names = {"outlet": OURS, "streams": "smg, async for"}
    for value in values:
        name = f"scaling.{what}.{value}"
        if not plan.wants(name):
            continue
        varied = {"streams": plan.streams or REQUESTS, "ranks": plan.ranks or 1, "groups": 1} | {what: value}
        step_ms = STEP_MS if plan.step_ms is None else plan.step_ms
        tokens = plan.tokens or (50 if plan.quick else 100)
        common = ["--streams", varied["streams"], "--step-ms", step_ms, "--tokens", tokens]
        ours = ["--ranks", varied["ranks"], "--groups", varied["groups"]]
        contestants: dict[str, Callable[[], float]] = {}
        with ExitStack() as stack:
            for kind in kinds:
                more = ours if kind in names else []
                receiver = stack.enter_context(Receiver("consume", kind, *common, *more))
                contestants[names.get(kind, kind)] = receiver.per_token
            given = plan.turns(name, contestants)
        shown = f"{value} {what.rstrip('s') if value == 1 else what}"
        if what != "streams":
            shown += f", {varied['streams']} running"
        yield Measurement(
            name,
            f"{shown}, a token each every {step_ms:g} ms",
            "µs CPU/token",
            given,
            {**varied, "step_ms": step_ms, "tokens": tokens},
        )
