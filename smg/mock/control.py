"""How tests and tools steer a running simulator: the same calls for one in a thread and one in a process.

Operations travel as messages `{"op": name, "rank": index or null, ...arguments}`; what happens comes back as
events `{"event": name, "rank": index, "incarnation": n, ...}` in the order in which it happened:

    ready        every rank has dialed (once, carries pid)
    dialing      HELLO is on its way (or withheld)
    live         READY and registration are sent
    dead         the rank's sockets are closed
    timeout      no INIT came                          refused_init  an INIT that cannot be used: reason
    blocked      the output socket is full             unblocked
    undecodable  a message was dropped: reason         dropped       an ADD was lost on purpose
    parked       in lockstep, a wave has ended: wave
    deaf         it hears no message any more: reason  crashed       it dies of a message: reason
with `record` also
    add          rid, outcome (queued, rejected, killed), reason
    abort        rids
    utility      method                                wave          a START of it
    finish       rid, reason, completion_tokens
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any

from smg.mock.replies import Replies, make_replies
from smg.mock.settings import Settings

Event = dict[str, Any]

DEFAULT_TIMEOUT = 10.0  # seconds
TRIGGERS = ("after_frames", "after_adds")  # keys of a message that put its operation off


class SimulatorEnded(Exception):
    """The simulator is gone, so what was waited for cannot come."""


class EventLog:
    """Every event so far, and a way to wait for one. Safe to use from several threads."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._changed = threading.Condition()
        self._ended: str | None = None

    def append(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def end(self, why: str) -> None:
        """No more events will come."""
        with self._changed:
            self._ended = self._ended or why
            self._changed.notify_all()

    def matching(self, event: str, **fields: Any) -> list[Event]:
        with self._changed:
            return self._matching(event, fields)

    def wait(self, event: str, count: int, timeout: float, **fields: Any) -> Event:
        """The `count`th event of that name with those fields, as soon as it is there."""
        found: list[Event] = []

        def there() -> bool:
            found[:] = self._matching(event, fields)
            return len(found) >= count

        self._wait(there, timeout, lambda: f"{count} x {event} {fields or ''} (so far {len(found)})")
        return found[count - 1]

    def wait_state(self, rank: int, state: str, timeout: float) -> None:
        """Until the rank's last change of state led to this one."""

        def last() -> str | None:
            states = (e["event"] for e in reversed(self._events) if e.get("rank") == rank)
            return next((name for name in states if name in ("dialing", "live", "dead")), None)

        self._wait(lambda: last() == state, timeout, lambda: f"rank {rank} {state} (it is {last()})")

    def _wait(self, there: Callable[[], bool], timeout: float, what: Callable[[], str]) -> None:
        deadline = time.monotonic() + timeout
        with self._changed:
            while not there():
                left = deadline - time.monotonic()
                if self._ended is not None:
                    raise SimulatorEnded(f"{self._ended}, while waiting for {what()}")
                if left <= 0:
                    tail = "".join(f"\n  {event}" for event in self._events[-8:])
                    raise TimeoutError(f"no {what()} within {timeout:g} s; the last events were:{tail}")
                self._changed.wait(left)

    def _matching(self, event: str, fields: Event) -> list[Event]:
        wanted = {"event": event, **fields}
        return [e for e in self._events if all(e.get(key) == value for key, value in wanted.items())]


class Controls(ABC):
    """What can be done to a simulator. `rank` is an engine index; None means every rank of the simulator.

    All calls return when the simulator has done it, and raise ValueError when it could not. Any operation
    may carry `after_frames=N` or `after_adds=N`: it is then only armed, and runs by itself right after the
    rank's N-th output frame, or ADD, from now.
    """

    settings: Settings
    events: EventLog

    @abstractmethod
    def call(self, op: str, rank: int | None = None, **args: Any) -> Any:
        """Run an operation by name (see `operations` in smg.mock.simulator) and give its result."""

    # Life

    def die(self, rank: int | None = None, **trigger: int) -> None:
        """Close the rank's sockets without a word. Its requests are lost, the process lives on."""
        self.call("die", rank, **trigger)

    def restart(self, rank: int | None = None, **trigger: int) -> None:
        """Die, then dial again under the same identity; wait with `wait_live(rank)`."""
        self.call("restart", rank, **trigger)

    def exit(self, code: int = 1, **trigger: int) -> None:
        """End the whole process at once, as a crash would."""
        self.call("exit", None, code=code, **trigger)

    def stall(self, rank: int | None = None, **trigger: int) -> None:
        """Neither read nor step, sockets open, until `resume`: a scheduler that hangs."""
        self.call("stall", rank, **trigger)

    def resume(self, rank: int | None = None) -> None:
        """End a stall."""
        self.call("resume", rank)

    def hold(self, rank: int | None = None, **trigger: int) -> None:
        """Take requests, aborts and calls but make no step until `release`: a scheduler that schedules nothing.

        With steps that take long (`step_ms`), calls wait for the end of the step instead, and with `stall` for ever.
        """
        self.call("hold", rank, **trigger)

    def release(self, rank: int | None = None) -> None:
        """End a hold."""
        self.call("release", rank)

    def step(self, count: int = 1, rank: int | None = None) -> None:
        """Make that many engine steps now (for ranks on hold); fewer when there is no work left.

        In lockstep, a step is made when every rank that is on hold has been told to.
        """
        self.call("step", rank, count=count)

    def proceed(self, rank: int | None = None) -> None:
        """Take the handshake steps held back by the setting `withhold`."""
        self.call("proceed", rank)

    # Bad output

    def sentinel(self, rank: int | None = None, **trigger: int) -> None:
        """Send ENGINE_CORE_DEAD, sockets staying open."""
        self.call("sentinel", rank, **trigger)

    def malformed(
        self, rank: int | None = None, kind: str = "garbage", count: int = 1, column: str = "", **trigger: int
    ) -> None:
        """Send undecodable frames made from the running requests.

        kind: garbage, empty, truncated, trailing, tag, short, map, or ragged with the column to cut short (of
        vLLM's rows, the element to be of a wrong type).
        """
        self.call("malformed", rank, kind=kind, count=count, column=column, **trigger)

    def ragged(self, column: str, rank: int | None = None, **trigger: int) -> None:
        """Send a frame in which that column (its wire name) is one entry short."""
        self.malformed(rank, kind="ragged", column=column, **trigger)

    def emit(
        self,
        rank: int,
        rid: str,
        token_ids: list[int] | None = None,
        finish_reason: str = "",
        prompt_tokens: int = 1,
        completion_tokens: int | None = None,
    ) -> None:
        """Send a well-formed frame with one row for any request id: late, foreign or invented."""
        self.call(
            "emit",
            rank,
            rid=rid,
            token_ids=token_ids,
            finish_reason=finish_reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )

    def raw(self, rank: int, *frames: bytes) -> None:
        """Send one message of exactly these frames."""
        self.call("raw", rank, frames=[frame.hex() for frame in frames])

    def engine_index(self, index: int | None, rank: int) -> None:
        """Claim this engine index in all frames from now on; None: the true one again."""
        self.call("engine_index", rank, index=index)

    def deafen(self, rank: int | None = None, **trigger: int) -> None:
        """Hear no message any more, while steps go on, as vLLM does after one that it cannot decode.

        Its input socket is then closed, so that sends to it fail.
        """
        self.call("deafen", rank, **trigger)

    def drop_adds(self, count: int = 1, rank: int | None = None) -> None:
        """Lose the next ADDs, as the engine loses those it cannot decode."""
        self.call("drop_adds", rank, count=count)

    # Looking

    def stats(self, rank: int) -> dict[str, Any]:
        """State, load and totals of the rank's incarnation (COUNTERS in smg.mock.rank, Counts, Load).

        Of a rank in lockstep also `wave`, and whether it is `parked`.
        """
        found: dict[str, Any] = self.call("stats", rank)[0]
        return found

    def requests(self, rank: int | None = None) -> list[dict[str, Any]]:
        """Decoded ADDs by the engine's field names, in order of arrival, the latest 10,000 per rank (with `record`).

        `sampling_params` is a dict with the values after the engine's own derivation; rank, incarnation and
        outcome are added, and `aux_bytes` with the lengths of further frames.
        """
        return [request for part in self.call("requests", rank) for request in part]

    def reply(self, seed: int, count: int) -> list[int]:
        """The first token ids of the reply to a request with that sampling seed (greedy requests have 0)."""
        return self._replies.window(self._replies.start(seed), 0, count)

    @cached_property
    def _replies(self) -> Replies:
        return make_replies(self.settings)

    def wait_for(self, event: str, *, count: int = 1, timeout: float = DEFAULT_TIMEOUT, **fields: Any) -> Event:
        """The `count`th event since the start with that name and these fields: `wait_for("abort", rank=1)`.

        Raises TimeoutError, and SimulatorEnded when it cannot come any more. Blocks: beside an event loop use
        `asyncio.to_thread`.
        """
        return self.events.wait(event, count, timeout, **fields)

    def wait_live(self, rank: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Until the rank, or every rank, has done its handshake and nothing since."""
        deadline = time.monotonic() + timeout
        for index in self.indexes if rank is None else [rank]:
            self.events.wait_state(index, "live", max(deadline - time.monotonic(), 0.001))

    def wait_dead(self, rank: int, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Until the rank has closed its sockets."""
        self.events.wait_state(rank, "dead", timeout)

    @property
    def indexes(self) -> range:
        """The engine indexes of the simulator's ranks."""
        return range(self.settings.start_index, self.settings.start_index + self.settings.ranks)
