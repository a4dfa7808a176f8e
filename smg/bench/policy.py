"""`smg bench policy`: how evenly each way to choose a rank spreads bursty, heavy-tailed load, and how long that waits.

A simulation (simulation.py) of ranks that batch continuously, fed with the same requests for every policy. Each
seed is a repeat. `load` is the offered work as a share of what the ranks sustain; bursts go to 1.8 times it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from smg.bench.accounting import percentile
from smg.bench.choosing import choosers
from smg.bench.results import Measurement
from smg.bench.simulation import Engine, Outcome, Request, simulate
from smg.bench.trace import SHAPES, Arrival, at_rate, draw, read
from smg.bench.turns import Plan

RANKS, LOADS = (2, 4, 8, 16, 32, 64), (30, 50, 70, 90)
QUICK_RANKS, QUICK_LOADS = (2, 8), (50, 70)
SWEEP_RANKS, SWEEP_LOAD = 8, 70  # loads vary with this many ranks, ranks at this load
SECONDS, QUICK_SECONDS = 120.0, 60.0
DEFAULT_SHAPES = ("chat", "code")
SEEDS = 2  # per repeat, since they are cheap
WARM_UP = 0.2  # of a trace, not counted: the ranks begin empty
SAMPLE = 20_000  # requests from which a shape's mean cost is taken


def _wait(request: Request) -> float:
    return (request.began - request.arrival.at) * 1e3


def _ttft(request: Request) -> float:
    return (request.first - request.arrival.at) * 1e3


def _of_requests(value: Callable[[Request], float], share: float, outcome: Outcome) -> float:
    counted = outcome.requests[int(WARM_UP * len(outcome.requests)) :]
    return percentile([value(request) for request in counted], share)


def _imbalance(outcome: Outcome) -> float:
    counted = outcome.imbalance[int(WARM_UP * len(outcome.imbalance)) :]
    return sum(counted) / len(counted)


METRICS: dict[str, tuple[str, str, Callable[[Outcome], float]]] = {
    "ttft_p50": ("TTFT, p50", "ms", partial(_of_requests, _ttft, 0.5)),
    "ttft_p99": ("TTFT, p99", "ms", partial(_of_requests, _ttft, 0.99)),
    "queue_p99": ("wait for a place, p99", "ms", partial(_of_requests, _wait, 0.99)),
    "imbalance": ("fullest rank over the mean", "×", _imbalance),
}


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--shape", choices=SHAPES, action="append", help="kind of traffic (default: chat and code)")
    parser.add_argument("--load", type=int, action="append", metavar="PERCENT", help="offered load (default: several)")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="requests from a CSV file with TIMESTAMP, ContextTokens, GeneratedTokens, brought to each load's rate",
    )


def configured(args: argparse.Namespace) -> Callable[[Plan], Iterator[Measurement]]:
    """The measurement that these options ask for."""
    trace = read(args.trace) if args.trace else None
    return partial(measure, shapes=args.shape, loads=args.load, trace=trace)


def measure(
    plan: Plan,
    shapes: Sequence[str] | None = None,
    loads: Sequence[int] | None = None,
    trace: Sequence[Arrival] | None = None,
) -> Iterator[Measurement]:
    engine = Engine()
    for shape in ["trace"] if trace else shapes or DEFAULT_SHAPES:
        for ranks, load in _cells(plan, loads):
            if plan.wants(f"policy.{shape}.ranks{ranks}.load{load}"):
                yield from _cell(plan, shape, ranks, load, engine, trace)


def _cells(plan: Plan, loads: Sequence[int] | None) -> list[tuple[int, int]]:
    """(ranks, load): a cross through the grid, not all of it."""
    many, much = (QUICK_RANKS, QUICK_LOADS) if plan.quick else (RANKS, LOADS)
    if plan.ranks:
        return [(plan.ranks, load) for load in loads or much]
    if loads:
        return [(ranks, load) for ranks in many for load in loads]
    return [(ranks, SWEEP_LOAD) for ranks in many] + [(SWEEP_RANKS, load) for load in much if load != SWEEP_LOAD]


def _cell(
    plan: Plan, shape: str, ranks: int, load: int, engine: Engine, trace: Sequence[Arrival] | None
) -> Iterator[Measurement]:
    name = f"policy.{shape}.ranks{ranks}.load{load}"
    given: dict[str, dict[str, list[float]]] = {metric: {} for metric in METRICS}
    seeds = range(plan.seed, plan.seed + SEEDS * plan.repeats)
    for seed in seeds:
        arrivals = _arrivals(plan, shape, ranks, load, engine, trace, seed)
        for chooser, make in choosers(ranks, engine, seed).items():
            outcome = simulate(arrivals, ranks, make(), engine)
            for metric, (_, _, value) in METRICS.items():
                given[metric].setdefault(chooser, []).append(value(outcome))
            found = given["ttft_p99"][chooser][-1]
            plan.progress(f"{name}: seed {seed}, {chooser}: {len(arrivals)} requests, TTFT p99 {found:.0f} ms")
        if trace:
            break  # nothing is drawn
    for metric, (title, unit, _) in METRICS.items():
        yield Measurement(
            f"{name}.{metric}",
            f"{shape}, {ranks} ranks, load {load} %: {title}",
            unit,
            given[metric],
            {"shape": shape, "ranks": ranks, "load": load, "seeds": [seeds[0], seeds[-1]]},
            paired=True,
        )


def _arrivals(
    plan: Plan, shape: str, ranks: int, load: int, engine: Engine, trace: Sequence[Arrival] | None, seed: int
) -> list[Arrival]:
    share = ranks * load / 100
    if trace:
        return at_rate(trace, engine.capacity(trace) * share)
    kind = SHAPES[shape]
    usual = draw(kind, SAMPLE, 1.0, 1)  # the same for every seed
    return draw(kind, engine.capacity(usual) * share, QUICK_SECONDS if plan.quick else SECONDS, seed)
