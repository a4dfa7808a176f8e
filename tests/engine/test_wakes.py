"""Nobody sleeps through what he waits for: wakes of the pump, of outlets, of consumers."""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import smg
from smg import SamplingParams
from smg._outlets import new_outlet
from smg.protocol import tokenspeed
from tests.engine.rig import Rig

PROMPT = [1, 2, 3]
LONG = SamplingParams(max_tokens=1_000_000, seed=7, ignore_eos=True)


@pytest.fixture
def rig():
    made = Rig(1)
    yield made
    made.close()


def emit(rig, stream, *tokens, finish=""):
    rig.emit(stream.rank, [(stream.request_id, list(tokens), finish, len(tokens))])
    assert rig.pump() == []


def test_a_wake_that_comes_between_two_runs_ends_the_next_one(rig):
    rig.core.wake()
    begun = time.monotonic()
    assert rig.core.run(5)
    assert time.monotonic() - begun < 2


def test_the_pump_comes_back_in_time_however_busy_it_is(rig):
    stream = rig.submit()
    rig.pump()
    frame = tokenspeed.encode_outputs([stream.request_id], [[1]], [""], [1], [1], [0])
    over = threading.Event()

    def flood():
        until = time.monotonic() + 5
        while not over.is_set() and time.monotonic() < until:
            rig.ranks[0].push.send(frame)

    thread = threading.Thread(target=flood)
    thread.start()
    rig.core.run(0.1)
    in_time = thread.is_alive()
    over.set()
    thread.join()
    assert in_time
    assert rig.core.counters()["frames"] > [0]


def test_each_output_wakes_a_blocking_consumer(make_group):
    group, mock = make_group(ranks=1, hold=True)
    outputs = queue.SimpleQueue()

    def consume():
        for out in group.submit(PROMPT, SamplingParams(max_tokens=20, seed=7)).blocking(timeout=10):
            outputs.put(out)

    thread = threading.Thread(target=consume)
    thread.start()
    mock.wait_for("add")
    tokens = []
    begun = time.monotonic()
    for _ in range(20):
        mock.step(1, 0)
        tokens += outputs.get(timeout=10).token_ids
    thread.join()
    assert tokens == mock.reply(7, 20)
    assert time.monotonic() - begun < 5  # none of them was noticed by a timeout


async def test_an_awaited_outlet_wakes_again_after_what_was_ready_is_aborted(rig):
    outlet = new_outlet(rig.core)
    first, second = rig.submit(outlet=outlet), rig.submit(outlet=outlet)
    rig.pump()
    for stream in (first, second):
        waiting = asyncio.create_task(outlet.wait())
        await asyncio.sleep(0)
        emit(rig, stream, 5)
        await asyncio.wait_for(waiting, 5)
        if stream is first:
            stream.abort()
    assert [(stream, out.token_ids) for stream, out in outlet.take()] == [(second, [5])]
    outlet.close()


async def test_an_outlets_descriptor_is_readable_when_something_is_ready(rig):
    outlet = new_outlet(rig.core)
    stream = rig.submit(outlet=outlet)
    rig.pump()
    loop = asyncio.get_running_loop()
    taken = asyncio.Queue()
    loop.add_reader(outlet.fileno(), lambda: taken.put_nowait(outlet.take()))
    for token in range(3):
        emit(rig, stream, token, finish="stop" if token == 2 else "")
        [(_, out)] = await asyncio.wait_for(taken.get(), 5)
        assert out.token_ids == [token]
    assert taken.empty()
    loop.remove_reader(outlet.fileno())
    outlet.close()
    assert outlet.fileno() == -1


@pytest.mark.skipif(not hasattr(os, "eventfd_read"), reason="counts the writes to an eventfd")
def test_an_outlet_is_woken_once_however_much_becomes_ready_before_it_is_taken(rig):
    outlet = new_outlet(rig.core)
    streams = [rig.submit(outlet=outlet) for _ in range(10)]
    rig.pump()
    for token in range(3):
        rig.emit(0, [(stream.request_id, [token], "", 1) for stream in streams])
        rig.pump()
    assert os.eventfd_read(outlet.fileno()) == 1
    assert [out.token_ids for _, out in outlet.take()] == [[0, 1, 2]] * 10
    outlet.close()


def test_an_outlet_is_waited_for_by_one_at_a_time(make_group):
    group, mock = make_group(ranks=1, hold=True)
    outlet = group.outlet()
    group.submit(PROMPT, LONG, outlet=outlet)
    results = queue.SimpleQueue()

    def wait():
        try:
            results.put(outlet.wait_blocking(10))
        except RuntimeError as error:
            results.put(error)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert isinstance(results.get(timeout=10), RuntimeError)
    mock.wait_for("add")
    mock.step(1, 0)
    assert results.get(timeout=10) is True
    for thread in threads:
        thread.join()


def test_waiting_for_an_outlet_that_stays_empty_ends_in_time(make_group):
    group, _ = make_group(ranks=1, hold=True)
    outlet = group.outlet()
    assert outlet.wait_blocking(0) is False
    assert outlet.wait_blocking(0.01) is False


# ---------------------------------------------------------------- waits that are given up


async def test_anext_with_a_default_is_cancelled_and_the_stream_goes_on(make_group):
    group, mock = make_group(ranks=1, hold=True)
    iterator = group.submit(PROMPT, SamplingParams(max_tokens=3, seed=7)).__aiter__()

    async def following():
        return await anext(iterator, None)

    task = asyncio.create_task(following())
    await asyncio.to_thread(mock.wait_for, "add")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    mock.release()
    tokens = []
    while (out := await anext(iterator, None)) is not None:
        tokens += out.token_ids
    assert tokens == mock.reply(7, 3)


async def test_the_next_output_is_awaited_by_one_task_at_a_time(make_group):
    group, mock = make_group(ranks=1, hold=True)
    iterator = group.submit(PROMPT, SamplingParams(max_tokens=1, seed=7)).__aiter__()

    async def following():
        return await iterator.__anext__()

    first = asyncio.create_task(following())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="already awaited"):
        await following()
    mock.release()
    assert (await first).token_ids == mock.reply(7, 1)


turns = st.integers(0, 4)  # of the event loop
steps = st.lists(
    st.one_of(
        st.tuples(st.just("emit"), st.integers(1, 3)),
        st.tuples(st.just("give up"), turns),
        st.tuples(st.just("turn"), turns),
        st.tuples(st.just("await"), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=150)
@given(steps)
def test_a_wait_that_is_given_up_at_any_moment_loses_and_repeats_no_token(script):
    async def run(rig):
        stream = rig.submit()
        iterator = stream.__aiter__()
        got, sent = [], 0

        async def following():
            return await iterator.__anext__()

        async def turn(times):
            for _ in range(times):
                await asyncio.sleep(0)

        rig.pump()
        for step, count in script:
            if step == "emit":
                emit(rig, stream, *range(sent, sent + count))
                sent += count
            elif step == "turn":
                await turn(count)
            elif step == "give up":
                task = asyncio.create_task(following())
                await turn(count)
                task.cancel()
                try:
                    got += (await task).token_ids
                except asyncio.CancelledError:
                    pass
            elif len(got) < sent:
                got += (await asyncio.wait_for(following(), 5)).token_ids
        emit(rig, stream, sent, finish="stop")
        async for out in iterator:
            got += out.token_ids
        assert got == list(range(sent + 1))

    rig = Rig(1)
    try:
        asyncio.run(run(rig))
    finally:
        rig.close()


async def test_a_consumer_that_never_keeps_up_gets_everything_in_one_output(rig):
    stream = rig.submit()
    iterator = stream.__aiter__()
    rig.pump()
    for start in range(0, 20_000, 10):
        rig.emit(0, [(stream.request_id, list(range(start, start + 10)), "", start + 10)])
    rig.pump()
    out = await anext(iterator)
    assert out.token_ids == list(range(20_000))
    assert (out.token_count, out.completion_tokens) == (20_000, 20_000)


# ---------------------------------------------------------------- outlets that go


async def test_dropping_an_outlet_that_was_awaited_aborts_its_streams(make_group, idle):
    group, mock = make_group(ranks=1)
    outlet = group.outlet()
    group.submit(PROMPT, LONG, outlet=outlet)
    await asyncio.wait_for(outlet.wait(), 10)
    del outlet
    gc.collect()
    assert group.requests == 0
    await asyncio.to_thread(mock.wait_for, "abort")
    idle(group)


async def test_an_outlet_is_closed_by_another_thread_while_it_is_awaited(make_group):
    group, _ = make_group(ranks=1, hold=True)
    outlet = group.outlet()
    group.submit(PROMPT, LONG, outlet=outlet)
    waiting = asyncio.create_task(outlet.wait())
    await asyncio.sleep(0)
    await asyncio.to_thread(outlet.close)
    with pytest.raises(smg.Closed):
        await asyncio.wait_for(waiting, 5)


async def test_an_awaited_outlet_follows_its_consumer_to_another_loop(make_group):
    group, mock = make_group(ranks=1, hold=True)
    outlet = group.outlet()
    group.submit(PROMPT, SamplingParams(max_tokens=2, seed=7), outlet=outlet)
    await asyncio.to_thread(mock.wait_for, "add")
    mock.step(1, 0)
    await asyncio.wait_for(outlet.wait(), 10)
    [(_, out)] = outlet.take()

    def elsewhere():
        async def take():
            waiting = asyncio.create_task(outlet.wait())
            await asyncio.sleep(0)
            mock.step(1, 0)
            await asyncio.wait_for(waiting, 10)
            return outlet.take()

        return asyncio.run(take())

    [(_, last)] = await asyncio.to_thread(elsewhere)
    assert out.token_ids + last.token_ids == mock.reply(7, 2)
    assert last.finish_reason == "length"
