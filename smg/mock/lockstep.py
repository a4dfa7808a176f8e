"""Ranks that make every step together, as those of an MoE model do, and park when none has work.

A forward pass needs all ranks of the group: one that has a request, or was told to run, enters it and stands
there until every other rank enters too, with requests or without. Now and then they agree on whether anyone has
work left; when nobody has, each ends the wave, tells so, and parks. A parked rank hears messages and does
nothing else. So a rank with a request whose peers are parked hangs until they are told to start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from smg.mock.model import Engine

SYNC_INTERVAL = 16  # steps between two agreements on whether to go on; the first step of a wave has one too


@dataclass(slots=True)
class Member:
    """One rank's part."""

    running: bool = False  # it steps, whether or not it has requests
    wave: int = 0
    pausing: bool = False  # it wants all to park
    deaf_to_waves: bool = False  # all have parked for a pause
    resuming: bool = False  # it waits for all to end theirs
    completed: list[int] = field(default_factory=list)  # waves whose end is still to be told

    def park(self) -> None:
        self.completed.append(self.wave)
        self.wave += 1
        self.running = False

    def start(self, wave: int) -> bool:
        """START_DP_WAVE. Returns whether it is heeded."""
        if self.deaf_to_waves or wave < self.wave:
            return False
        self.wave = wave
        self.running = True
        return True

    def pause(self) -> None:
        """Run until all ranks want to pause."""
        self.pausing = True
        self.running = True

    def resume(self) -> bool:
        """Whether there is a pause to end. Raises RuntimeError while it has not come about."""
        if self.pausing or (self.running and self.deaf_to_waves):
            raise RuntimeError(
                "resume_scheduler called while pause is still in flight. Wait for the pause future to resolve "
                "before resuming."
            )
        if self.running:
            return False
        self.deaf_to_waves = False
        self.resuming = True
        return True

    def resumed(self) -> bool:
        return not self.resuming


class Peer(Protocol):
    """A rank as its group sees it."""

    incarnation: int
    engine: Engine
    state: str

    @property
    def member(self) -> Member: ...

    @property
    def enters(self) -> bool:
        """Whether it is in the next step: it has work, and nothing keeps it."""
        ...

    @property
    def hurries(self) -> bool:
        """Whether it has been told to make the next step at once."""
        ...

    def complete_step(self, now: float) -> None:
        """Make its part of a step, and send what came of it."""
        ...

    def attend(self) -> None:
        """Do what there is time for between two steps."""
        ...

    def lose(self) -> None:
        """Find a peer gone in the middle of a step."""
        ...


class Lockstep:
    """The ranks of one group. `due` and `advance` are those of each rank."""

    def __init__(self, step_seconds: float) -> None:
        self.peers: list[Peer] = []
        self._step_seconds = step_seconds  # of a step without requests
        self._ends: float | None = None  # when the step under way is done
        self._steps = 0  # of this wave

    def due(self) -> float | None:
        if self._orphans():
            return 0.0
        if not self._all_in():
            return None
        return 0.0 if self._ends is None else self._ends

    def advance(self, now: float) -> None:
        """Begin or complete what is due."""
        for orphan in self._orphans():
            orphan.lose()
        while self._all_in() and (self._ends is None or self._ends <= now or self._hurried()):
            if self._ends is None:
                self._begin(now)
            else:
                self._complete(max(now, self._ends))
                return

    def restarted(self) -> None:
        """A rank has begun a new incarnation: nothing of the old group's is left."""
        self._ends = None
        self._steps = 0

    def settle(self) -> None:
        """End the pause once every rank has been told to."""
        if all(peer.member.resuming for peer in self.peers):
            unfinished = self._unfinished()
            for peer in self.peers:
                peer.member.resuming = False
                peer.member.running = unfinished
            for peer in self.peers:
                peer.attend()

    def _begin(self, now: float) -> None:
        """Every rank plans its part; they are done together, when the longest part is."""
        for peer in self.peers:
            if not peer.engine.stepping and peer.engine.due is not None:
                peer.engine.step(max(now, peer.engine.due))
        self._align(now)

    def _align(self, now: float) -> None:
        dues = [peer.engine.due for peer in self.peers if peer.engine.due is not None]
        self._ends = max(dues, default=now + self._step_seconds)
        for peer in self.peers:
            if peer.engine.due is not None:
                peer.engine.due = self._ends

    def _complete(self, now: float) -> None:
        for peer in self.peers:
            peer.complete_step(now)
        if self._ends is None:
            return  # one was restarted by what was armed for its output
        self._steps += 1
        parks = False
        if self._steps == 1 or self._steps % SYNC_INTERVAL == 0:
            if all(peer.member.pausing for peer in self.peers):
                for peer in self.peers:
                    peer.member.pausing, peer.member.deaf_to_waves = False, True
            parks = not self._unfinished()
        for peer in self.peers:
            if parks:
                peer.member.park()
            else:
                peer.member.running = True
        if parks:
            self._ends = None
            self._steps = 0
        else:
            self._align(now)
        for peer in self.peers:
            peer.attend()

    def _unfinished(self) -> bool:
        return any(peer.engine.unfinished for peer in self.peers)

    def _all_in(self) -> bool:
        return all(peer.enters and peer.incarnation == self.peers[0].incarnation for peer in self.peers)

    def _hurried(self) -> bool:
        return any(peer.hurries for peer in self.peers)

    def _orphans(self) -> list[Peer]:
        """Ranks in a step that a peer has left for ever."""
        newest = max(peer.incarnation for peer in self.peers)
        if not any(peer.state == "dead" or peer.incarnation < newest for peer in self.peers):
            return []
        gone = any(peer.state == "dead" and peer.incarnation == newest for peer in self.peers)
        return [peer for peer in self.peers if peer.enters and (gone or peer.incarnation < newest)]
