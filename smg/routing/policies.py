"""How a router orders its groups for one request: the first that can take it gets it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from smg.engine.group import EngineGroup

Policy = Callable[[Sequence[EngineGroup]], list[EngineGroup]]


def passthrough(groups: Sequence[EngineGroup]) -> list[EngineGroup]:
    """As they were given."""
    return list(groups)


def random_order(groups: Sequence[EngineGroup]) -> list[EngineGroup]:
    """Any, evenly."""
    return random.sample(groups, len(groups))


def round_robin() -> Policy:
    """One after the other."""
    turns = itertools.count()

    def order(groups: Sequence[EngineGroup]) -> list[EngineGroup]:
        first = next(turns) % len(groups)
        return [*groups[first:], *groups[:first]]

    return order


def least_load() -> Policy:
    """Fewest requests in flight per rank that takes work; ties go around."""
    around = round_robin()

    def order(groups: Sequence[EngineGroup]) -> list[EngineGroup]:
        return sorted(around(groups), key=load)

    return order


def power_of_two(groups: Sequence[EngineGroup]) -> list[EngineGroup]:
    """The less loaded of two at random, then the others."""
    order = random_order(groups)
    return sorted(order[:2], key=load) + order[2:]


def load(group: EngineGroup) -> float:
    """Requests in flight per rank that takes work; infinite when none does."""
    live = group.live
    return group.requests / live if live else float("inf")


# Name -> a new policy. Those that keep a turn are made anew for each router.
POLICIES: dict[str, Callable[[], Policy]] = {
    "least_load": least_load,
    "round_robin": round_robin,
    "random": lambda: random_order,
    "power_of_two": lambda: power_of_two,
    "passthrough": lambda: passthrough,
}
