"""When a worker that ended may start again."""

from __future__ import annotations

FIRST_DELAY = 0.5  # seconds
LONGEST_DELAY = 30.0


class Restarts:
    """At most `limit` restarts in any `window` seconds, each after a longer pause than the one before.

    What lies further back than the window is forgotten, so a worker that ran well for long starts again at once.
    """

    def __init__(self, limit: int, window: float) -> None:
        self._limit = limit
        self._window = window
        self._ends: list[float] = []

    def after_end(self, now: float) -> float | None:
        """Seconds to wait until the restart, None when there is to be none. `now`: of any monotonic clock."""
        self._ends = [end for end in self._ends if now - end < self._window]
        self._ends.append(now)
        count = len(self._ends)
        if count > self._limit:
            return None
        # two to the power of what is surely enough, since a limit may be any number
        return float(min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(count - 1, 10)))
