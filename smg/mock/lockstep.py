"""Ranks that make every step together, as those of an MoE model do, and park when none has work.

A forward pass needs all ranks of the group: one that has a request, or was told to run, enters it and stands
there until every other rank enters too, with requests or without. Now and then they agree on whether anyone has
work left; when nobody has, each ends the wave, tells so, and parks. A parked rank hears messages and does
nothing else. So a rank with a request whose peers are parked hangs until they are told to start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
