"""Tests that are left out because an engine is known to fail them, and the floor under what is left."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from e2e_lane import Lane

#: fixtures that a test has only when it talks to an engine
BACKEND_FIXTURES = frozenset({"server", "client", "async_client"})


class Item(Protocol):
    """A collected test, as far as it matters here."""

    @property
    def name(self) -> str: ...
    @property
    def fixturenames(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class Fault:
    """What is known: `tests` (a pattern of names) fail on `engine`, alone or `grouped`, with `model`.

    None stands for any. `model` is the end of its path or name.
    """

    engine: str
    grouped: bool | None
    model: str | None
    tests: str
    reason: str

    def concerns(self, lane: Lane) -> bool:
        return (
            self.engine == lane.name
            and self.grouped in (None, lane.grouped)
            and (self.model is None or (lane.model or "").rstrip("/").endswith(self.model))
        )


KNOWN_FAULTS = (
    Fault(
        "tokenspeed",
        True,
        "Qwen3-4B-Instruct-2507",
        "*",
        "a rank that has nothing to do crashes on the empty batch that keeps it in step (tokenspeed#1077)",
    ),
)


def split_faulty(
    items: Sequence[Item], lane: Lane, faults: Sequence[Fault] = KNOWN_FAULTS
) -> tuple[list[Item], list[Item]]:
    """The tests to run and those to leave out. A test that needs no engine is never left out."""
    patterns = [fault.tests for fault in faults if fault.concerns(lane)]

    def is_faulty(item: Item) -> bool:
        needs_engine = bool(BACKEND_FIXTURES & set(item.fixturenames))
        return needs_engine and any(fnmatch.fnmatch(item.name, pattern) for pattern in patterns)

    return [item for item in items if not is_faulty(item)], [item for item in items if is_faulty(item)]


def too_few(selected: int, lane: Lane) -> str | None:
    """What is wrong when fewer tests are selected than the lane asks for."""
    if selected >= lane.min_selected:
        return None
    return f"{selected} end-to-end tests are selected for {lane}; E2E_MIN_SELECTED asks for {lane.min_selected}"
