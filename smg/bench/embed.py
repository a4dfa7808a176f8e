"""The library's figures, each beside its rival in the same run, as one table.

    python -m smg.bench.embed [--quick] [--part NAME]

256 running requests, one token per step, frames as msgspec makes them. Every receiver and every rank is a process of
its own; CPU is what the operating system accounts to the receiver, libzmq's thread included. Contestants take turns,
`--repeats` times: median (min–max), ratios of medians. consume.py, arrival.py and submitting.py say what
exactly is done, and run one contestant alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from smg.bench import accounting, frames
from smg.bench.accounting import figure, percentile, ratio
from smg.bench.simulator import frame_of

ROOT = Path(__file__).resolve().parents[2]
Row = list[object]
NAMES = ["measurement", "smg", "rival", "ratio", "bar"]


def child(module: str, *arguments: object) -> Any:
    """What a receiver, run alone in a process of its own, prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"smg.bench.{module}", *map(str, arguments)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        check=True,
        timeout=300,
    )
    return json.loads(done.stdout)


def turns(repeats: int, *contestants: Callable[[], float]) -> list[list[float]]:
    """What each contestant gave, turn by turn, in both directions."""
    given: list[list[float]] = [[] for _ in contestants]
    for repeat in range(repeats):
        order = range(len(contestants))
        for at in order if repeat % 2 == 0 else reversed(order):
            given[at].append(contestants[at]())
    return given


def verdict(reached: float, bar: float) -> str:
    return f"≥ {bar:g}: {'met' if reached >= bar else 'missed'}"


# -------------------------------------------------------------- decode and apply


def decode(repeats: int, quick: bool) -> Iterator[Row]:
    """Core.feed against a typed msgspec decode alone, in this process."""
    from smg.bench.decode import live_core

    for rows, bar in ((256, 5), (32, 4)):
        core, outlet, streams, frame = live_core(rows)
        assert frames.encode([stream.request_id for stream in streams], range(1234, 1234 + rows)) == frame
        decoder = frames.decoder().decode
        times = 50 if quick else 200

        def apply(core: Any = core, outlet: Any = outlet, frame: bytes = frame, times: int = times) -> float:
            begin = time.thread_time()
            core.feed(0, frame, times=times)
            cost = time.thread_time() - begin
            outlet.take()
            return cost / times * 1e6

        def by_msgspec(decoder: Any = decoder, frame: bytes = frame, times: int = times) -> float:
            begin = time.thread_time()
            for _ in range(times):
                decoder(frame)
            return (time.thread_time() - begin) / times * 1e6

        ours, theirs = turns(10 * repeats, apply, by_msgspec)
        assert core.counters()["late"] == core.counters()["undecodable"] == [0]
        reached = ratio(theirs, ours)
        yield [
            f"decode, check and apply a frame of {rows} rows; rival: typed msgspec decode alone (µs)",
            figure(ours),
            figure(theirs),
            f"{reached:.1f}×",
            verdict(reached, bar),
        ]


# -------------------------------------------------------------- consumers


def consumers(repeats: int, quick: bool) -> Iterator[Row]:
    """Outlets and streams against asyncio.Queue per request."""
    made = frame_of(300)
    assert frames.reencode(made) == made, "the simulator's frames are not msgspec's"
    kinds = ("outlet", "streams", "queues")
    for pace, step_ms, tokens in (("10 ms steps", 10, 100 if quick else 200), ("saturated", 0, 1000)):
        for loop in ("asyncio", "uvloop"):

            def cost(kind: str, loop: str = loop, step_ms: float = step_ms, tokens: int = tokens) -> float:
                result = child("consume", kind, loop, step_ms, tokens)
                assert result["tokens"] == 256 * tokens
                return float(result["cpu"] / result["tokens"] * 1e6)

            given = dict(zip(kinds, turns(repeats, *(lambda kind=kind: cost(kind) for kind in kinds)), strict=True))
            for kind, what, bar in (("outlet", "batch outlet", 3), ("streams", "`async for` per request", 1.5)):
                reached = ratio(given["queues"], given[kind])
                yield [
                    f"{what}, {pace}, {loop}; rival: PULL + msgspec + dict + asyncio.Queue per request "
                    "(µs of process CPU per token)",
                    figure(given[kind]),
                    figure(given["queues"]),
                    f"{reached:.1f}×",
                    verdict(reached, bar),
                ]


# -------------------------------------------------------------- frame to counters


def arrival(repeats: int, quick: bool) -> Iterator[Row]:
    """Delays, pooled over the runs, and the part of them that is not a wait for a CPU."""
    count = 150 if quick else 400
    loads = {"spin": "a Python thread spinning", "asyncio": "an asyncio loop at 100 %", "idle": "nothing"}
    for load, beside in loads.items():
        pooled: dict[str, list[tuple[float, float]]] = {"pump": [], "thread": []}
        for repeat in range(repeats):
            for kind in ("pump", "thread") if repeat % 2 == 0 else ("thread", "pump"):
                pooled[kind] += child("arrival", kind, load, count)
        for what, share in (("", 0.0), (" less the wait for a CPU", 1.0)):
            values = [[max(0.0, delay - share * wait) for delay, wait in pooled[kind]] for kind in ("pump", "thread")]
            shown = [" / ".join(f"{percentile(delays, q):.2f}" for q in (0.5, 0.99)) for delays in values]
            p99, rival = (percentile(delays, 0.99) for delays in values)
            yield [
                f"frame sent to counters up to date{what}, beside {beside}; rival: a Python thread that receives "
                f"(p50 / p99 of {repeats} × {count} frames, ms)",
                *shown,
                f"{rival / p99:.1f}× at p99",
                "–" if load == "idle" else f"p99 < 1 ms: {'met' if p99 < 1 else 'missed'}",
            ]


# -------------------------------------------------------------- requests


def requests(repeats: int, quick: bool) -> Iterator[Row]:
    """Submitting, waking, and requests that wait."""
    calls = [cost for _ in range(repeats) for cost in child("submitting", "call", 1000 if quick else 4000)]
    yield ["`group.submit`, 100 prompt tokens (µs of CPU per call, batches of 100)", figure(calls, 1), "–", "–", "–"]
    reached = [us for _ in range(repeats) for us in child("submitting", "reach", 500 if quick else 2000)]
    shown = " / ".join(f"{percentile(reached, q):.0f}" for q in (0.5, 0.99))
    yield ["`submit` to the engine's read of it, one a millisecond (p50 / p99, µs)", shown, "–", "–", "–"]
    counts = (1, 2, 8, 64)
    wakes = turns(repeats, *(lambda count=count: child("submitting", "wake", count)[0] for count in counts))
    for count, costs in zip(counts, wakes, strict=True):
        spread = ratio(costs, wakes[0])
        judged = "–" if count == 1 else f"≤ 2×: {'met' if spread <= 2 else 'missed'}"
        yield [f"a frame and the wake for it, {count} ranks (µs of process CPU)", figure(costs, 1), "–",
               f"{spread:.2f}× of 1 rank", judged]  # fmt: skip
    added = [child("submitting", "idle")[0] for _ in range(1 if quick else repeats)]
    worst = max(added)
    yield ["10,000 running requests that get nothing (MB of resident memory)", figure(added, 1), "–", "–",
           f"≤ 20 MB: {'met' if worst <= 20 else 'missed'}"]  # fmt: skip


PARTS: dict[str, Callable[[int, bool], Iterator[Row]]] = {
    "decode": decode,
    "consumers": consumers,
    "arrival": arrival,
    "requests": requests,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m smg.bench.embed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be given several times")
    args = parser.parse_args(argv)
    repeats = 2 if args.quick else args.repeats
    print(f"{accounting.machine()}\n{accounting.versions('pyzmq', 'msgspec', 'uvloop', 'numpy')}; {repeats} repeats\n")
    print(accounting.table(NAMES, []), flush=True)
    for name in args.part or PARTS:
        for row in PARTS[name](repeats, args.quick):
            print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()
