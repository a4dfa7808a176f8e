"""The core without sockets: CPU time of a frame applied and taken, and of a request queued.

    python -m pytest benchmarks/bench_core.py

`python -m smg bench decode` has the frame alone, beside its rivals.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from smg._streams import submit
from smg.bench.decode import live_core
from smg.protocol import tokenspeed
from smg.sampling import SamplingParams


@pytest.mark.parametrize("rows", [32, 256])
@pytest.mark.benchmark(group="take a step", timer=time.process_time)
def test_feed_and_take(benchmark: Any, rows: int) -> None:
    """A frame applied and its outputs taken as (stream, output) pairs."""
    core, outlet, streams, frame = live_core(rows)

    def step() -> int:
        core.feed(0, frame)
        return len(outlet.take())

    assert benchmark(step) == rows == len(streams)


@pytest.mark.parametrize("prompt", [100, 8000])
@pytest.mark.benchmark(group="queue a request", timer=time.process_time)
def test_encode_and_submit(benchmark: Any, prompt: int) -> None:
    """A request encoded, its rank chosen, its slot reserved, its frames queued."""
    core, outlet, _, _ = live_core(1)
    ids = list(range(1000, 1000 + prompt))
    params = SamplingParams(max_tokens=128, temperature=0.7)

    def queue() -> Any:
        return submit(core, tokenspeed.encode_add("0" * 24, ids, params), tokenspeed.RID_OFFSET, outlet=outlet)

    benchmark.pedantic(queue, rounds=900)  # nothing sends: the queue holds 1,024
