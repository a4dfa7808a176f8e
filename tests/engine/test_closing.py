"""What ends, ends typed: groups that close under every kind of consumer, handles that go, hands that err."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import threading
from collections import Counter

import pytest
import uvloop
import zmq

import smg
from smg import SamplingParams
from smg._fastpath import Core, EventKind
from smg._outlets import new_outlet
from smg.engine.lifecycle import State
from smg.mock import Simulator
from tests.engine.rig import DEAD, LIVE, Rig

PROMPT = [1, 2, 3]
LONG = SamplingParams(max_tokens=1_000_000, seed=7, ignore_eos=True)
LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


@pytest.fixture
def rig():
    made = Rig(2)
    yield made
    made.close()


def run_in(new_loop, main):
    loop = new_loop()
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def reach(condition):
    """Wait for a count that another thread brings up."""
    deadline = threading.Event()
    timer = threading.Timer(10, deadline.set)
    timer.start()
    while not condition():
        assert not deadline.is_set(), "it did not come"
    timer.cancel()


# ---------------------------------------------------------------- a group closes


@LOOPS
def test_a_consumer_that_is_busy_while_the_group_closes_gets_its_tokens_and_then_closed(make_group, new_loop):
    group, mock = make_group(ranks=1, hold=True)

    async def main():
        iterator = group.submit(PROMPT, LONG).__aiter__()
        mock.wait_for("add")
        mock.step(1, 0)
        tokens = (await anext(iterator)).token_ids
        mock.step(2, 0)
        reach(lambda: group.counters["tokens"] == [3])
        await group.aclose()
        await asyncio.sleep(0)
        tokens = tokens + (await anext(iterator)).token_ids
        with pytest.raises(smg.Closed, match="the group was closed"):
            await anext(iterator)
        with pytest.raises(StopAsyncIteration):
            await anext(iterator)
        assert tokens == mock.reply(7, 3)

    run_in(new_loop, main)


@LOOPS
def test_a_group_is_closed_from_a_callback_of_the_loop_that_waits_for_it(make_group, new_loop):
    group, mock = make_group(ranks=1, hold=True)

    async def main():
        iterator = group.submit(PROMPT, LONG).__aiter__()
        mock.wait_for("add")
        asyncio.get_running_loop().call_soon(group.close)
        with pytest.raises(smg.Closed):
            await asyncio.wait_for(iterator.__anext__(), 10)

    run_in(new_loop, main)


def test_a_blocking_consumer_that_is_busy_while_the_group_closes_gets_its_tokens_and_then_closed(make_group):
    group, mock = make_group(ranks=1, hold=True)
    iterator = group.submit(PROMPT, LONG).blocking(10)
    mock.wait_for("add")
    mock.step(2, 0)
    reach(lambda: group.counters["tokens"] == [2])
    group.close()
    assert next(iterator).token_ids == mock.reply(7, 2)
    with pytest.raises(smg.Closed):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_stream_that_nobody_reads_yet_ends_typed_when_its_group_closes(make_group):
    group, _ = make_group(ranks=1, hold=True)
    blocking, awaited = group.submit(PROMPT, LONG), group.submit(PROMPT, LONG)
    group.close()
    with pytest.raises(smg.Closed):
        next(blocking.blocking(10))

    async def read():
        with pytest.raises(smg.Closed):
            await anext(aiter(awaited))

    asyncio.run(read())


async def test_waiting_for_an_outlet_without_streams_ends_when_the_group_closes(make_group):
    group, _ = make_group(ranks=1)
    outlets = [group.outlet(), group.outlet()]
    awaiting = asyncio.create_task(outlets[0].wait())
    blocking = asyncio.create_task(asyncio.to_thread(outlets[1].wait_blocking, 30))
    await asyncio.sleep(0)
    await group.aclose()
    for waiting in (awaiting, blocking):
        with pytest.raises(smg.Closed):
            await asyncio.wait_for(waiting, 10)
    with pytest.raises(smg.Closed):
        await outlets[0].wait()
    assert outlets[0].take() == []


async def test_what_an_outlet_holds_when_its_group_closes_is_still_taken(make_group):
    group, mock = make_group(ranks=1, hold=True)
    outlet = group.outlet()
    stream = group.submit(PROMPT, LONG, outlet=outlet)
    mock.wait_for("add")
    mock.step(2, 0)
    reach(lambda: group.counters["tokens"] == [2])
    group.close()
    await asyncio.wait_for(outlet.wait(), 10)
    (first, tokens), (second, error) = outlet.take()
    assert first is second is stream
    assert tokens.token_ids == mock.reply(7, 2)
    assert type(error) is smg.Closed
    with pytest.raises(smg.Closed):
        await outlet.wait()


async def test_who_waits_for_ranks_is_told_when_the_group_closes(ipc_dir):
    group = smg.EngineGroup(f"ipc://{ipc_dir}/e", backend="tokenspeed", handshake_address="tcp://127.0.0.1:0")
    waiting = [asyncio.create_task(group.ready(30)), asyncio.create_task(asyncio.to_thread(group.wait_ready, 30))]
    while len(group._loop._waiters) < 2:
        await asyncio.sleep(0)
    await group.aclose()
    for task in waiting:
        with pytest.raises(smg.Closed):
            await asyncio.wait_for(task, 10)
    with pytest.raises(smg.Closed):
        await group.ready(10)
    assert group.closed


async def test_waiting_for_ranks_in_short_turns_leaves_nothing_behind(ipc_dir):
    with smg.EngineGroup(f"ipc://{ipc_dir}/e", backend="tokenspeed", handshake_address="tcp://127.0.0.1:0") as group:
        for _ in range(10):
            with pytest.raises(smg.NotReady):
                await group.ready(0)
            with pytest.raises(smg.NotReady, match="0 of 5 ranks"):
                group.wait_ready(0, ranks=5)
        with pytest.raises(smg.NotReady):
            group.wait_ready(0.05)
        assert len(group._loop._waiters) <= 2


def test_many_threads_close_a_group_at_once(make_group, ipc_dir):
    group, _ = make_group(ranks=2)
    streams = [group.submit(PROMPT, LONG) for _ in range(20)]
    threads = [threading.Thread(target=group.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not group._loop._thread.is_alive()
    for stream in streams:
        with pytest.raises(smg.Closed):
            for _ in stream.blocking(10):
                pass
    assert list(ipc_dir.iterdir()) == []


def test_a_group_closes_while_threads_make_outlets_of_it():
    for _ in range(20):
        core = Core(1, backend="tokenspeed", decode_cold=None, stall_timeout=0, max_inflight=0)
        made = [new_outlet(core) for _ in range(50)]
        begun = threading.Event()

        def make(core=core, made=made, begun=begun):
            begun.set()
            made += [new_outlet(core) for _ in range(50)]

        thread = threading.Thread(target=make)
        thread.start()
        begun.wait()
        core.stop()
        core.close()
        thread.join()
        for outlet in made:
            with pytest.raises(smg.Closed):
                outlet.wait_blocking(10)


def test_groups_give_all_their_descriptors_back(ipc_dir):
    def use():
        with smg.EngineGroup(
            f"ipc://{ipc_dir}/e", backend="tokenspeed", handshake_address="tcp://127.0.0.1:0"
        ) as group:
            with Simulator(group.url, handshake_address=group.handshake_address, step_ms=0) as mock:
                group.wait_ready(10)
                mock.restart(0)
                reach(lambda: group.ranks[0].incarnation == 2)
                group.wait_ready(10)  # asked of the group's thread, which knows by now that the first one is gone
                outlet = group.outlet()
                group.submit(PROMPT, LONG, outlet=outlet)

                async def read():
                    async for _ in group.submit(PROMPT, LONG):
                        break
                    await outlet.wait()

                asyncio.run(read())
                for _ in group.submit(PROMPT, LONG).blocking(10):
                    break
            with pytest.raises(smg.AddressError):
                smg.EngineGroup(group.url, backend="tokenspeed", handshake_address="tcp://127.0.0.1:0")
            with pytest.raises(smg.AddressError):
                smg.EngineGroup(f"ipc://{ipc_dir}/f", backend="tokenspeed", handshake_address=group.handshake_address)

    def descriptors():
        """By kind, without pipes: those are the simulator's."""
        gc.collect()
        paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        kinds = Counter(os.readlink(path).split(":")[0] for path in paths if os.path.exists(path))
        del kinds["pipe"]
        return kinds

    use()  # the first of everything
    before = descriptors()
    for _ in range(3):
        use()
    assert descriptors() == before


# ---------------------------------------------------------------- handles that err


def test_streams_and_outlets_are_made_by_groups_only():
    with pytest.raises(TypeError):
        smg.Stream()
    with pytest.raises(TypeError):
        smg.Outlet(None)
    smg.Stream.__new__(smg.Stream)
    gc.collect()


async def test_a_try_that_is_refused_leaves_the_stream_to_be_read_rightly(make_group):
    group, mock = make_group(ranks=1)
    params = SamplingParams(max_tokens=3, seed=7)
    stream = group.submit(PROMPT, params)
    with pytest.raises(RuntimeError, match="event loop"):
        stream.blocking()
    assert [token async for out in stream for token in out.token_ids] == mock.reply(7, 3)

    def outside():
        stream = group.submit(PROMPT, params)
        with pytest.raises(RuntimeError, match="no running event loop"):
            aiter(stream)
        return [token for out in stream.blocking(10) for token in out.token_ids]

    assert await asyncio.to_thread(outside) == mock.reply(7, 3)


def test_a_stream_of_an_outlet_is_not_iterated_not_even_at_its_end(make_group):
    group, _ = make_group(ranks=1)
    outlet = group.outlet()
    stream = group.submit(PROMPT, SamplingParams(max_tokens=1, seed=7), outlet=outlet)
    with pytest.raises(RuntimeError, match="belongs to an outlet"):
        stream.blocking()
    outlet.wait_blocking(10)
    assert [out.finish_reason for _, out in outlet.take()] == ["length"]
    with pytest.raises(RuntimeError, match="belongs to an outlet"):
        stream.blocking()


def test_a_request_id_that_is_no_text_is_refused(make_group):
    group, _ = make_group(ranks=1)
    with pytest.raises(smg.InvalidRequest, match="request_id"):
        group.submit(PROMPT, request_id=7)
    assert group.requests == 0


def test_a_submit_to_a_closed_or_foreign_outlet_is_refused(make_group):
    one, _ = make_group(ranks=1)
    two, _ = make_group(ranks=1)
    outlet = one.outlet()
    with pytest.raises(smg.Closed, match="another group"):
        two.submit(PROMPT, outlet=outlet)
    outlet.close()
    outlet.close()
    with pytest.raises(smg.Closed):
        one.submit(PROMPT, outlet=outlet)
    assert one.requests == two.requests == 0


@pytest.fixture
def small_heap():
    """Collections that are quick: what is there already is left out of them."""
    gc.collect()
    gc.freeze()
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


class Bomb:
    """Garbage whose finaliser does something to a stream in the middle of whatever runs."""

    def __init__(self, action):
        self.action = action
        self.me = self

    def __del__(self):
        self.action()


def test_a_finaliser_may_abort_the_stream_that_is_being_taken(rig, small_heap):
    outlet = new_outlet(rig.core)
    for turn in range(60):
        streams = [rig.submit(outlet=outlet) for _ in range(6)]
        rig.pump()
        for stream in streams:
            rig.emit(stream.rank, [(stream.request_id, [1], "", 1)])
        rig.pump()
        gc.collect()
        gc.set_threshold(1)
        for stream in streams[turn % 6 :]:
            Bomb(stream.abort)
        taken = outlet.take()
        gc.set_threshold(700)
        gc.collect()
        assert all(stream is not None for stream, _ in taken)
        for stream in streams:
            stream.abort()
        assert outlet.take() == []
    outlet.close()
    assert rig.core.slots[2:] == (0, 0)


def test_a_finaliser_may_close_the_outlet_that_is_submitted_to(rig, small_heap):
    for _ in range(60):
        outlet = new_outlet(rig.core)
        gc.collect()
        gc.set_threshold(1)
        Bomb(outlet.close)
        try:
            rig.submit(outlet=outlet)
        except smg.Closed:
            pass
        gc.set_threshold(700)
        gc.collect()
        assert rig.core.slots[2:] == (0, 0)
        rig.pump()


def test_streams_are_submitted_and_dropped_inside_collections(make_group, idle, small_heap):
    group, _ = make_group(ranks=2)
    outlet = group.outlet()
    kept = []

    def submit(**options):
        try:
            return group.submit(PROMPT, LONG, **options)
        except smg.Overloaded:  # what was dropped fills the queue until the pump has had its turn
            return None

    def during(phase, info):
        if phase == "stop" and threading.current_thread() is threading.main_thread():
            kept[:] = [submit()]

    gc.callbacks.append(during)
    gc.set_threshold(5)
    try:
        for _ in range(200):
            submit(outlet=outlet)
            outlet.take()
            submit()
    finally:
        gc.callbacks.remove(during)
    kept.clear()
    outlet.close()
    gc.collect()
    idle(group)


# ---------------------------------------------------------------- what the core holds to


def test_nothing_brings_a_rank_back_that_the_pump_has_failed(rig):
    doomed = rig.submit(rank=0)
    rig.send(0, b"ENGINE_CORE_DEAD")
    assert [event[:2] for event in rig.pump()] == [(2, 0)]
    rig.core.set_state(0, LIVE)  # by an event that was on its way before the death
    with pytest.raises(smg.InvalidRank):
        rig.submit(rank=0)
    assert rig.submit().rank == 1
    with pytest.raises(smg.RankDied):
        next(doomed.blocking(0))
    rig.bury(0)
    rig.core.set_state(0, DEAD)
    rig.attach(0)
    assert rig.submit(rank=0).rank == 0


def wait_readable(socket):
    """Until something is there for the pump. `socket.poll` would take the signal away from it."""
    poller = select.poll()
    poller.register(socket.fileno(), select.POLLIN)
    assert poller.poll(10_000)


def pump_until(rig, condition):
    events = []
    for _ in range(200):
        events += rig.pump()
        if condition(events):
            return events
        threading.Event().wait(0.02)  # for libzmq's own thread, whose steps can be seen in no other way
    raise AssertionError(f"it did not come: {events}")


def kinds(events):
    return [event[0] for event in events]


def test_what_a_rank_sent_before_its_connection_closed_is_delivered_before_the_death(ipc_dir):
    rig = Rig(1, directory=ipc_dir)
    try:
        engine = rig.ranks[0]
        if EventKind.INPUT not in kinds(rig.begun):  # registered, so that requests can be sent
            pump_until(rig, lambda events: EventKind.INPUT in kinds(events))
        stream = rig.submit()
        rig.pump()
        for token in range(3):
            rig.emit(0, [(stream.request_id, [token], "", 1)])
        assert engine.pull.poll(10_000)  # takes the signal: now only who looks at the socket finds the frames
        engine.push.close(1000)
        events = pump_until(rig, lambda events: EventKind.DEAD in kinds(events))
        assert kinds(events) == [EventKind.DEAD]
        iterator = stream.blocking(0)
        assert next(iterator).token_ids == [0, 1, 2]
        with pytest.raises(smg.RankDied, match="connection closed"):
            next(iterator)
    finally:
        rig.close()


def test_only_the_end_of_the_engines_own_connection_is_a_death(ipc_dir):
    rig = Rig(1, directory=ipc_dir)
    try:
        engine = rig.ranks[0]
        rig.emit(0, [])
        pump_until(rig, lambda _: rig.core.counters()["frames"] == [1])  # its connection is known by now
        rig.pump()
        stranger = rig.context.socket(zmq.PUSH)
        stranger.connect(engine.pull.last_endpoint)
        wait_readable(engine.monitor)
        rig.pump()
        stranger.close(0)
        wait_readable(engine.monitor)
        assert EventKind.DEAD not in kinds(rig.pump())
        assert rig.submit().rank == 0
        engine.push.close(0)
        pump_until(rig, lambda events: EventKind.DEAD in kinds(events))
    finally:
        rig.close()


def test_a_submit_counts_as_overloaded_only_when_it_is_refused():
    rig = Rig(2, max_inflight=2)
    try:
        streams = [rig.submit(rank=0) for _ in range(2)] + [rig.submit() for _ in range(2)]
        assert [stream.rank for stream in streams] == [0, 0, 1, 1]
        assert rig.core.counters()["overloaded"] == [0, 0]
        for _ in range(3):
            with pytest.raises(smg.Overloaded):
                rig.submit()
        with pytest.raises(smg.Overloaded):
            rig.submit(rank=1)
        assert sum(rig.core.counters()["overloaded"]) == 4
    finally:
        rig.close()


def test_only_what_is_overdue_ends_whatever_order_deadlines_came_and_went_in(rig):
    keep, aborted, overdue = [], [], []
    for number in range(300):
        later = rig.submit(deadline=1000 - number * 7 % 311)
        (aborted if number % 3 == 0 else keep).append(later)
        if number % 5 == 0:
            overdue.append(rig.submit(deadline=1e-9))
        if number % 4 == 0 and aborted:
            aborted[number % len(aborted)].abort()
    for stream in aborted:
        stream.abort()
    rig.pump()
    for stream in overdue:
        with pytest.raises(smg.DeadlineExceeded):
            next(stream.blocking(0))
    assert rig.core.live == len(keep)
    for stream in keep:
        with pytest.raises(TimeoutError):
            next(stream.blocking(0))


@pytest.mark.filterwarnings("ignore:This process")  # Python's own warning about fork beside threads
def test_what_a_group_knows_is_refused_in_a_child_of_fork(make_group):
    group, _ = make_group(ranks=1, hold=True)
    outlet = group.outlet()
    stream = group.submit(PROMPT, LONG)
    iterator = stream.blocking(0)
    refused = [
        lambda: group.in_flight,
        lambda: group.load,
        lambda: group.counters,
        lambda: group.wait_ready(0),
        lambda: group.drain(0),
        lambda: outlet.wait_blocking(0),
        lambda: next(iterator),
    ]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for ask in refused:
                with pytest.raises(smg.ForkedError):
                    ask()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert group.in_flight.tolist() == [1]
    assert State(group.ranks[0].state) is State.LIVE
