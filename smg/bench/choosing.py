"""Who chooses a rank in the simulation: the policies' own code, and a twin of the compiled rank choice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from smg.bench.simulation import Chooser, Engine, Request
from smg.routing.policies import POLICIES

QUEUE_WEIGHT, KV_FREE = 6.0, 0.5  # as in `score` of _choice.pxd


class RankChoice:
    """The group's own choice, as `_choice.pxd` makes it; a property test holds the two together.

    score = max(in flight, running + waiting), and waiting × 6 × (KV usage − 0.5) more when requests wait behind a KV
    cache that is more than half full. The queues of a rank that has nothing in flight count as empty, whatever it
    reports. The lowest score wins, scanned from a start that moves on by one with every choice.
    """

    def __init__(self, ranks: int) -> None:
        self.in_flight = [0] * ranks
        self._reported = [(0, 0, 0.0)] * ranks  # running, waiting, KV usage
        self._start = 0

    def score(self, rank: int) -> float:
        running, waiting, kv_usage = self._reported[rank]
        value = float(max(self.in_flight[rank], running + waiting))
        if waiting > 0 and kv_usage > KV_FREE:
            value += waiting * QUEUE_WEIGHT * (kv_usage - KV_FREE)
        return value

    def choose(self, request: Request | None = None) -> int:
        ranks = len(self.in_flight)
        best = min(((self._start + i) % ranks for i in range(ranks)), key=self.score)
        self._start = (self._start + 1) % ranks
        self.in_flight[best] += 1
        return best

    def finished(self, request: Request | None, rank: int) -> None:
        self.in_flight[rank] -= 1
        if not self.in_flight[rank]:
            self._reported[rank] = (0, 0, self._reported[rank][2])

    def report(self, rank: int, running: int, waiting: int, kv_usage: float) -> None:
        self._reported[rank] = (running, waiting, kv_usage) if self.in_flight[rank] else (0, 0, kv_usage)


class _Place:
    """A rank as a policy sees a group: how many requests it has, how many ranks take work."""

    live = 1

    def __init__(self, index: int) -> None:
        self.index = index
        self.requests = 0


class ByPolicy:
    """A policy of `smg.routing`, each rank a group of its own."""

    def __init__(self, policy: str, ranks: int) -> None:
        self._places: list[Any] = [_Place(index) for index in range(ranks)]
        self._order = POLICIES[policy]()

    def choose(self, request: Request) -> int:
        place: Any = self._order(self._places)[0]
        place.requests += 1
        index: int = place.index
        return index

    def finished(self, request: Request, rank: int) -> None:
        self._places[rank].requests -= 1

    def report(self, rank: int, running: int, waiting: int, kv_usage: float) -> None:
        """Policies among groups do not look at it."""


class Foresight:
    """Knows how long every answer will be, and picks the rank with the least work left: what nobody can do."""

    def __init__(self, ranks: int, engine: Engine) -> None:
        self._work = [0.0] * ranks
        self._engine = engine

    def _cost(self, request: Request) -> float:
        per_token = self._engine.step / self._engine.batch + self._engine.per_request
        return request.arrival.prompt * self._engine.per_prompt_token + request.arrival.output * per_token

    def choose(self, request: Request) -> int:
        best = min(range(len(self._work)), key=self._work.__getitem__)
        self._work[best] += self._cost(request)
        return best

    def finished(self, request: Request, rank: int) -> None:
        self._work[rank] -= self._cost(request)

    def report(self, rank: int, running: int, waiting: int, kv_usage: float) -> None:
        """It knows better."""


def choosers(ranks: int, engine: Engine, seed: int) -> dict[str, Callable[[], Chooser]]:
    """By name, what makes each; the group's own choice first. `random` draws from Python's own generator."""

    def seeded(policy: str) -> Callable[[], Chooser]:
        def make() -> Chooser:
            random.seed(seed)
            return ByPolicy(policy, ranks)

        return make

    made: dict[str, Callable[[], Chooser]] = {"rank choice": lambda: RankChoice(ranks)}
    made |= {name: seeded(name) for name in POLICIES if name != "passthrough"}
    made["foresight"] = lambda: Foresight(ranks, engine)
    return made
