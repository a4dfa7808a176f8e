"""A group inside an application: many loops and threads at once, one ABORT per early end, processes that stop."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvloop

import smg
from smg import SamplingParams
from smg.mock import spawn
from smg.protocol import handshake
from tests.engine.test_core_model import SlotTable, settings
from tests.engine.test_ranks import Dialer, states, tokens_of, wait_until

PROMPT = [1, 2, 3]
LONG = SamplingParams(max_tokens=1_000_000, seed=7, ignore_eos=True)


def short(seed=7, tokens=5):
    return SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True)


async def read(stream):
    return [token async for out in stream for token in out.token_ids]


def test_loops_threads_and_outlets_use_one_group_at_once(make_group, idle):
    group, mock = make_group(ranks=2)
    seeds = range(40)

    def in_loop(new_loop):
        async def main():
            return await asyncio.gather(*(read(group.submit(PROMPT, short(seed, 20))) for seed in seeds))

        loop = new_loop()
        try:
            return loop.run_until_complete(main())
        finally:
            loop.close()

    def in_thread():
        streams = [group.submit(PROMPT, short(seed, 20)) for seed in seeds]
        return [[token for out in stream.blocking(20) for token in out.token_ids] for stream in streams]

    def by_outlet():
        outlet = group.outlet()
        results: dict[int, list[int]] = {}
        for seed in seeds:
            group.submit(PROMPT, short(seed, 20), outlet=outlet).data = results.setdefault(seed, [])
        running = len(seeds)
        while running:
            assert outlet.wait_blocking(20)
            for stream, out in outlet.take():
                stream.data.extend(out.token_ids)
                running -= out.finish_reason is not None
        return list(results.values())

    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(in_loop, make) for make in (asyncio.new_event_loop, uvloop.new_event_loop) * 2]
        work += [pool.submit(run) for run in (in_thread, by_outlet) * 2]
        expected = [mock.reply(seed, 20) for seed in seeds]
        for done in work:
            assert done.result(30) == expected
    idle(group)


async def test_a_stream_that_was_submitted_outside_loops_belongs_to_its_first_consumer(make_group):
    group, mock = make_group(ranks=1)
    stream = await asyncio.to_thread(group.submit, PROMPT, short())
    assert await read(stream) == mock.reply(7, 5)


def test_data_is_the_callers_own(make_group):
    group, _ = make_group(ranks=1)
    stream = group.submit(PROMPT, short())
    assert stream.data is None
    stream.data = kept = object()
    for _ in stream.blocking(10):
        pass
    assert stream.data is kept


# ---------------------------------------------------------------- early ends


async def leave(group):
    async for _ in group.submit(PROMPT, LONG):
        break


async def fail(group):
    with pytest.raises(KeyError):
        async for _ in group.submit(PROMPT, LONG):
            raise KeyError


async def cancel_in_the_middle(group):
    begun = asyncio.Event()

    async def consume():
        async for _ in group.submit(PROMPT, LONG):
            begun.set()

    task = asyncio.create_task(consume())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def take_the_first(group):
    assert (await anext(aiter(group.submit(PROMPT, LONG)))).token_ids


async def abort_twice(group):
    stream = group.submit(PROMPT, LONG)
    iterator = aiter(stream)
    await anext(iterator)
    stream.abort()
    stream.abort()
    with pytest.raises(smg.Aborted):
        async for _ in iterator:
            pass


async def run_out_of_time(group):
    with pytest.raises(smg.DeadlineExceeded):
        async for _ in group.submit(PROMPT, LONG, deadline=0.05):
            pass


async def close_the_outlet(group):
    outlet = group.outlet()
    group.submit(PROMPT, LONG, outlet=outlet)
    await outlet.wait()
    outlet.close()


async def leave_a_blocking_loop(group):
    def consume():
        for _ in group.submit(PROMPT, LONG).blocking(10):
            break

    await asyncio.to_thread(consume)


async def drop_after_the_end(group):
    stream = group.submit(PROMPT, short())
    await read(stream)
    stream.abort()


async def drop_an_end_unread(group):
    stream = group.submit(PROMPT, short())
    while group.requests:
        await asyncio.sleep(0)
    stream.abort()


@pytest.mark.parametrize(
    ("how", "aborts"),
    [
        *((how, 1) for how in (leave, fail, cancel_in_the_middle, take_the_first, abort_twice, run_out_of_time)),
        *((how, 1) for how in (close_the_outlet, leave_a_blocking_loop)),
        *((how, 0) for how in (drop_after_the_end, drop_an_end_unread)),
    ],
)
async def test_an_early_end_sends_one_abort_and_a_terminal_output_none(make_group, idle, how, aborts):
    group, mock = make_group(ranks=1, step_ms=1)
    await how(group)
    gc.collect()
    assert group.requests == 0
    assert await read(group.submit(PROMPT, short())) == mock.reply(7, 5)  # in order behind any ABORT
    assert mock.stats(0)["aborts"] == aborts
    assert group.counters["aborts"] == [aborts]
    idle(group)


# ---------------------------------------------------------------- processes


def test_a_process_that_is_stopped_stalls_its_rank_and_comes_back(ipc_dir):
    with smg.EngineGroup(
        f"ipc://{ipc_dir}/e", backend="tokenspeed", ranks=2, stall_timeout=0.2, handshake_address="tcp://127.0.0.1:0"
    ) as group:
        options = {"handshake_address": group.handshake_address, "step_ms": 1, "ranks": 1}
        with spawn(group.url, start_index=0, **options) as first, spawn(group.url, start_index=1, **options):
            group.wait_ready(20)
            stream = group.submit(PROMPT, short(7, 500), rank=0)
            iterator = stream.blocking(20)
            tokens = next(iterator).token_ids
            first.suspend()
            wait_until(lambda: states(group) == ["stalled", "live"])
            assert {group.submit(PROMPT, short()).rank for _ in range(4)} == {1}
            first.unsuspend()
            tokens = tokens + [token for out in iterator for token in out.token_ids]
            assert tokens == first.reply(7, 500)
            wait_until(lambda: states(group) == ["live", "live"])


def test_a_process_that_is_killed_ends_its_own_requests_at_once(ipc_dir):
    with smg.EngineGroup(
        f"ipc://{ipc_dir}/e", backend="tokenspeed", ranks=2, handshake_address="tcp://127.0.0.1:0"
    ) as group:
        options = {"handshake_address": group.handshake_address, "step_ms": 1, "ranks": 1}
        with spawn(group.url, start_index=0, **options) as first, spawn(group.url, start_index=1, **options) as second:
            group.wait_ready(20)
            doomed = group.submit(PROMPT, LONG, rank=0).blocking(20)
            other = group.submit(PROMPT, short(7, 200), rank=1)
            next(doomed)
            first.kill()
            with pytest.raises(smg.RankDied, match="connection closed"):
                for _ in doomed:
                    pass
            assert tokens_of(other) == second.reply(7, 200)
            with spawn(group.url, start_index=0, **options):
                group.wait_ready(20)
                assert tokens_of(group.submit(PROMPT, short(), rank=0)) == second.reply(7, 5)
                assert group.ranks[0].incarnation == 2


FORKS = """
    import asyncio, multiprocessing, sys
    import uvloop, smg
    from smg.mock import Simulator

    def child(group, stream):
        for refused in (lambda: group.submit([1]), stream.abort, lambda: group.in_flight):
            try:
                refused()
            except smg.ForkedError:
                continue
            sys.exit(3)
        group.close()
        del stream

    async def main(group):
        params = smg.SamplingParams(max_tokens=3, seed=1)
        for _ in range(2):
            async for out in group.submit([1], params):
                pass
            process = multiprocessing.get_context("fork").Process(target=child, args=(group, group.submit([1], params)))
            process.start()
            await asyncio.to_thread(process.join)
            assert process.exitcode == 0, process.exitcode
        assert out.finish_reason == "length"

    url = f"ipc://{sys.argv[1]}/e"
    with smg.EngineGroup(url, backend="tokenspeed", handshake_address="tcp://127.0.0.1:0") as group:
        with Simulator(group.url, handshake_address=group.handshake_address, step_ms=0):
            group.wait_ready(20)
            loop = {"asyncio": asyncio, "uvloop": uvloop}[sys.argv[2]].new_event_loop()
            loop.run_until_complete(main(group))
            loop.close()
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_children_of_a_running_loop_end_clean_and_its_readers_stay(ipc_dir, loop):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORKS), str(ipc_dir), loop],
        capture_output=True,
        text=True,
        timeout=40,
        cwd=os.getcwd(),
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr
    assert os.listdir(ipc_dir) == []


# ---------------------------------------------------------------- ranks, further


def test_noise_on_an_input_socket_is_refused_and_counted(ipc_dir):
    with smg.EngineGroup(
        f"ipc://{ipc_dir}/e", backend="tokenspeed", ranks=1, handshake_address="tcp://127.0.0.1:0"
    ) as group:
        dialer = Dialer(group)
        try:
            dialer.hello()
            dialer.init()
            dialer.ready()
            stranger = dialer._dealer(b"\x05\x05")
            stranger.connect(dialer.input.last_endpoint)
            stranger.send(handshake.encode_registration(handshake.Registration(vllm_version="tokenspeed-0.1.1")))
            wait_until(lambda: group._loop.refused == 1)
            assert states(group) == ["hello"]
            dialer.register()
            group.wait_ready(10)
            for noise in ([b"\xc1"], [b"", b""], [b"\x80"] * 3):
                dialer.input.send_multipart(noise)
            wait_until(lambda: group.ranks[0].refused == 3)
            assert states(group) == ["live"]
        finally:
            dialer.close()


def test_a_registration_that_cannot_be_read_turns_the_dialer_away(ipc_dir):
    with smg.EngineGroup(
        f"ipc://{ipc_dir}/e", backend="tokenspeed", ranks=1, handshake_address="tcp://127.0.0.1:0"
    ) as group:
        dialer = Dialer(group)
        try:
            dialer.hello()
            dialer.init()
            dialer.ready()
            dialer.input.send(b"\xc1")
            wait_until(lambda: states(group) == ["absent"] and group.ranks[0].refused == 1)
            assert "registration" in group.ranks[0].fault
        finally:
            dialer.close()
        with spawn(group.url, handshake_address=group.handshake_address, ranks=1):
            group.wait_ready(20)


def test_an_idle_rank_is_drained_at_once_and_may_come_back(make_group, idle):
    group, mock = make_group(ranks=2)
    group.drain(0)
    wait_until(lambda: states(group) == ["absent", "live"])
    with pytest.raises(smg.InvalidRank):
        group.drain(2)
    mock.restart(0)
    group.wait_ready(10)
    assert tokens_of(group.submit(PROMPT, short(), rank=0)) == mock.reply(7, 5)
    idle(group)


def test_threads_that_submit_while_ranks_die_and_return_get_an_end_each(make_group, idle):
    group, mock = make_group(ranks=2)
    ends: list[str] = []
    stop = threading.Event()

    def work():
        while not stop.is_set():
            try:
                stream = group.submit(PROMPT, short(tokens=20))
                *_, last = stream.blocking(20)
                ends.append(last.finish_reason)
            except (smg.RankDied, smg.NoRank) as error:
                ends.append(type(error).__name__)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(6):
            mock.restart(turn % 2)
            wait_until(lambda turn=turn: group.ranks[turn % 2].incarnation == turn // 2 + 2)
            group.wait_ready(10)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert "length" in ends
    assert set(ends) <= {"length", "RankDied", "NoRank"}
    idle(group)


# ---------------------------------------------------------------- without epoll


class SlotTableByPoll(SlotTable):
    use_epoll = False


TestSlotTableByPoll = SlotTableByPoll.TestCase
TestSlotTableByPoll.settings = settings(max_examples=10, stateful_step_count=30, deadline=None)
