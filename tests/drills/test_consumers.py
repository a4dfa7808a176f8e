"""Consumers that do not read, leave, block their loop or starve the interpreter: the engine and the others go on."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections import Counter

import pytest
from serving import CHAT, STREAM

import smg
from smg import SamplingParams
from smg.mock import spawn
from tests.drills.fleet import wait_until

PROMPT = [1, 2, 3]
UNREAD = 1000
STEP = 0.02  # seconds
SPARE = 48 << 20  # bytes beyond the tokens: allocator, sockets, 1,000 small objects of each kind

shorter = pytest.mark.parametrize("seconds", [1.0, pytest.param(60.0, marks=pytest.mark.slow)])


def params(seed=7, tokens=5):
    return SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True)


def resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def unread_options():
    """An engine in a process of its own that tells when its output socket is full."""
    return {"step_ms": STEP * 1000, "max_running": 2 * UNREAD, "kv_pages": 100_000}


def check_unread(group, engine, seconds, most_bytes_per_token):
    """While 1,000 requests run that nobody reads, others are answered, the engine never waits, memory is bounded."""
    wait_until(lambda: group.requests == UNREAD and sum(group.counters["tokens"]) >= UNREAD, 20)
    before, tokens_before = resident(), sum(group.counters["tokens"])
    ends = time.monotonic() + seconds
    seed = 0
    while time.monotonic() < ends:
        seed += 1
        tokens = [t for out in group.submit(PROMPT, params(seed, 10)).blocking(10) for t in out.token_ids]
        assert tokens == engine.reply(seed, 10)
    came = sum(group.counters["tokens"]) - tokens_before
    assert came > UNREAD * seconds  # a token a second each, of the 50 that an idle machine has time for
    assert resident() - before < came * most_bytes_per_token + SPARE
    assert not engine.events.matching("blocked")
    assert group.requests == UNREAD


@shorter
def test_a_thousand_streams_that_nobody_reads_hold_up_nobody(ipc_dir, idle, seconds):
    with (
        smg.EngineGroup(f"ipc://{ipc_dir}/e", backend="tokenspeed", handshake_address="tcp://127.0.0.1:0") as group,
        spawn(group.url, handshake_address=group.handshake_address, record=False, **unread_options()) as engine,
    ):
        group.wait_ready(20)
        streams = [group.submit(PROMPT, params(seed, 100_000)) for seed in range(UNREAD)]
        check_unread(group, engine, seconds, 4)
        # What was not read is still there, whole, in one output.
        out = next(streams[5].blocking(10))
        assert len(out.token_ids) == out.completion_tokens > seconds
        assert out.token_ids == engine.reply(5, out.completion_tokens)
        for stream in streams:
            stream.abort()
        idle(group)


@shorter
def test_a_thousand_http_clients_that_never_read_hold_up_nobody(serve, ipc_dir, seconds):
    served = serve(ranks=1, mock=None)
    group = served.group
    with spawn(group.url, handshake_address=group.handshake_address, record=False, **unread_options()) as engine:
        group.wait_ready(20)
        clients = []
        for seed in range(UNREAD):
            clients.append(served.dial(window=4096))
            clients[-1].post(CHAT, STREAM | {"max_tokens": 30_000, "seed": seed, "ignore_eos": True})
        # What a stream's text takes: at most what the connection holds, 64 KiB and one write, and 4 bytes a token.
        check_unread(group, engine, seconds, 300 if seconds < 10 else 4 + 40)
        assert served.front.admission.active == UNREAD
        assert served.chat(ignore_eos=True).status == 200
        for raw in clients:
            raw.close()
        wait_until(lambda: group.requests == 0, 20)
        wait_until(lambda: served.front.admission.active == 0)


@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_cancels_at_random_points_leave_nothing_and_abort_at_most_once(make_group, idle, count):
    group, mock = make_group(ranks=2, step_ms=1, max_running=1000)
    outlet, chance = group.outlet(), random.Random(count)
    running: dict[smg.Stream, int] = {}  # outputs until it is cancelled
    finished, cancelled = set(), set()
    submitted = 0
    while submitted < count or running:
        while submitted < count and len(running) < 300:
            stream = group.submit(PROMPT, params(submitted, chance.randrange(1, 12)), outlet=outlet)
            stream.data = group_id = stream.request_id
            submitted += 1
            patience = chance.randrange(-1, 15)
            if patience < 0:
                stream.abort()
                cancelled.add(group_id)
            else:
                running[stream] = patience
        outlet.wait_blocking(10)
        for stream, out in outlet.take():
            assert stream in running, "something came after the end"
            running[stream] -= 1
            if out.finish_reason is not None:
                finished.add(stream.data)
                del running[stream]
                stream.abort()  # comes too late to be one
        for stream in [stream for stream, patience in running.items() if patience <= 0]:
            cancelled.add(stream.data)
            del running[stream]
            stream.abort()
            stream.abort()
    assert len(finished) + len(cancelled) == count
    assert min(len(finished), len(cancelled)) > count / 10
    idle(group)
    counters = group.counters
    wait_until(lambda: sum(mock.stats(rank)["aborts"] for rank in (0, 1)) == sum(group.counters["aborts"]))
    named = Counter(rid for event in mock.events.matching("abort") for rid in event["rids"])
    assert set(named.values()) <= {1}
    assert not named.keys() & finished
    # One for each that was cancelled after it was sent and before its end had come here.
    assert sum(counters["aborts"]) == sum(counters["aborted"]) - sum(counters["unsent"])
    assert sum(counters["finished"]) + sum(counters["aborted"]) == count
    assert sum(counters["requests"]) + sum(counters["unsent"]) == count


@pytest.mark.parametrize("seconds", [2.0, pytest.param(5.0, marks=pytest.mark.slow)])
async def test_an_event_loop_that_is_blocked_loses_nothing_and_stops_nobody_else(make_fleet, idle, seconds):
    fleet = make_fleet(1, step_ms=5)
    group = fleet.group
    streams = [group.submit(PROMPT, params(seed, 100)) for seed in range(100)]
    other = {}

    def read_elsewhere():
        began = time.monotonic()
        other["tokens"] = [t for out in group.submit(PROMPT, params(3, 50)).blocking(10) for t in out.token_ids]
        other["seconds"] = time.monotonic() - began

    thread = threading.Thread(target=read_elsewhere)
    thread.start()
    time.sleep(seconds)  # the loop's own thread
    assert group.counters["tokens"] == [100 * 100 + 50]
    assert group.requests == 0
    assert other["tokens"] == fleet.reply(3, 50)
    assert other["seconds"] < seconds
    thread.join()
    for seed, stream in enumerate(streams):
        outs = [out async for out in stream]
        assert len(outs) == 1
        assert outs[0].token_ids == fleet.reply(seed, 100)
    idle(group)


def counted_during(group, work):
    """Tokens that were counted while `work` ran, by counters read without letting others run in between."""
    before = sum(group.counters["tokens"])
    work()
    return sum(group.counters["tokens"]) - before


@pytest.mark.parametrize("objects", [300_000, pytest.param(5_000_000, marks=pytest.mark.slow)])
def test_collections_over_many_objects_do_not_hold_up_the_pump(make_fleet, idle, objects):
    fleet = make_fleet(1, step_ms=1)
    group = fleet.group
    outlet = group.outlet()
    stream = group.submit(PROMPT, params(7, 100_000), outlet=outlet)
    assert outlet.wait_blocking(10)
    heap = [[] for _ in range(objects)]
    tokens = []
    gc.collect()
    for _ in range(3):
        assert counted_during(group, gc.collect) > 0
        tokens += [token for _, out in outlet.take() for token in out.token_ids]
    assert tokens == fleet.reply(7, len(tokens))
    stream.abort()
    del heap
    idle(group)


def test_a_host_process_at_full_load_loses_nothing(make_fleet, idle):
    fleet = make_fleet(2, step_ms=1)
    group, stop = fleet.group, threading.Event()

    def spin():
        while not stop.is_set():
            pass

    spinner = threading.Thread(target=spin)
    spinner.start()
    try:

        async def read(seed):
            return [token async for out in group.submit(PROMPT, params(seed, 50)) for token in out.token_ids]

        async def read_all():
            return await asyncio.gather(*(read(seed) for seed in range(40)))

        assert asyncio.run(read_all()) == [fleet.reply(seed, 50) for seed in range(40)]
    finally:
        stop.set()
        spinner.join()
    idle(group)
