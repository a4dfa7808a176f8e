"""What a simulated rank needs to know of an engine's wire: one dialect per engine behind this face."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from smg.mock.model import Batch, Engine
from smg.mock.settings import Settings

ADD = b"\x00"  # the same first frame on every engine's wire
DEAD = b"ENGINE_CORE_DEAD"  # raw output frame: this engine is gone


class Undecodable(Exception):
    """A message the engine cannot read; the text says why."""


@dataclass(slots=True)
class Taken:
    """What became of one message.

    outcome: "queued", "rejected" (answered with a terminal "abort"), "killed" (dropped silently because an
    earlier abort named the id), "aborted".
    """

    event: str  # "add" or "abort"
    rids: list[str]
    outcome: str
    request: dict[str, Any] = field(default_factory=dict)  # the decoded ADD
    duplicate: bool = False  # a request of that id was there already
    reason: str = ""  # why it was rejected
    answer: Batch | None = None  # to be sent at once


class Dialect(Protocol):
    """One incarnation's side of the wire, with what its engine remembers between messages."""

    def __init__(self, settings: Settings, engine: Engine, vocab_size: int) -> None: ...

    def hello(self) -> bytes: ...

    def ready(self) -> bytes: ...

    def registration(self, index: int) -> bytes: ...

    def take(self, frames: list[bytes], now: float) -> Taken:
        """Decode one message and do what it asks. Raises Undecodable; the engine is then unchanged."""
        ...

    def encode(self, batch: Batch, engine_index: int) -> list[bytes]:
        """The output message, frame by frame."""
        ...

    def spoil(self, kind: str, batch: Batch, engine_index: int, column: str) -> list[bytes]:
        """An output message no decoder should accept. Raises ValueError for an unknown kind or column."""
        ...


def dialect_of(backend: str) -> type[Dialect]:
    """The dialect that a backend's name stands for."""
    from smg.mock.tokenspeed import TokenSpeed

    return {"tokenspeed": TokenSpeed}[backend]
