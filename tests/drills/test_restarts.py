"""A rank restarted again and again within milliseconds, or claimed by somebody who says nothing: who lives gets in.

An engine says HELLO once and reads one INIT. What comes in between may be read late, belong to a process that is
gone, or go to the next that has connected with the same identity.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import closing, contextmanager

import pytest
import zmq

import smg
from smg import SamplingParams
from smg.engine import loop
from smg.mock import Simulator
from smg.protocol import handshake
from tests.drills.fleet import wait_until
from tests.engine.test_ranks import Dialer

PROMPT = [1, 2, 3]
SOON = 2.0


def params(seed=7, tokens=3):
    return SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True)


@pytest.fixture
def group(ipc_dir):
    with smg.EngineGroup(
        f"ipc://{ipc_dir}/e", backend="tokenspeed", ranks=1, handshake_address="tcp://127.0.0.1:0"
    ) as made:
        yield made


@contextmanager
def loop_away(group):
    """While the group's thread is busy elsewhere, as on a loaded machine."""
    busy, go_on = threading.Event(), threading.Event()
    group._loop.call(lambda: (busy.set(), go_on.wait(10)))
    assert busy.wait(5)
    try:
        yield
    finally:
        go_on.set()


def wait_round(group):
    """Until the group's thread has come round."""
    seen = threading.Event()
    group._loop.call(seen.set)
    assert seen.wait(5)


class Process(Dialer):
    """A process that dials, and is connected when `connect` returns; what it sends then is on its way at once."""

    def __init__(self, group, index=0):
        self.context = zmq.Context()
        self.group = group
        self.index = index
        self.handshake = self._dealer(handshake.identity(index))

    def connect(self):
        monitor = self.handshake.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.handshake.connect(self.group.handshake_address)
        assert monitor.poll(5000)
        self.handshake.disable_monitor()
        return self

    def take_identity(self):
        """Connect, and be the one that the group's handshake socket reaches by this identity, without a word."""
        self.connect()
        while not self.handshake.poll(10):
            self.group._loop.call(lambda: self.group._loop._handshake.send_multipart([handshake.identity(0), b"?"]))
        wait_round(self.group)
        while self.handshake.poll(10):
            self.handshake.recv()

    def serve(self):
        """Go on to be the rank, which has to be answered."""
        assert self.handshake.poll(SOON * 1000), f"no INIT: {self.group._loop.lives[0].describe()}"
        self.init()
        self.ready()
        self.register()

    def takes(self, group):
        """Whether requests come here, once the death of a predecessor is known."""
        until = time.monotonic() + SOON
        while time.monotonic() < until:
            try:
                group.wait_ready(SOON)
                stream = group.submit(PROMPT, params())
            except smg.NotReady as error:
                raise AssertionError(str(error)) from None
            except smg.NoRank:
                continue
            while self.input.poll(100):
                kind, payload = self.input.recv_multipart()
                if kind == b"\x00" and stream.request_id.encode() in payload:
                    return True
        return False


# ---------------------------------------------------------------- restarts


def test_a_successor_whose_hello_is_read_before_its_predecessors_hang_up_gets_in(group):
    first, second = Process(group), Process(group)
    with closing(first), closing(second):
        first.connect().hello()
        wait_until(lambda: group.ranks[0].state == "hello")
        with loop_away(group):
            first.close()
            second.connect().hello()
            time.sleep(0.05)  # nothing tells when a message has come to a thread that does not look
        second.serve()
        assert second.takes(group)


def test_a_successor_that_has_taken_the_identity_over_gets_in_when_its_predecessor_dies_in_its_handshake(group):
    first, second = Process(group), Process(group)
    with closing(first), closing(second):
        first.connect().hello()
        wait_until(lambda: group.ranks[0].state == "hello")
        second.connect().hello()
        wait_until(lambda: group.ranks[0].duplicate_hello == 1)
        assert not second.handshake.poll(0)
        first.close()
        second.serve()
        assert second.takes(group)


def test_a_successor_of_a_process_that_was_ready_and_connected_nothing_gets_in(group):
    first, second = Process(group), Process(group)
    with closing(first), closing(second):
        first.connect().hello()
        assert first.handshake.poll(5000)
        first.ready()
        wait_until(lambda: "awaiting REGISTERED" in group._loop.lives[0].describe())
        first.close()
        second.connect().hello()
        second.serve()
        assert second.takes(group)


def test_a_predecessors_end_is_told_from_its_successors_connection_of_the_same_descriptor(group):
    first, second = Process(group), Process(group)
    with closing(first), closing(second):
        with loop_away(group):  # both have gone by before anything is read
            first.connect().hello()
            time.sleep(0.05)
            first.close()
            time.sleep(0.05)
            second.connect()
            time.sleep(0.05)
        wait_round(group)
        second.hello()
        second.serve()
        assert second.takes(group)


@pytest.mark.parametrize("loads", [False, True], ids=["dials at once", "loads its model first"])
@pytest.mark.parametrize("when", ["before the send", "while it is sent"])
def test_an_init_that_went_to_the_next_dialer_is_good_for_it(group, monkeypatch, when, loads):
    """The first has gone when its INIT is sent, the second has connected and not yet been heard."""
    first, second = Process(group), Process(group)
    with closing(first), closing(second):
        identity, bind, swapped = handshake.identity, group._loop._bind, threading.Event()

        def swap():
            if threading.current_thread() is group._loop._thread and not swapped.is_set():
                swapped.set()
                first.close()
                second.connect()
                time.sleep(0.05)

        if when == "before the send":
            monkeypatch.setattr(group._loop, "_bind", lambda *args: (swap(), bind(*args))[1])
        else:
            monkeypatch.setattr(handshake, "identity", lambda rank: (swap(), identity(rank))[1])
        first.connect().hello()
        assert swapped.wait(5)
        wait_round(group)
        second.hello()
        if loads:
            wait_until(lambda: group.ranks[0].incarnation == 2)  # nothing is heard under the first addresses
        second.serve()
        assert second.takes(group)
        assert group.ranks[0].incarnation == 1 + loads


@pytest.mark.parametrize("overlap", [False, True], ids=["one after another", "at the same time"])
@pytest.mark.parametrize("rounds", [25, pytest.param(1000, marks=pytest.mark.slow)])
def test_who_is_left_of_processes_that_come_and_go_within_milliseconds_gets_in(group, rounds, overlap):
    chance = random.Random(rounds)
    steps = (Process.hello, Process.init, Process.ready, Process.register)

    def pause():
        time.sleep(chance.choice((0, 0, 0.0005, 0.001, 0.003)))

    for _ in range(rounds):
        others, left = [], Process(group)
        for _ in range(chance.randrange(1, 4)):
            others.append(Process(group))
            others[-1].connect()
            for step in steps[: chance.randrange(5)]:
                if step is Process.init and not others[-1].handshake.poll(chance.choice((1, 5, 20))):
                    break
                step(others[-1])
            pause()
            if not overlap or chance.random() < 0.5:
                others.pop().close()
        left.connect().hello()
        pause()
        chance.shuffle(others)
        for other in others:
            other.close()
            pause()
        with closing(left):
            left.serve()
            assert left.takes(group)


# ---------------------------------------------------------------- connections that say nothing


@pytest.mark.parametrize("when", ["before its HELLO", "after INIT", "after READY"])
def test_a_silent_connection_with_a_ranks_identity_keeps_the_rank_from_nothing(group, monkeypatch, when):
    monkeypatch.setattr(loop, "_READY_GRACE", 0.2)
    silent, rank = Process(group), Process(group)
    with closing(silent), closing(rank):
        if when == "before its HELLO":
            silent.take_identity()
        rank.connect().hello()
        rank.init()
        if when == "after INIT":
            silent.take_identity()
        rank.ready()
        if when == "after READY":
            silent.take_identity()
        rank.register()
        assert rank.takes(group)
        assert not silent.handshake.poll(0)
        assert group.ranks[0].incarnation == 1


def test_a_rank_whose_hello_a_silent_connection_has_displaced_is_named_and_gets_in_when_it_is_restarted(group):
    """libzmq drops what was not read of a connection whose identity is taken over, and no engine repeats it."""
    silent, lost = Process(group), Process(group)
    with closing(silent), closing(lost):
        with loop_away(group):
            lost.connect().hello()
            time.sleep(0.05)
            silent.connect()
            time.sleep(0.05)
        wait_round(group)
        with pytest.raises(smg.NotReady, match="must be restarted"):
            group.wait_ready(0.1)
        lost.close()
        with Simulator(group.url, handshake_address=group.handshake_address, step_ms=0) as mock:
            group.wait_ready(10)
            tokens = [t for out in group.submit(PROMPT, params()).blocking(10) for t in out.token_ids]
            assert tokens == mock.reply(7, 3)
        assert not silent.handshake.poll(0)


def test_a_silent_connection_on_a_ranks_input_keeps_it_from_nothing_before_or_after_it_registers(group):
    silent, rank = Process(group), Process(group)
    with closing(silent), closing(rank):
        rank.connect().hello()
        wait_until(lambda: group.ranks[0].state == "hello")

        def listen():
            dealer = silent._dealer(handshake.identity(0))
            monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            dealer.connect(f"ipc://{group.url[6:]}-in-0-1.sock")
            assert monitor.poll(5000)
            dealer.disable_monitor()
            return dealer

        before = listen()
        time.sleep(0.05)  # the group's thread takes it in when it looks at that socket next
        rank.serve()
        assert rank.takes(group)
        after = listen()
        assert rank.takes(group)
        assert not before.poll(0)
        assert not after.poll(0)
