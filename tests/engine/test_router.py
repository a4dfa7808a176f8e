"""Routers over several groups."""

from __future__ import annotations

from collections import Counter

import pytest

import smg
from smg import SamplingParams

PROMPT = [1, 2, 3]
LONG = SamplingParams(max_tokens=1_000_000, seed=7, ignore_eos=True)


def test_least_load_fills_groups_by_requests_per_rank(make_group):
    small, _ = make_group(ranks=1, hold=True)
    large, _ = make_group(ranks=3, hold=True)
    router = smg.Router([small, large])
    streams = [router.submit(PROMPT, LONG) for _ in range(40)]
    assert len(streams) == 40
    assert (small.requests, large.requests) == (10, 30)


@pytest.mark.parametrize("policy", ["round_robin", "random", "power_of_two", "passthrough"])
def test_every_policy_reaches_a_group_that_takes_the_request(make_group, policy):
    groups = [make_group(ranks=1, hold=True)[0] for _ in range(2)]
    router = smg.Router(groups, policy)
    streams = [router.submit(PROMPT, LONG) for _ in range(20)]
    counts = Counter({0: groups[0].requests, 1: groups[1].requests})
    assert sum(counts.values()) == len(streams)
    if policy == "round_robin":
        assert counts == {0: 10, 1: 10}
    if policy == "passthrough":
        assert counts == {0: 20, 1: 0}


def test_a_full_or_dead_group_passes_the_request_on(make_group):
    full, _ = make_group(ranks=1, hold=True, group={"max_inflight": 1})
    other, mock = make_group(ranks=1, hold=True, group={"max_inflight": 2})
    router = smg.Router([full, other], "passthrough")
    streams = [router.submit(PROMPT, LONG) for _ in range(3)]
    assert (full.requests, other.requests) == (1, 2)
    with pytest.raises(smg.Overloaded):
        router.submit(PROMPT, LONG)
    mock.die(0)
    with pytest.raises(smg.RankDied):
        for _ in streams[1].blocking(10):
            pass
    with pytest.raises(smg.Overloaded):  # one is full, which may pass; the other has no rank
        router.submit(PROMPT, LONG)


def test_a_router_without_live_ranks_says_so(make_group):
    group, _ = make_group(ranks=1, live=False, withhold=("hello",))
    router = smg.Router([group])
    with pytest.raises(smg.NoRank):
        router.choose()
    with pytest.raises(smg.NoRank):
        router.submit(PROMPT)


def test_what_makes_no_sense_is_refused(make_group):
    one, _ = make_group(ranks=1)
    two, _ = make_group(ranks=1)
    with pytest.raises(ValueError, match="at least one"):
        smg.Router([])
    with pytest.raises(ValueError, match="least_load"):
        smg.Router([one], "best")
    with pytest.raises(ValueError, match="choose"):
        smg.Router([one, two]).submit(PROMPT, rank=0)
