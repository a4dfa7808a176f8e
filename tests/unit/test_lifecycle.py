"""The life of a rank: the table cell by cell, then any interleaving of events against what always holds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from smg.engine.lifecycle import (
    TABLE,
    Action,
    Event,
    Heard,
    RankLife,
    State,
    Step,
    family,
    hear_handshake,
    hear_registration,
)
from smg.errors import HandshakeError

BOUND = {State.HELLO, State.LIVE, State.STALLED, State.DRAINING}
BURIAL = [Action.READ_OUT, Action.END_REQUESTS, Action.UNBIND]


def actions(steps: list[Step]) -> list[Action]:
    return [step.action for step in steps]


def life_in(state: State) -> RankLife:
    """A rank brought to `state` by events."""
    life = RankLife(0, hello_timeout=10.0)
    path = {
        State.ABSENT: [],
        State.HELLO: [Event.HELLO],
        State.LIVE: [Event.HELLO, Event.READY, Event.REGISTERED],
        State.STALLED: [Event.HELLO, Event.READY, Event.REGISTERED, Event.SILENT],
        State.DRAINING: [Event.HELLO, Event.READY, Event.REGISTERED, Event.DRAIN],
        State.DEAD: [Event.HELLO, Event.READY, Event.REGISTERED, Event.LOST],
    }[state]
    for event in path:
        life.handle(event, 0.0)
    assert life.state is state
    return life


def test_every_event_has_an_entry_in_every_state() -> None:
    assert set(TABLE) == set(itertools.product(State, Event))


# What the design asks for. Every pair that is missing here must change nothing and do nothing.
MOVES = {
    (State.ABSENT, Event.HELLO): (State.HELLO, [Action.BIND_AND_INIT]),
    (State.DEAD, Event.HELLO): (State.HELLO, [Action.BIND_AND_INIT]),
    (State.HELLO, Event.HELLO): (State.HELLO, [Action.KEEP_HELLO]),
    (State.LIVE, Event.HELLO): (State.LIVE, [Action.KEEP_HELLO]),
    (State.STALLED, Event.HELLO): (State.STALLED, [Action.KEEP_HELLO]),
    (State.DRAINING, Event.HELLO): (State.DRAINING, [Action.KEEP_HELLO]),
    (State.HELLO, Event.COMPLETE): (State.LIVE, [Action.GO_LIVE]),
    (State.ABSENT, Event.BAD): (State.ABSENT, [Action.REFUSE]),
    (State.HELLO, Event.BAD): (State.ABSENT, [Action.REFUSE, Action.UNBIND]),
    (State.LIVE, Event.BAD): (State.LIVE, [Action.REFUSE]),
    (State.STALLED, Event.BAD): (State.STALLED, [Action.REFUSE]),
    (State.DRAINING, Event.BAD): (State.DRAINING, [Action.REFUSE]),
    (State.DEAD, Event.BAD): (State.DEAD, [Action.REFUSE]),
    (State.HELLO, Event.OVERDUE): (State.ABSENT, [Action.REFUSE, Action.UNBIND]),
    (State.HELLO, Event.LOST): (State.ABSENT, [Action.UNBIND]),
    (State.LIVE, Event.LOST): (State.DEAD, BURIAL),
    (State.STALLED, Event.LOST): (State.DEAD, BURIAL),
    (State.DRAINING, Event.LOST): (State.DEAD, BURIAL),
    (State.LIVE, Event.SILENT): (State.STALLED, []),
    (State.STALLED, Event.FRAME): (State.LIVE, []),
    (State.HELLO, Event.DRAIN): (State.ABSENT, [Action.UNBIND]),
    (State.LIVE, Event.DRAIN): (State.DRAINING, []),
    (State.STALLED, Event.DRAIN): (State.DRAINING, []),
    (State.DRAINING, Event.EMPTY): (State.ABSENT, [Action.UNBIND]),
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_the_table_is_the_designs(state: State, event: Event) -> None:
    expected, todo = MOVES.get((state, event), (state, []))
    assert TABLE[state, event] == (expected, tuple(todo))


@pytest.mark.parametrize("order", list(itertools.permutations([Event.READY, Event.REGISTERED])))
def test_a_rank_is_live_when_ready_and_registration_have_come_in_either_order(
    order: tuple[Event, Event],
) -> None:
    life = life_in(State.HELLO)
    assert life.handle(order[0], 1.0) == []
    assert life.state is State.HELLO
    assert life.handle(order[1], 2.0) == [Step(Action.GO_LIVE, 1)]
    assert life.state is State.LIVE


@pytest.mark.parametrize("event", [Event.READY, Event.REGISTERED])
def test_one_half_of_the_handshake_twice_is_counted_and_is_not_the_other_half(event: Event) -> None:
    life = life_in(State.HELLO)
    assert life.handle(event, 0.0) == life.handle(event, 0.0) == []
    assert (life.state, life.unexpected) == (State.HELLO, 1)


@pytest.mark.parametrize("state", [state for state in State if state is not State.HELLO])
def test_ready_and_registration_outside_a_handshake_are_counted(state: State) -> None:
    life = life_in(state)
    life.handle(Event.READY, 0.0)
    life.handle(Event.REGISTERED, 0.0)
    assert (life.state, life.unexpected) == (state, 2)


def test_each_sign_of_progress_moves_the_deadline() -> None:
    life = RankLife(0, hello_timeout=10.0)
    assert life.deadline is None
    life.handle(Event.HELLO, 0.0)
    assert life.deadline == 10.0
    life.handle(Event.REGISTERED, 8.0)
    assert life.deadline == 18.0
    life.handle(Event.REGISTERED, 9.0)
    assert life.deadline == 18.0
    assert life.expire(17.9) == []
    assert actions(life.expire(18.0)) == [Action.REFUSE, Action.UNBIND]
    assert (life.state, life.deadline, life.refused) == (State.ABSENT, None, 1)
    assert "no READY within 10 s" in life.describe()


def test_another_processs_hello_is_no_progress_and_takes_over_at_the_deadline() -> None:
    life = life_in(State.HELLO)
    life.handle(Event.HELLO, 9.0)
    assert life.deadline == 10.0
    assert actions(life.expire(12.0)) == [Action.REFUSE, Action.UNBIND, Action.BIND_AND_INIT]
    assert (life.state, life.incarnation, life.deadline) == (State.HELLO, 2, 22.0)


@pytest.mark.parametrize("registered", ["before", "after"])
def test_who_is_not_heard_on_the_handshake_socket_any_more_is_live_by_its_registration(registered: str) -> None:
    life = life_in(State.HELLO)
    if registered == "before":
        life.handle(Event.REGISTERED, 1.0, incarnation=1)
    kept = life.handle(Event.HELLO, 2.0)  # takes the identity over there
    if registered == "after":
        assert actions(kept) == [Action.KEEP_HELLO]
        assert "awaiting REGISTERED (another process claims this rank)" in life.describe()
        kept += life.handle(Event.REGISTERED, 3.0, incarnation=1)
    assert actions(kept) == [Action.KEEP_HELLO, Action.GO_LIVE]
    assert (life.state, life.incarnation, life.pending) == (State.LIVE, 1, True)


def test_a_live_rank_has_no_deadline() -> None:
    life = life_in(State.LIVE)
    assert life.expire(1e9) == []


@pytest.mark.parametrize("state", [State.LIVE, State.STALLED, State.DRAINING])
def test_a_hello_of_a_live_identity_waits_for_its_death_and_then_starts_the_next_incarnation(
    state: State,
) -> None:
    life = life_in(state)
    assert life.handle(Event.HELLO, 1.0) == [Step(Action.KEEP_HELLO, 1)]
    assert life.handle(Event.HELLO, 1.0) == [Step(Action.KEEP_HELLO, 1)]
    assert (life.state, life.duplicate_hello, life.pending) == (state, 2, True)
    assert life.handle(Event.LOST, 5.0, incarnation=1) == [
        *(Step(action, 1) for action in BURIAL),
        Step(Action.BIND_AND_INIT, 2),
    ]
    assert (life.state, life.pending, life.deadline) == (State.HELLO, False, 15.0)


@pytest.mark.parametrize("event", [Event.BAD, Event.LOST, Event.DRAIN])
def test_a_hello_that_waited_behind_a_failed_handshake_is_answered(event: Event) -> None:
    life = life_in(State.HELLO)
    life.handle(Event.HELLO, 1.0)
    assert life.handle(event, 2.0)[-2:] == [Step(Action.UNBIND, 1), Step(Action.BIND_AND_INIT, 2)]


def test_the_next_incarnation_needs_its_own_ready_and_registration() -> None:
    life = life_in(State.HELLO)
    life.handle(Event.READY, 0.0)
    life.handle(Event.LOST, 0.0)
    life.handle(Event.HELLO, 0.0)
    life.handle(Event.REGISTERED, 0.0, incarnation=2)
    assert life.state is State.HELLO
    life.handle(Event.READY, 0.0)
    assert life.state is State.LIVE


def test_an_event_of_an_earlier_incarnation_changes_nothing_and_is_counted() -> None:
    life = life_in(State.LIVE)
    life.handle(Event.HELLO, 0.0)
    life.handle(Event.LOST, 0.0, incarnation=1)
    for event in (Event.LOST, Event.REGISTERED, Event.BAD, Event.FRAME):
        assert life.handle(event, 0.0, incarnation=1) == []
    assert (life.state, life.stale, life.refused, life.unexpected) == (State.HELLO, 4, 0, 0)


def test_a_death_is_told_once_however_many_signs_of_it_come() -> None:
    life = life_in(State.LIVE)
    assert actions(life.handle(Event.LOST, 0.0, incarnation=1)) == BURIAL
    assert life.handle(Event.LOST, 0.0, incarnation=1) == []
    assert life.lost == 1


def test_the_description_says_what_is_missing_and_what_went_wrong() -> None:
    life = RankLife(3, hello_timeout=10.0)
    assert life.describe() == "rank 3: absent"
    life.handle(Event.BAD, 0.0, why="unknown status 'BYE'")
    assert life.describe() == "rank 3: absent (last fault: unknown status 'BYE')"
    life.handle(Event.HELLO, 0.0)
    assert life.describe().startswith("rank 3: hello, awaiting READY and REGISTERED")
    life.handle(Event.READY, 0.0)
    life.handle(Event.HELLO, 0.0)
    assert "awaiting REGISTERED" in life.describe()
    assert "another process" in life.describe()
    life.handle(Event.REGISTERED, 0.0)
    assert life.describe() == "rank 3: live (another process claims this rank)"
    life.handle(Event.LOST, 0.0, why="disconnected")
    life.handle(Event.LOST, 0.0, why="gone", incarnation=1)
    assert life.describe() == "rank 3: hello, awaiting READY and REGISTERED (last fault: disconnected)"


class AnyInterleaving(RuleBasedStateMachine):
    """A loop that does what it is told, and knows only what a loop knows."""

    def __init__(self) -> None:
        super().__init__()
        self.life = RankLife(0, hello_timeout=10.0)
        self.now = 0.0
        self.bound: list[int] = []  # incarnations whose sockets are bound
        self.came: set[Event] = set()  # what came since the bind
        self.was_live: set[int] = set()
        self.ended: list[int] = []  # incarnations whose requests were ended
        self.read: set[int] = set()
        self.hellos = self.answered = self.superseded = 0  # a HELLO is answered, or waits, or gave way to a newer
        self.kept = 0  # HELLOs that came while another process was there
        self.refused = 0

    def carry_out(self, steps: list[Step]) -> None:
        for action, incarnation in steps:
            if action is Action.BIND_AND_INIT:
                assert self.bound == [], "two incarnations at once"
                assert incarnation == self.answered + 1, "incarnations are counted without a gap"
                self.bound = [incarnation]
                self.came = set()
                self.answered += 1
            elif action is Action.GO_LIVE:
                assert self.bound == [incarnation]
                assert self.came == {Event.READY, Event.REGISTERED}
                assert incarnation not in self.was_live
                self.was_live.add(incarnation)
            elif action is Action.READ_OUT:
                assert self.bound == [incarnation]
                self.read.add(incarnation)
            elif action is Action.END_REQUESTS:
                assert self.bound == [incarnation]
                assert incarnation in self.was_live
                assert incarnation in self.read, "frames already sent are applied first"
                assert incarnation not in self.ended
                self.ended.append(incarnation)
            elif action is Action.UNBIND:
                assert self.bound == [incarnation]
                self.bound = []
            elif action is Action.REFUSE:
                self.refused += 1

    def tell(self, event: Event, incarnation: int | None = None) -> list[Step]:
        steps = self.life.handle(event, self.now, incarnation=incarnation, why=event.value)
        self.carry_out(steps)
        return steps

    @rule()
    def a_process_says_hello(self) -> None:
        self.hellos += 1
        self.kept += self.life.state in BOUND
        if self.life.state is State.HELLO:
            self.came.add(Event.READY)  # which cannot come any more
        if self.life.pending:
            self.superseded += 1
        self.tell(Event.HELLO)

    @rule()
    def ready_comes(self) -> None:
        self.came.add(Event.READY)
        self.tell(Event.READY)

    @rule(old=st.booleans())
    def a_registration_comes(self, old: bool) -> None:
        incarnation = self.life.incarnation - old
        if not old:
            self.came.add(Event.REGISTERED)
        self.tell(Event.REGISTERED, incarnation)

    @rule()
    def garbage_comes(self) -> None:
        self.tell(Event.BAD)

    @rule(drain=st.booleans())
    def a_process_comes_up(self, drain: bool) -> None:
        self.a_process_says_hello()
        self.ready_comes()
        self.a_registration_comes(old=False)
        if drain:
            self.work_goes_on(Event.DRAIN)

    @rule(old=st.booleans())
    def a_sign_of_death_comes(self, old: bool) -> None:
        state, incarnation = self.life.state, self.life.incarnation
        before = len(self.ended)
        steps = self.tell(Event.LOST, incarnation - old)
        if old:
            assert steps == []
        elif state in (State.LIVE, State.STALLED, State.DRAINING):
            assert self.ended[before:] == [incarnation]
            assert self.life.state in (State.DEAD, State.HELLO)
        else:
            assert len(self.ended) == before

    @rule(event=st.sampled_from([Event.SILENT, Event.FRAME, Event.DRAIN, Event.EMPTY]))
    def work_goes_on(self, event: Event) -> None:
        self.tell(event, self.life.incarnation)

    @rule(seconds=st.sampled_from([0.5, 4.0, 9.5, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        overdue = self.life.deadline is not None and self.now >= self.life.deadline
        before = self.life.incarnation
        steps = self.life.expire(self.now)
        self.carry_out(steps)
        assert bool(steps) == overdue
        if overdue:
            assert self.life.state is State.ABSENT or self.life.incarnation == before + 1

    @invariant()
    def sockets_are_bound_exactly_while_a_process_may_use_them(self) -> None:
        assert self.bound == ([self.life.incarnation] if self.life.state in BOUND else [])

    @invariant()
    def only_a_handshake_has_a_deadline_and_it_lies_ahead(self) -> None:
        assert (self.life.deadline is not None) == (self.life.state is State.HELLO)
        if self.life.deadline is not None:
            assert self.now < self.life.deadline <= self.now + self.life.hello_timeout

    @invariant()
    def no_hello_is_lost(self) -> None:
        assert self.hellos == self.answered + self.superseded + self.life.pending
        assert not (self.life.pending and self.life.state in (State.ABSENT, State.DEAD))
        assert self.life.duplicate_hello == self.kept

    @invariant()
    def a_working_state_was_reached_through_a_whole_handshake(self) -> None:
        if self.life.state in (State.LIVE, State.STALLED, State.DRAINING):
            assert self.life.incarnation in self.was_live
        if self.life.state is State.HELLO:
            assert self.life.incarnation not in self.was_live
            assert self.came != {Event.READY, Event.REGISTERED}

    @invariant()
    def counters_tell_what_was_done(self) -> None:
        assert self.life.refused == self.refused
        assert len(self.ended) <= self.life.lost


TestAnyInterleaving = AnyInterleaving.TestCase


def status(payload: bytes) -> str:
    if payload == b"garbage":
        raise HandshakeError("handshake message is not a map")
    return payload.decode()


@pytest.mark.parametrize(
    ("frames", "heard"),
    [
        ([b"\0\0", b"HELLO"], Heard(0, Event.HELLO)),
        ([b"\1\0", b"READY"], Heard(1, Event.READY)),
        ([b"\1\1", b"HELLO"], Heard(257, Event.HELLO)),
        ([b"\0\0", b"garbage"], Heard(0, Event.BAD, "handshake message is not a map")),
        ([b"\0\0", b"BYE"], Heard(0, Event.BAD, "unknown handshake status 'BYE'")),
        ([b"\0\0"], Heard(0, Event.BAD, "handshake message of 1 frames, not 2")),
        ([b"\0\0", b"HELLO", b""], Heard(0, Event.BAD, "handshake message of 3 frames, not 2")),
        ([b"\2\1", b"HELLO"], Heard(None, Event.BAD, "identity 0201 is no rank of 0..257")),
        ([b"\0", b"HELLO"], Heard(None, Event.BAD, "identity 00 is no rank of 0..257")),
        ([b"", b"HELLO"], Heard(None, Event.BAD, "identity '' is no rank of 0..257")),
        ([], Heard(None, Event.BAD, "identity missing is no rank of 0..257")),
    ],
)
def test_a_handshake_message_is_judged_by_identity_then_frames_then_status(frames: list[bytes], heard: Heard) -> None:
    assert hear_handshake(frames, 258, status) == heard


@given(st.lists(st.binary(max_size=4), max_size=4))
def test_no_handshake_message_raises_and_only_two_can_be_good(frames: list[bytes]) -> None:
    heard = hear_handshake(frames, 2, lambda payload: payload.decode("latin-1"))
    good = len(frames) == 2 and frames[0] in (b"\0\0", b"\1\0") and frames[1] in (b"HELLO", b"READY")
    assert (heard.event is not Event.BAD) == good
    assert bool(heard.why) == (heard.event is Event.BAD)


@pytest.mark.parametrize(
    ("version", "backend", "fits"),
    [
        ("tokenspeed-0.1.1", "tokenspeed", True),
        ("sglang-0.5", "sglang", True),
        ("0.32.0", "vllm", True),
        ("0.11.1-rc1", "vllm", True),
        ("", "tokenspeed", True),
        ("0.32.0", "tokenspeed", False),
        ("sglang-0.5", "vllm", False),
        ("tokenspeed-0.1.1", "sglang", False),
    ],
)
def test_an_engine_of_another_family_than_the_groups_is_refused(version: str, backend: str, fits: bool) -> None:
    heard = hear_registration([b"\1\0", version.encode()], 1, backend, status)
    assert heard.rank == 1
    assert heard.event is (Event.REGISTERED if fits else Event.BAD)
    if not fits:
        assert version in heard.why
        assert family(version) in heard.why
        assert backend in heard.why


@pytest.mark.parametrize(
    ("frames", "heard"),
    [
        ([b"\1\0", b"garbage"], Heard(1, Event.BAD, "handshake message is not a map")),
        ([b"\1\0", b"0.1", b""], Heard(1, Event.BAD, "registration of 3 frames, not 2")),
        ([b"\1\0"], Heard(1, Event.BAD, "registration of 1 frames, not 2")),
        ([b"\2\0", b"0.1"], Heard(None, Event.BAD, "identity 0200 on the input socket of rank 1")),
        ([b"x", b"0.1"], Heard(None, Event.BAD, "identity 78 on the input socket of rank 1")),
    ],
)
def test_a_registration_that_cannot_be_used_says_why(frames: list[bytes], heard: Heard) -> None:
    assert hear_registration(frames, 1, "vllm", status) == heard
