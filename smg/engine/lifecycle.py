"""The life of a rank: which event leads where, and what has to be done then.

Pure: no socket, no clock, no thread. The loop tells `RankLife` what happened and carries out the steps it
gets back, in their order. `TABLE` holds the rules; `RankLife` adds what a table cannot hold: which
incarnation lives, what of its handshake has come, and the HELLO that waits until the rank is free again.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

from smg.errors import HandshakeError


class State(enum.Enum):
    """Where a rank stands. The values are the public names."""

    ABSENT = "absent"  # nobody dialed, or the last dialer was refused or has drained
    HELLO = "hello"  # sockets bound, INIT sent; READY and registration are awaited
    LIVE = "live"  # takes work
    STALLED = "stalled"  # silent with work in flight; takes work only when no other rank can
    DRAINING = "draining"  # finishes what it has, takes nothing new
    DEAD = "dead"  # lost, its requests ended, its sockets closed


class Event(enum.Enum):
    """What can happen to a rank."""

    HELLO = "HELLO"
    READY = "READY"
    REGISTERED = "a registration of the right family"
    COMPLETE = "both READY and registration have come"  # found by RankLife itself
    BAD = "a handshake or registration message that cannot be used"
    OVERDUE = "no progress of the handshake until its deadline"  # found by `expire`
    LOST = "disconnected, sentinel, vanished peer, undecodable frames, or its sockets cannot be bound"
    SILENT = "work in flight and no frame for the stall timeout"
    FRAME = "a frame after that silence"
    DRAIN = "drain asked"
    EMPTY = "nothing in flight"


class Action(enum.Enum):
    """What the loop has to do."""

    BIND_AND_INIT = "bind the incarnation's sockets, then send INIT"
    GO_LIVE = "let it take work; `ready` may be complete"
    REFUSE = "log why this dialer is refused"
    KEEP_HELLO = "log once that a second process claims this rank; do not answer it"
    READ_OUT = "read the output socket until it is empty, and apply what comes"
    END_REQUESTS = "end what is left in flight with RankDied"
    UNBIND = "close and unlink the incarnation's sockets"


class Step(NamedTuple):
    """One action, on the sockets and requests of one incarnation."""

    action: Action
    incarnation: int


_stay: tuple[State | Action | None, ...] = (None,)
_dial = (State.HELLO, Action.BIND_AND_INIT)
_keep = (None, Action.KEEP_HELLO)
_live = (State.LIVE, Action.GO_LIVE)
_note = (None, Action.REFUSE)
_turn = (State.ABSENT, Action.REFUSE, Action.UNBIND)
_free = (State.ABSENT, Action.UNBIND)
_bury = (State.DEAD, Action.READ_OUT, Action.END_REQUESTS, Action.UNBIND)
_halt = (State.STALLED,)
_wake = (State.LIVE,)
_quit = (State.DRAINING,)

# fmt: off
_ROWS: dict[Event, tuple[tuple[State | Action | None, ...], ...]] = {
    #                  absent  hello  live   stalled draining dead
    Event.HELLO:      (_dial,  _keep, _keep, _keep,  _keep,  _dial),
    Event.READY:      (_stay,  _stay, _stay, _stay,  _stay,  _stay),
    Event.REGISTERED: (_stay,  _stay, _stay, _stay,  _stay,  _stay),
    Event.COMPLETE:   (_stay,  _live, _stay, _stay,  _stay,  _stay),
    Event.BAD:        (_note,  _turn, _note, _note,  _note,  _note),
    Event.OVERDUE:    (_stay,  _turn, _stay, _stay,  _stay,  _stay),
    Event.LOST:       (_stay,  _free, _bury, _bury,  _bury,  _stay),
    Event.SILENT:     (_stay,  _stay, _halt, _stay,  _stay,  _stay),
    Event.FRAME:      (_stay,  _stay, _stay, _wake,  _stay,  _stay),
    Event.DRAIN:      (_stay,  _free, _quit, _quit,  _stay,  _stay),
    Event.EMPTY:      (_stay,  _stay, _stay, _stay,  _free,  _stay),
}
# fmt: on

TABLE: dict[tuple[State, Event], tuple[State, tuple[Action, ...]]] = {
    (state, event): (
        next((part for part in cell if isinstance(part, State)), state),
        tuple(part for part in cell if isinstance(part, Action)),
    )
    for event, row in _ROWS.items()
    for state, cell in zip(State, row, strict=True)
}


class RankLife:
    """One rank of a group, from process to process.

    `incarnation` counts accepted HELLOs, from 1; 0 means none yet. `deadline` is when `expire` gives up on a
    handshake, None outside of one; each of HELLO, READY and registration puts it `hello_timeout` seconds off.
    `pending` is true while a HELLO waits for the present incarnation to be gone. `fault` says why the last
    incarnation ended or the last dialer was refused.
    """

    def __init__(self, index: int, hello_timeout: float = 600.0) -> None:
        self.index = index
        self.hello_timeout = hello_timeout
        self.state = State.ABSENT
        self.incarnation = 0
        self.deadline: float | None = None
        self.pending = False
        self.fault = ""
        self.duplicate_hello = 0  # HELLOs of an identity that is alive
        self.refused = 0  # messages that were refused, or handshakes given up
        self.unexpected = 0  # READY or registration that nobody waited for
        self.stale = 0  # events of an earlier incarnation
        self.lost = 0  # incarnations that ended by LOST
        self._awaited: set[Event] = set()
        self._hurried = False  # whether `deadline` is that of `hurry`

    def handle(self, event: Event, now: float, *, incarnation: int | None = None, why: str = "") -> list[Step]:
        """Take one event in; what has to be done for it, in order.

        `now` is in seconds of any monotonic clock. `incarnation` is the one whose socket reported the event,
        None for the handshake socket, which is shared: an event of an earlier incarnation changes nothing.
        `why` becomes `fault` where the event ends or refuses something.
        """
        if incarnation is not None and incarnation != self.incarnation:
            self.stale += 1
            return []
        if event in (Event.READY, Event.REGISTERED):
            return self._progress(event, now)
        return self._apply(event, now, why)

    def expire(self, now: float) -> list[Step]:
        """What the time asks for: a handshake without progress is given up at its deadline."""
        if self.deadline is None or now < self.deadline:
            return []
        missing = " and ".join(sorted(event.name for event in self._awaited))
        why = "before it hung up" if self._hurried else f"within {self.hello_timeout:g} s"
        return self._apply(Event.OVERDUE, now, f"no {missing} {why}")

    def hurry(self, until: float) -> None:
        """In a handshake whose process has hung up while another waits: give it up by `until`, if not before."""
        self._hurried = True
        self.deadline = until if self.deadline is None else min(self.deadline, until)

    def describe(self) -> str:
        """State and what explains it, in words for an error message."""
        text = f"rank {self.index}: {self.state.value}"
        if self.state is State.HELLO:
            text += ", awaiting " + " and ".join(sorted(event.name for event in self._awaited))
        if self.fault and self.state not in (State.LIVE, State.DRAINING):
            text += f" (last fault: {self.fault})"
        if self.pending:
            text += " (another process claims this rank)"
        return text

    def _progress(self, event: Event, now: float) -> list[Step]:
        if self.state is not State.HELLO or event not in self._awaited:
            self.unexpected += 1
            return []
        self._awaited.remove(event)
        self.deadline = now + self.hello_timeout
        self._hurried = False
        return self._apply(Event.COMPLETE, now) if not self._awaited else []

    def _apply(self, event: Event, now: float, why: str = "") -> list[Step]:
        before = self.state
        self.state, actions = TABLE[before, event]
        if Action.BIND_AND_INIT in actions:
            self.incarnation += 1
            self.pending = self._hurried = False
            self._awaited = {Event.READY, Event.REGISTERED}
        if Action.KEEP_HELLO in actions:
            self.duplicate_hello += 1
            self.pending = True
            # The newest dialer has taken the identity over on the handshake socket. Whoever dialed before it is not
            # heard there any more, but still on its own input socket.
            self._awaited.discard(Event.READY)
        if Action.REFUSE in actions:
            self.refused += 1
        if event is Event.LOST and actions:
            self.lost += 1
        if why and (Action.UNBIND in actions or Action.REFUSE in actions):
            self.fault = why
        if self.state is not before:
            self.deadline = now + self.hello_timeout if self.state is State.HELLO else None
        steps = [Step(action, self.incarnation) for action in actions]
        if self.state is State.HELLO and not self._awaited:
            steps += self._apply(Event.COMPLETE, now)
        if self.pending and self.state in (State.ABSENT, State.DEAD):
            steps += self._apply(Event.HELLO, now)
        return steps


class Heard(NamedTuple):
    """What a message of the handshake means. `rank` is None when it is about no rank of this group."""

    rank: int | None
    event: Event
    why: str = ""


def hear_handshake(frames: Sequence[bytes], ranks: int, status_of: Callable[[bytes], str]) -> Heard:
    """Judge a message of the handshake ROUTER of a group of `ranks`: HELLO, READY, or BAD and why.

    `status_of` decodes the payload to its status and raises HandshakeError for garbage.
    """
    rank = _rank(frames)
    if rank is None or rank >= ranks:
        return Heard(None, Event.BAD, f"identity {_shown(frames)} is no rank of 0..{ranks - 1}")
    if len(frames) != 2:
        return Heard(rank, Event.BAD, f"handshake message of {len(frames)} frames, not 2")
    try:
        status = status_of(frames[1])
    except HandshakeError as error:
        return Heard(rank, Event.BAD, str(error))
    if status not in ("HELLO", "READY"):
        return Heard(rank, Event.BAD, f"unknown handshake status {status[:80]!r}")
    return Heard(rank, Event[status])


def hear_registration(frames: Sequence[bytes], rank: int, backend: str, version_of: Callable[[bytes], str]) -> Heard:
    """Judge a message of the input ROUTER of `rank`: REGISTERED, or BAD and why.

    `version_of` decodes the payload to its `vllm_version` and raises HandshakeError for garbage. The version
    tells the engine family; an engine that gives none is taken at the group's word.
    """
    if _rank(frames) != rank:
        return Heard(None, Event.BAD, f"identity {_shown(frames)} on the input socket of rank {rank}")
    if len(frames) != 2:
        return Heard(rank, Event.BAD, f"registration of {len(frames)} frames, not 2")
    try:
        version = version_of(frames[1])
    except HandshakeError as error:
        return Heard(rank, Event.BAD, str(error))
    if version and family(version) != backend:
        return Heard(
            rank,
            Event.BAD,
            f"engine {version[:80]!r} is {family(version)}, but the group's backend is {backend}",
        )
    return Heard(rank, Event.REGISTERED)


def family(version: str) -> str:
    """The engine family that a registration's `vllm_version` names: vLLM's own is a bare version."""
    prefix = version.partition("-")[0]
    return prefix if prefix in ("tokenspeed", "sglang") else "vllm"


def _rank(frames: Sequence[bytes]) -> int | None:
    """The engine index in a message's identity frame: two bytes, little-endian."""
    return int.from_bytes(frames[0], "little") if frames and len(frames[0]) == 2 else None


def _shown(frames: Sequence[bytes]) -> str:
    if frames and len(frames[0]) == 5 and frames[0][0] == 0:  # made up by libzmq, another for each
        return "of a connection that had none, or whose own was taken over,"
    return frames[0][:16].hex() or "''" if frames else "missing"
