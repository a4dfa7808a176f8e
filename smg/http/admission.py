"""How many requests are served at once, how many wait, and for how long."""

from __future__ import annotations

import asyncio
from collections import deque

from smg.http.errors import ApiError, unavailable


class Admission:
    """`limit` requests are served at once (-1 = any number), `queue_size` more wait, first come first served.

    Use: `if not admission.enter(): await admission.wait()`, and `leave()` when the response has ended.
    """

    def __init__(self, limit: int = -1, queue_size: int = 100, queue_timeout: float = 60.0) -> None:
        self.limit, self.queue_size, self.queue_timeout = limit, queue_size, queue_timeout
        self.active = 0  # requests being served
        self.allowed = 0  # that got a place, so far
        self.rejected = {"full": 0, "timeout": 0}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._idle: asyncio.Future[None] | None = None

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def enter(self) -> bool:
        """Take a place if one is free and nobody waits for it."""
        if self.limit < 0 or (self.active < self.limit and not self._waiting):
            self.active += 1
            self.allowed += 1
            return True
        return False

    async def wait(self) -> None:
        """Wait for a place. Raises `ApiError`: 429 when too many wait already, 503 when it took too long."""
        if len(self._waiting) >= self.queue_size:
            self.rejected["full"] += 1
            raise ApiError(
                429,
                "admission_queue_full",
                f"{self.active} requests are being served and {len(self._waiting)} wait; retry later",
                type="rate_limit_error",
                headers={"Retry-After": "1"},
            )
        loop = asyncio.get_running_loop()
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.append(place)
        late = loop.call_later(self.queue_timeout, self._expire, place)
        try:
            await place
            self.allowed += 1
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.leave()  # the place came in the same moment; the next one gets it
            elif place in self._waiting:
                self._waiting.remove(place)
            raise
        finally:
            late.cancel()

    def _expire(self, place: asyncio.Future[None]) -> None:
        if not place.done():
            self._waiting.remove(place)
            self.rejected["timeout"] += 1
            place.set_exception(
                unavailable(
                    "admission_queue_timeout",
                    f"no place became free within {self.queue_timeout:g} s; retry later",
                )
            )

    def leave(self) -> None:
        """Give the place back, or on to the one who waits longest."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self.active -= 1
        if self.active == 0 and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def refuse_waiting(self, error: ApiError) -> None:
        """Answer everybody who waits with `error`."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_exception(error)

    async def idle(self) -> None:
        """Return once nothing is being served."""
        while self.active:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle
