"""Utility calls: what a router may ask an engine beside requests, and the answers that are still to come."""

from __future__ import annotations

import concurrent.futures
import itertools
from typing import Any

from smg import _fastpath
from smg.errors import Closed, DecodeError, Error, InvalidRank, RankDied, UtilityError
from smg.protocol import vllm

PROBE = "is_sleeping"  # answered between two steps by an engine that hears and steps


class Calls:
    """The calls of one group that have not been answered. Any thread may start one."""

    def __init__(self, core: _fastpath.Core) -> None:
        self._core = core
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[int, str, concurrent.futures.Future[Any]]] = {}

    def start(self, rank: int, method: str, args: tuple[Any, ...]) -> concurrent.futures.Future[Any]:
        """A future of what `method` answers on `rank`.

        Raises InvalidRequest for a method or argument that the engine would not take, InvalidRank when the rank
        takes no messages now. Cancelling the future forgets the call.
        """
        number = next(self._numbers)
        payload = vllm.encode_utility(number, method, args)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._waiting[number] = rank, method, future
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        if not self._core.call(rank, payload):
            future.cancel()
            raise InvalidRank(f"rank {rank} is not live, or too much waits to be sent to it")
        return future

    def probe(self, rank: int) -> None:
        """Ask a silent rank whether it still hears. Its answer counts as a sign of life; nobody waits for it."""
        self._core.call(rank, vllm.encode_utility(next(self._numbers), PROBE))

    def answer(self, number: int, reply: bytes) -> None:
        """What a rank said to call `number`; one that nobody waits for is dropped."""
        call = self._waiting.get(number)
        if call is None:
            return
        rank, method, future = call
        try:
            answer = vllm.decode_utility(reply)
        except DecodeError as error:
            self._fail(future, UtilityError(f"{method} on rank {rank}: the reply is unusable: {error}", rank, method))
            return
        if answer.failure is not None:
            self._fail(future, UtilityError(f"{method} on rank {rank} failed: {answer.failure}", rank, method))
        elif future.set_running_or_notify_cancel():
            future.set_result(answer.result)

    def rank_died(self, rank: int) -> None:
        """Fail what a rank has not answered."""
        for at, method, future in list(self._waiting.values()):
            if at == rank:
                self._fail(future, RankDied(f"rank {rank} died before it answered {method}", rank))

    def close(self) -> None:
        """Fail every call."""
        for _, method, future in list(self._waiting.values()):
            self._fail(future, Closed(f"the group was closed before {method} was answered"))

    @staticmethod
    def _fail(future: concurrent.futures.Future[Any], error: Error) -> None:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
