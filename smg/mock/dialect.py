"""What a simulated rank needs to know of an engine's wire: one dialect per engine behind this face."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from smg.mock.lockstep import Member
from smg.mock.model import Batch, Ending, Engine
from smg.mock.settings import Settings

ADD = b"\x00"  # the same first frame on every engine's wire
DEAD = b"ENGINE_CORE_DEAD"  # raw output frame: this engine is gone


class Undecodable(Exception):
    """A message the engine cannot read, and drops; the text says why."""


class Deafening(Exception):
    """A message after which the engine does not hear another, though it goes on with what it has."""


class Deadly(Exception):
    """A message of which the engine dies. `said`: whether it says so, and does not just close its output."""

    def __init__(self, reason: str, said: bool = True) -> None:
        super().__init__(reason)
        self.said = said


@dataclass(slots=True)
class Taken:
    """What became of one message.

    outcome: "queued", "rejected" (answered with a terminal "abort" or "error"), "killed" (dropped silently
    because an earlier abort named the id), "aborted"; "taken" for what is no request.
    """

    event: str  # "add", "abort", "utility", "wave" or "ignored"
    rids: list[str]
    outcome: str
    request: dict[str, Any] = field(default_factory=dict)  # the decoded ADD
    duplicate: bool = False  # a request of that id was there already
    reason: str = ""  # why it was rejected
    answer: Batch | None = None  # to be sent at once
    method: str = ""  # of a utility call
    wave: int = 0  # to be started
    exclude: int | None = None  # the engine index that shall not start it


class Dialect(Protocol):
    """One incarnation's side of the wire, with what its engine remembers between messages."""

    ending: Ending
    hwm: int  # high-water mark of its data sockets; 0 = none
    member: Member | None  # of a lockstep group
    registers_first: bool  # READY comes after the registration, not before
    reports_every_step: bool  # steps without output are reported too, and one after the last

    def __init__(self, settings: Settings, engine: Engine, vocab_size: int) -> None: ...

    def hello(self) -> bytes: ...

    def ready(self) -> bytes: ...

    def registration(self, index: int) -> bytes: ...

    def take(self, frames: list[bytes], now: float) -> Taken:
        """Decode one message and do what it asks. Raises Undecodable, and the engine is then unchanged;
        Deafening; Deadly."""
        ...

    def between_steps(self, engine_index: int) -> list[list[bytes]]:
        """Messages for which the engine finds time when no step is under way."""
        ...

    def farewell(self, engine_index: int) -> list[list[bytes]]:
        """Messages of an engine that is told to end."""
        ...

    def encode(self, batch: Batch, engine_index: int) -> list[bytes]:
        """The output message, frame by frame."""
        ...

    def spoil(self, kind: str, batch: Batch, engine_index: int, column: str) -> list[bytes]:
        """An output message no decoder should accept. Raises ValueError for an unknown kind or column."""
        ...


def spoiled(frame: bytes, kind: str) -> bytes:
    """A frame made such that it is no msgpack value, or not only one. Raises ValueError for an unknown kind."""
    if kind == "truncated":
        return frame[:-1]
    if kind == "trailing":
        return frame + b"\x00"
    if kind == "garbage":
        return b"\xc1" * len(frame)
    if kind == "empty":
        return b""
    raise ValueError(f"kind {kind!r}: must be garbage, empty, truncated, trailing, tag, short, map or ragged")
