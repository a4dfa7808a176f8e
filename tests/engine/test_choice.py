"""Which rank a request goes to."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter

import pytest

import smg
from smg.engine.lifecycle import State
from tests.engine.rig import Rig

STATES = list(State)


@pytest.fixture
def make_rig():
    rigs = []

    def make(*args, **kwargs):
        rigs.append(Rig(*args, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def finish(rig, stream, load=None):
    rig.pump()
    rig.emit(stream.rank, [(stream.request_id, [1], "stop", 1)], load)
    rig.pump()


def report(rig, rank, running, waiting, active=0, total=100):
    """A load report that rides on a frame without rows."""
    rig.emit(rank, [], (running, waiting, active, total))
    rig.pump()


def test_ten_sequential_requests_on_two_idle_ranks_split_evenly(make_rig):
    rig = make_rig(2)
    ranks = []
    for _ in range(10):
        stream = rig.submit()
        ranks.append(stream.rank)
        finish(rig, stream)
    assert Counter(ranks) == {0: 5, 1: 5}


def test_a_burst_without_reports_stays_within_one_of_even(make_rig):
    rig = make_rig(8)
    streams = []
    for _ in range(512):
        streams.append(rig.submit())
        counts = [rig.core.in_flight(rank) for rank in range(8)]
        assert max(counts) - min(counts) <= 1


def test_a_burst_with_late_reports_stays_within_one_of_even(make_rig):
    rig = make_rig(8)
    streams = []
    past = [[0] * 8]
    for count in range(512):
        streams.append(rig.submit())
        past.append([rig.core.in_flight(rank) for rank in range(8)])
        assert max(past[-1]) - min(past[-1]) <= 1
        if count % 10 == 9:  # every rank reports what it held fifty submits ago
            for rank, held in enumerate(past[max(0, count - 50)]):
                report(rig, rank, held // 2, held - held // 2, active=40)


def test_an_idle_rank_is_idle_whatever_it_reported_last(make_rig):
    rig = make_rig(2)
    first = rig.submit(rank=0)
    finish(rig, first, load=(3, 5, 10, 100))
    busy, idle = rig.submit(rank=1), rig.submit()
    assert (busy.rank, idle.rank) == (1, 0)
    assert [rig.core.in_flight(rank) for rank in (0, 1)] == [1, 1]


def test_an_idle_rank_is_idle_also_when_a_late_frame_brought_the_report(make_rig):
    rig = make_rig(2)
    first = rig.submit(rank=0)
    rig.pump()
    rid = first.request_id
    first.abort()
    rig.emit(0, [(rid, [1], "", 1)], (3, 5, 10, 100))
    rig.pump()
    busy = rig.submit(rank=1)
    assert rig.submit().rank == 0
    assert busy.rank == 1


def test_what_a_rank_reports_counts_when_it_is_more_than_was_sent_there(make_rig):
    rig = make_rig(2)
    held = [rig.submit(rank=rank) for rank in (0, 1)]
    report(rig, 0, 20, 10)
    more = [rig.submit() for _ in range(5)]
    assert [stream.rank for stream in more] == [1] * 5
    assert len(held) == 2


def test_a_queue_behind_a_full_cache_weighs_more(make_rig):
    rig = make_rig(2)
    held = [rig.submit(rank=rank) for rank in (0, 0, 1, 1, 1)]
    report(rig, 0, 1, 1, active=100)  # 2 + 1 * 6 * 0.5 = 5
    report(rig, 1, 3, 0, active=100)  # 3: nobody waits
    assert rig.submit().rank == 1
    report(rig, 0, 1, 1, active=50)  # 2 again
    assert rig.submit().rank == 0
    assert len(held) == 5


def test_no_report_differs_from_zero(make_group):
    group, mock = make_group(ranks=1, hold=True)
    assert group.load["reported"].tolist() == [False]
    stream = group.submit([1, 2, 3], smg.SamplingParams(max_tokens=2, seed=1))
    mock.wait_for("add")
    mock.step(1, 0)
    iterator = stream.blocking(10)
    next(iterator)
    load = group.load[0]
    assert load["reported"]
    assert load["running"] == 1
    assert 0 < load["kv_usage"] < 1


@pytest.mark.parametrize(
    ("states", "allowed"),
    [
        (["live", "stalled", "dead"], {0}),
        (["stalled", "draining", "dead"], {0}),
        (["draining", "hello", "live"], {2}),
        (["absent", "draining", "dead"], set()),
        (["stalled", "live", "live"], {1, 2}),
    ],
)
def test_only_live_ranks_get_work_and_stalled_ones_when_there_is_no_other(make_rig, states, allowed):
    rig = make_rig(3)
    for rank, state in enumerate(states):
        rig.core.set_state(rank, STATES.index(State(state)))
    if not allowed:
        with pytest.raises(smg.NoRank):
            rig.submit()
        return
    streams = [rig.submit() for _ in range(12)]
    assert {stream.rank for stream in streams} == allowed


def test_a_pinned_rank_is_honoured_or_refused(make_rig):
    rig = make_rig(2)
    assert [rig.submit(rank=1).rank for _ in range(5)] == [1] * 5
    rig.core.set_state(1, STATES.index(State.DRAINING))
    with pytest.raises(smg.InvalidRank):
        rig.submit(rank=1)
    with pytest.raises(smg.InvalidRank):
        rig.submit(rank=2)


def test_bytes_that_wait_for_one_rank_are_bounded(make_rig):
    rig = make_rig(1)
    rig.payload = rig.payload + bytes(20 << 20)
    streams = [rig.submit() for _ in range(3)]
    with pytest.raises(smg.Overloaded):
        rig.submit()
    assert rig.core.counters()["overloaded"] == [1]
    assert len(streams) == 3


def test_wire_ids_are_new_and_slots_are_reused_in_turn(make_rig):
    rig = make_rig(1)
    seen = set()
    slots = []
    for _ in range(2500):
        stream = rig.submit()
        rid = stream.request_id
        assert len(rid) == 24
        assert rid not in seen
        seen.add(rid)
        slots.append(int(rid[8:16], 16))
        stream.abort()
        del stream
        rig.pump()
    assert slots[:1024] == list(range(1024))  # first in, first out: no slot twice in a row
    assert slots[1024:2048] == list(range(1024))
    assert len({rid[:8] for rid in seen}) == 1


def test_submits_and_aborts_from_eight_threads_leave_nothing_behind(make_group):
    group, mock = make_group(ranks=2)
    errors = []
    turns = itertools.count()

    def work():
        try:
            for _ in range(2000):
                stream = None
                while stream is None:
                    try:
                        stream = group.submit([1, 2, 3], smg.SamplingParams(max_tokens=1000, seed=1))
                    except smg.Overloaded:  # the pump has not had its turn; what was dropped waits in the queue too
                        time.sleep(0)
                if next(turns) % 2:
                    stream.abort()
                del stream
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert errors == []
    assert group.in_flight.tolist() == [0, 0]
    counters = group.counters
    ended = sum(sum(counters[name]) for name in ("finished", "aborted", "dropped"))
    assert ended == 16_000
    allocated, free, live, waiting = group._core.slots
    assert (allocated - free, live, waiting) == (0, 0, 0)
    assert mock.stats(0)["adds"] <= counters["requests"][0]
