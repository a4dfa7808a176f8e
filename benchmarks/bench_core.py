"""The core without sockets: a frame decoded and applied, taken, a request queued.

    python -m pytest benchmarks/bench_core.py

Decoding counts beside a typed msgspec decode of the same frame, which has not routed anything yet.
"""

from __future__ import annotations

from typing import Any

import pytest

from smg._streams import submit
from smg.bench import frames
from smg.bench.decode import live_core
from smg.protocol import tokenspeed
from smg.sampling import SamplingParams

BATCH = 50  # frames per call, so that the call itself does not count


@pytest.mark.parametrize("rows", [32, 256, 1024])
@pytest.mark.benchmark(group="decode a frame")
class TestDecode:
    def test_apply(self, benchmark: Any, rows: int) -> None:
        """Decoded, validated, every request found, its token appended, counters and load updated (× 50)."""
        core, outlet, streams, frame = live_core(rows)

        def taken() -> None:  # between rounds, so that what waits does not grow
            outlet.take()

        benchmark.pedantic(lambda: core.feed(0, frame, times=BATCH), setup=taken, rounds=100)
        assert core.counters()["late"] == [0]
        assert core.counters()["undecodable"] == [0]
        assert len(streams) == rows

    def test_msgspec(self, benchmark: Any, rows: int) -> None:
        """A typed msgspec decode and nothing else (× 50)."""
        *_, frame = live_core(rows)
        decode = frames.decoder().decode

        def decode_all() -> None:
            for _ in range(BATCH):
                decode(frame)

        benchmark.pedantic(decode_all, rounds=100)


@pytest.mark.parametrize("rows", [32, 256])
@pytest.mark.benchmark(group="take a step")
def test_feed_and_take(benchmark: Any, rows: int) -> None:
    """A frame applied and its outputs taken as (stream, output) pairs."""
    core, outlet, streams, frame = live_core(rows)

    def step() -> int:
        core.feed(0, frame)
        return len(outlet.take())

    assert benchmark(step) == rows == len(streams)


@pytest.mark.parametrize("prompt", [100, 8000])
@pytest.mark.benchmark(group="queue a request")
def test_encode_and_submit(benchmark: Any, prompt: int) -> None:
    """A request encoded, its rank chosen, its slot reserved, its frames queued."""
    core, outlet, _, _ = live_core(1)
    ids = list(range(1000, 1000 + prompt))
    params = SamplingParams(max_tokens=128, temperature=0.7)

    def queue() -> Any:
        return submit(core, tokenspeed.encode_add("0" * 24, ids, params), tokenspeed.RID_OFFSET, outlet=outlet)

    benchmark.pedantic(queue, rounds=900)  # nothing sends: the queue holds 1,024
