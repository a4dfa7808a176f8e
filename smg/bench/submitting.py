"""Requests into the router: what a call takes, how soon the engine has it, what waiting ones and idle ranks cost.

    python -m smg.bench.submitting {call,reach,wake RANKS,idle}

`call`: CPU µs of this thread per `group.submit`, 100 prompt tokens. `reach`: µs from the call to the engine's read of
it, one request a millisecond. `wake`: CPU µs of this process, all threads, per frame of one token, of one rank of
RANKS, one frame a millisecond. `idle`: MB of resident memory that 10,000 running requests add.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from smg.bench import accounting
from smg.bench.ranks import groups_with_ranks
from smg.errors import Overloaded
from smg.sampling import SamplingParams

PROMPT = list(range(1000, 1100))


def call(count: int = 4000) -> list[float]:
    with groups_with_ranks("tokenspeed", 1, 1) as ([group], [ranks]):
        outlet = group.outlet()
        costs, streams = [], []
        params = SamplingParams(max_tokens=128, temperature=0.7)
        for _ in range(count // 100):
            begin = time.thread_time()
            streams += [group.submit(PROMPT, params, outlet=outlet) for _ in range(100)]
            costs.append((time.thread_time() - begin) / 100 * 1e6)
            while ranks.adds() < len(streams):
                time.sleep(0.001)
        return costs


def reach(count: int = 2000) -> list[float]:
    with groups_with_ranks("tokenspeed", 1, 1, rows=count) as ([group], [ranks]):
        outlet = group.outlet()
        begun, streams = [], []
        for seed in range(count):
            params = SamplingParams(max_tokens=128, temperature=0.7, seed=seed)
            begun.append(time.monotonic_ns())
            streams.append(group.submit(PROMPT, params, outlet=outlet))
            time.sleep(0.001)
        while ranks.adds() < count:
            time.sleep(0.001)
        return [(int(ranks.simulator.stamps[seed, 0]) - begin) / 1e3 for seed, begin in enumerate(begun)]


def wake(count: int, frames: int = 1000) -> list[float]:
    with groups_with_ranks("tokenspeed", 1, count) as ([group], [ranks]):
        outlet = group.outlet()
        stream = group.submit(PROMPT, SamplingParams(max_tokens=frames), outlet=outlet, rank=0)
        time.sleep(0.2)
        begin = time.process_time()
        ranks.start(1)
        while group.counters["frames"][0] < frames:
            time.sleep(0.1)
        cost = time.process_time() - begin
        assert stream.rank == 0
        return [cost / frames * 1e6]


def idle(count: int = 10_000) -> list[float]:
    with groups_with_ranks("tokenspeed", 1, 1) as ([group], [ranks]):
        outlet = group.outlet()
        streams: list[Any] = [None] * count  # a list is the caller's
        gc.collect()
        before = accounting.rss_mb(os.getpid()) - accounting.rss_mb(ranks.simulator.pid)
        for at in range(count):
            while streams[at] is None:
                try:
                    streams[at] = group.submit(PROMPT, outlet=outlet)
                except Overloaded:  # the engine has not read the last thousand yet
                    time.sleep(0.001)
        while ranks.adds() < count:
            time.sleep(0.01)
        return [accounting.rss_mb(os.getpid()) - accounting.rss_mb(ranks.simulator.pid) - before]


def main() -> None:
    kinds: dict[str, Callable[..., list[float]]] = {"call": call, "reach": reach, "wake": wake, "idle": idle}
    if len(sys.argv) < 2 or sys.argv[1] not in kinds:
        raise SystemExit(__doc__)
    print(json.dumps(kinds[sys.argv[1]](*map(int, sys.argv[2:]))))


if __name__ == "__main__":
    main()
