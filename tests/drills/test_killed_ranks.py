"""SIGKILL, SIGSTOP and restarts of ranks that are processes: only what failed fails, and once."""

from __future__ import annotations

import random
import re
import signal
import threading
import time
from collections import Counter

import pytest
from serving import BODY, CHAT

import smg
from smg import SamplingParams
from tests.drills.fleet import wait_life, wait_until

PROMPT = [1, 2, 3]
SOON = 2.0  # seconds that tests allow; benchmarks/drills.py measures how long it takes


def params(seed, tokens):
    return SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True)


class Readers:
    """Streams of one outlet: their tokens, and what each ended with."""

    def __init__(self, group):
        self.outlet = group.outlet()
        self.tokens: dict[smg.Stream, list[int]] = {}
        self.ends: dict[smg.Stream, object] = {}
        self.times: dict[smg.Stream, float] = {}
        self.group = group

    def submit(self, seed, tokens, **options):
        stream = self.group.submit(PROMPT, params(seed, tokens), outlet=self.outlet, **options)
        stream.data = seed
        self.tokens[stream] = []
        return stream

    def take(self, timeout=SOON):
        assert self.outlet.wait_blocking(timeout), "nothing came"
        for stream, out in self.outlet.take():
            assert stream not in self.ends, "something came after the end"
            if isinstance(out, smg.Output):
                self.tokens[stream] += out.token_ids
                if out.finish_reason is None:
                    continue
            self.ends[stream] = out
            self.times[stream] = time.monotonic()

    def read_all(self):
        while len(self.ends) < len(self.tokens):
            self.take()


def test_a_sigkill_of_one_of_four_ranks_ends_its_requests_and_no_other(make_fleet, idle):
    fleet = make_fleet(4)
    group, readers = fleet.group, Readers(fleet.group)
    streams = [readers.submit(seed, 120) for seed in range(100)]
    while not all(readers.tokens.values()):
        readers.take()
    assert Counter(stream.rank for stream in streams) == dict.fromkeys(range(4), 25)
    killed = time.monotonic()
    fleet.kill(0)
    readers.read_all()
    for stream, end in readers.ends.items():
        if stream.rank == 0:
            assert isinstance(end, smg.RankDied)
            assert end.rank == 0
            assert readers.times[stream] - killed < SOON
            assert readers.tokens[stream] == fleet.reply(stream.data, len(readers.tokens[stream]))
        else:
            assert isinstance(end, smg.Output)
            assert readers.tokens[stream] == fleet.reply(stream.data, 120)
    assert group.counters["died"] == [25, 0, 0, 0]
    idle(group)
    again = [readers.submit(seed, 2) for seed in range(12)]
    assert Counter(stream.rank for stream in again) == {1: 4, 2: 4, 3: 4}
    readers.read_all()
    fleet.start(0)
    wait_life(group, 0, 2)
    reborn = readers.submit(7, 5, rank=0)
    readers.read_all()
    assert readers.tokens[reborn] == fleet.reply(7, 5)
    idle(group)


def test_a_sigkill_behind_http_is_an_error_event_or_a_503_for_its_clients_only(serve, make_fleet):
    served = serve(ranks=4, mock=None)
    fleet = make_fleet(of=served.group)
    clients = []
    try:
        for i in range(100):
            raw = served.dial()
            clients.append(raw)
            raw.post(CHAT, BODY | {"max_tokens": 120, "seed": i, "stream": i % 2 == 0, "ignore_eos": True})
        wait_until(lambda: sum(served.group.counters["requests"]) == 100)
        for raw in clients[::2]:
            raw.until(b'"content":"', 2)  # a token is out, so that nothing moves to another rank
        wait_until(lambda: min(c.completion_tokens for r in list(served.front.active) for c in r.choices) > 0)
        assert served.group.in_flight.tolist() == [25] * 4
        fleet.kill(0)
        ends = Counter()
        for i, raw in enumerate(clients):
            received = raw.until(b"\r\n0\r\n\r\n" if i % 2 == 0 else b"}}")
            if b'"code":"rank_died"' not in received:
                assert received.startswith(b"HTTP/1.1 200 OK")
                assert received.count(b'"finish_reason":"length"') == 1
                ends["finished"] += 1
            elif i % 2 == 0:
                assert b"X-SMG-Rank: 0\r\n" in received
                assert b'"finish_reason":"' not in received
                assert b"[DONE]" not in received
                ends["failed"] += 1
            else:
                assert received.startswith(b"HTTP/1.1 503 ")
                ends["failed"] += 1
        assert ends == {"finished": 75, "failed": 25}
    finally:
        for raw in clients:
            raw.close()
    wait_until(lambda: served.front.admission.active == 0)
    assert served.group.requests == 0
    assert not re.search(r"smg_worker_retries_total\{.*\} [1-9]", served.metrics())


@pytest.mark.parametrize("rounds", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_ranks_are_killed_and_restarted_at_random_under_load(make_fleet, idle, rounds):
    fleet = make_fleet(4, step_ms=1.0)
    group = fleet.group
    ends: Counter[str] = Counter()
    stop = threading.Event()

    def work(number):
        chance = random.Random(number)
        while not stop.is_set():
            seed, wanted = chance.randrange(10_000), chance.randrange(1, 60)
            tokens, end = [], "NoRank"
            try:
                for out in group.submit(PROMPT, params(seed, wanted)).blocking(20):
                    tokens += out.token_ids
                    end = out.finish_reason
            except (smg.RankDied, smg.NoRank) as error:
                end = type(error).__name__
            # Whatever came is this request's own, in order, from one process.
            assert tokens == fleet.reply(seed, len(tokens))
            assert end != "length" or len(tokens) == wanted
            ends[end] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    chance = random.Random(rounds)
    lives = Counter(dict.fromkeys(range(4), 1))
    try:
        for _ in range(rounds):
            rank = chance.randrange(4)
            fleet.kill(rank)
            fleet.start(rank)
            lives[rank] += 1
            wait_life(group, rank, lives[rank])
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert ends["length"] > rounds
    assert set(ends) <= {"length", "RankDied", "NoRank"}
    counters = group.counters
    sent = sum(counters["requests"]) + sum(counters["unsent"])
    assert sent == sum(counters["finished"]) + sum(counters["died"])
    assert sum(counters["died"]) == ends["RankDied"]
    assert sum(counters["foreign"]) == sum(counters["late"]) == sum(counters["undecodable"]) == 0
    idle(group)


@pytest.mark.parametrize("rounds", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_a_restart_that_dials_in_the_same_instant_as_its_predecessors_sigkill_gets_in(make_fleet, idle, rounds):
    fleet = make_fleet(1, step_ms=1.0)
    group, chance = fleet.group, random.Random(rounds)
    for life in range(2, rounds + 2):
        doomed = group.submit(PROMPT, params(1, 100_000)).blocking(10)
        next(doomed)
        fleet.replace(0, chance.uniform(-0.01, 0.03))  # a simulator dials about 10 ms after its start
        wait_life(group, 0, life)
        tokens = [token for out in group.submit(PROMPT, params(life, 3)).blocking(10) for token in out.token_ids]
        assert tokens == fleet.reply(life, 3)
        with pytest.raises(smg.RankDied):
            for _ in doomed:
                pass
    assert group.counters["died"] == [rounds]
    idle(group)


@pytest.mark.parametrize("rounds", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_a_rank_that_is_restarted_twice_within_milliseconds_gets_in(make_fleet, idle, rounds):
    fleet = make_fleet(1, step_ms=1.0)
    group, chance = fleet.group, random.Random(rounds)
    for seed in range(rounds):
        fleet.replace(0, chance.uniform(-0.01, 0.03))
        time.sleep(chance.uniform(0, 0.03))
        fleet.replace(0, chance.uniform(-0.01, 0.03))
        tokens, until = [], time.monotonic() + SOON
        while not tokens:  # its predecessors are dead, so that only the last can answer
            assert time.monotonic() < until, group._loop.lives[0].describe()
            try:
                tokens = [
                    token for out in group.submit(PROMPT, params(seed, 3)).blocking(10) for token in out.token_ids
                ]
            except (smg.NoRank, smg.RankDied):
                time.sleep(0.001)
        assert tokens == fleet.reply(seed, 3)
    idle(group)


def test_requests_of_a_stopped_process_end_by_their_own_deadlines(make_fleet, idle):
    fleet = make_fleet(2, group={"stall_timeout": 0.2})
    group, readers = fleet.group, Readers(fleet.group)
    stuck = [readers.submit(seed, 100_000, rank=0, deadline=0.6) for seed in range(5)]
    patient = readers.submit(5, 200, rank=0)
    while not all(readers.tokens.values()):
        readers.take()
    fleet.signal(0, signal.SIGSTOP)
    wait_until(lambda: [rank.state for rank in group.ranks] == ["stalled", "live"])
    others = [readers.submit(seed, 3) for seed in range(6)]
    assert {stream.rank for stream in others} == {1}
    while len(readers.ends) < len(stuck) + len(others):
        readers.take()
    assert all(isinstance(readers.ends[stream], smg.DeadlineExceeded) for stream in stuck)
    assert all(isinstance(readers.ends[stream], smg.Output) for stream in others)
    fleet.signal(0, signal.SIGCONT)
    readers.read_all()
    assert readers.tokens[patient] == fleet.reply(5, 200)
    wait_until(lambda: group.ranks[0].state == "live")
    back = readers.submit(9, 5, rank=0)
    readers.read_all()
    assert readers.tokens[back] == fleet.reply(9, 5)
    assert group.ranks[0].incarnation == 1
    idle(group)


def test_a_stopped_process_that_has_lost_all_its_requests_is_tried_with_one_and_comes_back(make_fleet, idle):
    fleet = make_fleet(2, group={"stall_timeout": 0.2})
    group, readers = fleet.group, Readers(fleet.group)
    readers.submit(1, 100_000, rank=0, deadline=0.4)
    readers.take()
    fleet.signal(0, signal.SIGSTOP)
    readers.read_all()
    assert [rank.state for rank in group.ranks] == ["stalled", "live"]
    streams = [readers.submit(seed, 3) for seed in range(10)]
    assert [stream.rank for stream in streams].count(0) == 1
    fleet.signal(0, signal.SIGCONT)
    readers.read_all()
    assert all(readers.tokens[stream] == fleet.reply(stream.data, 3) for stream in streams)
    wait_until(lambda: group.ranks[0].state == "live")
    assert {readers.submit(seed, 3).rank for seed in range(10)} == {0, 1}
    readers.read_all()
    idle(group)
