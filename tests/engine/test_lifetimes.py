"""The mutex rules, shown: finalisers in collections, threads that die, exits without close, forks."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

import smg
from smg import SamplingParams

PROMPT = [1, 2, 3]
LONG = SamplingParams(max_tokens=1_000_000, seed=7, ignore_eos=True)


class Cycle:
    """Garbage that only a collection frees, and a stream with it."""

    def __init__(self, stream):
        self.stream = stream
        self.me = self


def test_collections_inside_submit_and_take_may_run_finalisers_of_streams(make_group, idle):
    group, _ = make_group(ranks=2)
    outlet = group.outlet()
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(300):
            Cycle(group.submit(PROMPT, LONG))
            group.submit(PROMPT, SamplingParams(max_tokens=3, seed=1), outlet=outlet)
            outlet.take()
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    outlet.close()
    idle(group)


def test_outlets_are_closed_while_the_pump_signals_them(make_group, idle):
    group, _ = make_group(ranks=1)
    for _ in range(200):
        outlet = group.outlet()
        for _ in range(4):
            group.submit(PROMPT, LONG, outlet=outlet)
        outlet.wait_blocking(10)
        outlet.close()
    idle(group)


def test_an_outlet_is_closed_by_another_thread_while_one_waits_for_it(make_group):
    group, _ = make_group(ranks=1, hold=True)
    outlet = group.outlet()
    group.submit(PROMPT, LONG, outlet=outlet)
    waiting = threading.Event()
    result = []

    def wait():
        waiting.set()
        try:
            outlet.wait_blocking(30)
        except smg.Closed as error:
            result.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    outlet.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(result) == 1


def test_threads_that_die_holding_streams_leave_nothing(make_group, idle):
    group, _ = make_group(ranks=1)

    def die():
        kept = [group.submit(PROMPT, LONG) for _ in range(10)]
        iterators = [stream.blocking(10) for stream in kept]
        for iterator in iterators:
            next(iterator)

    threads = [threading.Thread(target=die) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    idle(group)


def test_a_loop_that_goes_with_its_streams_leaves_nothing(make_group, idle):
    group, mock = make_group(ranks=1, hold=True)

    async def abandon():
        iterator = group.submit(PROMPT, LONG).__aiter__()
        task = asyncio.ensure_future(anext(iterator, None))
        await asyncio.sleep(0)
        return task

    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(abandon())
    loop.close()
    task._log_destroy_pending = False
    del task, loop
    gc.collect()
    mock.release()

    async def use():
        async for _ in group.submit(PROMPT, SamplingParams(max_tokens=2, seed=1)):
            pass

    asyncio.run(use())  # the next loop's first submit gives the closed one's outlet back
    gc.collect()
    idle(group)


def test_dropping_a_group_unclosed_stops_its_thread_and_unlinks(ipc_dir):
    group = smg.EngineGroup(f"ipc://{ipc_dir}/e", backend="tokenspeed", handshake_address="tcp://127.0.0.1:0")
    thread = group._loop._thread
    del group
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert list(ipc_dir.iterdir()) == []


PRELUDE = """
    import asyncio, os, signal, sys, threading, time
    import smg
    from smg.mock.process import spawn
    path = sys.argv[1]
    group = smg.EngineGroup(f"ipc://{path}/e", backend="tokenspeed", ranks=1, handshake_address="tcp://127.0.0.1:0")
    mock = spawn(group.url, handshake_address=group.handshake_address, step_ms=1)
    group.wait_ready(20)
    LONG = smg.SamplingParams(max_tokens=1_000_000, seed=1)
"""
ENDINGS = {
    "streams in flight": "streams = [group.submit([1], LONG) for _ in range(5)]",
    "an explicit outlet": "outlet = group.outlet(); group.submit([1], LONG, outlet=outlet); outlet.wait_blocking(10)",
    "a daemon thread that waits": """
    def wait():
        for out in group.submit([1], LONG).blocking():
            pass
    threading.Thread(target=wait, daemon=True).start()
    """,
    "a loop left in the middle": """
    async def main():
        async for out in group.submit([1], LONG):
            break
    asyncio.run(main())
    """,
    "an exception": "stream = group.submit([1], LONG); sys.excepthook = lambda *a: None; raise ValueError",
}


@pytest.mark.parametrize("what", ENDINGS)
def test_a_process_that_exits_without_close_prints_nothing_and_leaves_nothing(ipc_dir, what):
    code = textwrap.dedent(PRELUDE)
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore", "-c", code + textwrap.dedent(ENDINGS[what]), str(ipc_dir)],
        capture_output=True,
        text=True,
        timeout=40,
        cwd=os.getcwd(),
    )
    assert done.stdout == ""
    assert done.stderr == ""
    assert done.returncode == (1 if what == "an exception" else 0)
    assert not [name for name in os.listdir(ipc_dir) if name.endswith((".sock", ".lock"))]


def test_ctrl_c_ends_a_blocking_wait(make_group, idle):
    group, mock = make_group(ranks=1, hold=True)
    stream = group.submit(PROMPT, LONG)
    iterator = stream.blocking()
    mock.wait_for("add")
    main = threading.main_thread().ident
    timer = threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    timer.join()
    del iterator, stream
    gc.collect()
    idle(group)


@pytest.mark.filterwarnings("ignore:This process")  # Python's own warning about fork beside threads
def test_a_child_of_fork_is_refused_and_the_parent_goes_on(make_group, idle):
    group, mock = make_group(ranks=1)
    stream = group.submit(PROMPT, SamplingParams(max_tokens=3, seed=7))
    outlet = group.outlet()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for refused in (lambda: group.submit(PROMPT), group.outlet, stream.abort, outlet.take):
                with pytest.raises(smg.ForkedError):
                    refused()
            group.close()
            outlet.close()
            del stream, outlet
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert [token for out in stream.blocking(10) for token in out.token_ids] == mock.reply(7, 3)
    idle(group)


@pytest.mark.filterwarnings("ignore:This process")
async def test_a_fork_does_not_take_the_loops_reader_away(make_group):
    group, mock = make_group(ranks=1)
    params = SamplingParams(max_tokens=3, seed=7)
    assert [t async for out in group.submit(PROMPT, params) for t in out.token_ids] == mock.reply(7, 3)
    pid = os.fork()
    if pid == 0:
        try:
            group.close()
            del group
            gc.collect()
        finally:
            os._exit(0)
    assert (await asyncio.to_thread(os.waitpid, pid, 0))[1] == 0
    assert [t async for out in group.submit(PROMPT, params) for t in out.token_ids] == mock.reply(7, 3)
