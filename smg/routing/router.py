"""`Router`: one or more groups behind one `submit`. The policy picks a group, the group picks its rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from smg._streams import Stream
from smg.engine.group import EngineGroup
from smg.errors import Closed, NoRank, Overloaded
from smg.routing.policies import POLICIES
from smg.sampling import SamplingParams

Place = tuple[EngineGroup, int]  # a rank of a group

_HOPE = [Overloaded, NoRank, Closed]  # from a retry in a moment to none


class Router:
    """Spreads requests over groups that serve the same model.

    `policy`: "least_load" (fewest requests in flight per live rank), "round_robin", "random", "power_of_two"
    or "passthrough" (the first group that can take it). The groups stay the caller's to close.
    """

    def __init__(self, groups: Sequence[EngineGroup], policy: str = "least_load") -> None:
        if not groups:
            raise ValueError("groups: at least one is needed")
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r}: must be one of {', '.join(POLICIES)}")
        self.groups = list(groups)
        self.policy = policy
        self._order = POLICIES[policy]()

    def choose(self) -> EngineGroup:
        """The group that the next request goes to. Raises NoRank when no rank of any group takes work."""
        for group in self.groups if len(self.groups) == 1 else self._order(self.groups):
            if group.live:
                return group
        raise NoRank("no rank of any group is live; ask each group's `ranks` for their states")

    def submit(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None, **options: Any) -> Stream:
        """As `EngineGroup.submit`. A group that is full, closed or without a rank passes the request on.

        `rank` and `outlet` name a thing of one group, so they need a router of one group.
        """
        if len(self.groups) > 1 and (options.get("outlet") is not None or options.get("rank") is not None):
            raise ValueError("outlet and rank belong to one group: choose() a group and submit to it")
        refusal: NoRank | Overloaded | Closed | None = None
        for group in self._order(self.groups):
            try:
                return group.submit(prompt_token_ids, params, **options)
            except (NoRank, Overloaded, Closed) as error:  # the most hopeful of them is raised
                if refusal is None or _HOPE.index(type(error)) < _HOPE.index(type(refusal)):
                    refusal = error
        assert refusal is not None
        raise refusal

    def others(self, tried: Collection[Place]) -> list[Place]:
        """The ranks that take work and are none of `tried`, fewest requests in flight first, stalled ones last."""
        found = [
            (info.state == "stalled", info.in_flight, group, info.index)
            for group in self.groups
            for info in group.ranks
            if info.state in ("live", "stalled") and (group, info.index) not in tried
        ]
        found.sort(key=lambda entry: entry[:2])
        return [(group, rank) for _, _, group, rank in found]
