"""What tokens leave for the garbage collector: nothing, so that a large heap beside them costs nothing."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest
import uvloop

from smg._outlets import Output, new_outlet
from smg.protocol import tokenspeed
from tests.engine.rig import Rig

STREAMS, STEPS = 50, 200  # 10,000 tokens
FEW = 2 * STREAMS  # what a step holds at once, of pairs or futures, may stay in the interpreter's own free lists


def step_of(streams):
    """A frame with a token for each."""
    ones = [1] * len(streams)
    ids = [stream.request_id for stream in streams]
    return tokenspeed.encode_outputs(ids, [[5]] * len(ids), [""] * len(ids), ones, ones, ones)


async def taken(rig, outputs):
    """Each turn: one step, and its outputs out of an outlet."""
    outlet = new_outlet(rig.core)
    frame = step_of([rig.submit(outlet=outlet) for _ in range(STREAMS)])
    while True:
        rig.core.feed(0, frame)
        outputs.extend(out for _, out in outlet.take())
        yield


async def awaited(rig, outputs):
    """Each turn: one step, and its outputs out of an `async for` per stream."""
    streams = [rig.submit() for _ in range(STREAMS)]
    frame = step_of(streams)

    async def read(stream):
        async for out in stream:
            outputs.append(out)

    readers = [asyncio.create_task(read(stream)) for stream in streams]
    del streams
    await asyncio.sleep(0)
    try:
        while True:
            due = len(outputs) + STREAMS
            rig.core.feed(0, frame)
            while len(outputs) < due:
                await asyncio.sleep(0)
            yield
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


@pytest.fixture(
    params=[(taken, asyncio), (awaited, asyncio), (awaited, uvloop)], ids=lambda p: f"{p[0].__name__}-{p[1].__name__}"
)
def run(request):
    """Runs `work(turns, outputs)` with the turns of one way to consume, on one kind of loop."""
    way, loops = request.param

    async def prepared(work):
        rig, outputs = Rig(1), []
        turns = way(rig, outputs)
        await anext(turns)  # what is made once is made
        outputs.clear()
        try:
            await work(turns, outputs)
        finally:
            await turns.aclose()
            rig.close()

    def on_a_loop(work):
        loop = loops.new_event_loop()
        try:
            loop.run_until_complete(prepared(work))
        finally:
            loop.close()

    return on_a_loop


def test_ten_thousand_outputs_that_are_kept_are_not_the_collectors(run):
    async def work(turns, outputs):
        gc.collect()
        gc.disable()
        try:
            tracked, allocated = len(gc.get_objects()), gc.get_count()[0]
            for _ in range(STEPS):
                await anext(turns)
            assert len(gc.get_objects()) - tracked < FEW
            assert gc.get_count()[0] - allocated < FEW
        finally:
            gc.enable()
        assert len(outputs) == STEPS * STREAMS
        assert all(type(out) is Output and out.token_count == 1 for out in outputs)

    run(work)


@pytest.mark.parametrize("objects", [300_000, pytest.param(5_000_000, marks=pytest.mark.slow)])
def test_tokens_start_no_collection_and_cost_the_same_beside_a_frozen_heap(run, objects):
    async def work(turns, outputs):
        async def best():
            """CPU seconds of the fastest step of 10,000 tokens, which start no collection."""
            gc.collect()
            before, costs = [kind["collections"] for kind in gc.get_stats()], []
            for _ in range(STEPS):
                begin = time.thread_time()
                await anext(turns)
                outputs.clear()
                costs.append(time.thread_time() - begin)
            assert [kind["collections"] for kind in gc.get_stats()] == before
            return min(costs)

        alone = await best()
        heap = [[] for _ in range(objects)]
        gc.freeze()
        try:
            assert await best() < 1.5 * alone
        finally:
            gc.unfreeze()
        assert len(heap) == objects

    run(work)
