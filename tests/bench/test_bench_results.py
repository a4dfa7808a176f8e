"""What may be concluded from samples, and when a run says that it cannot tell."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg.bench.results import (
    ACCEPTED,
    AT_MOST,
    CANNOT_TELL,
    FELL_SHORT,
    OURS,
    Comparison,
    Measurement,
    document,
    hold,
    read_bars,
    spread,
    table,
)


def of_embed(name: str) -> bool:
    return name.startswith("embed.")


samples = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=9)


def measurement(ours: list[float], rival: list[float]) -> Measurement:
    return Measurement("embed.outlet", "outlet", "µs", {OURS: ours, "pyzmq": rival})


def test_values_far_apart_are_judged() -> None:
    assert Comparison([1.0, 1.1, 0.9], [4.0, 4.2, 3.9]).reached is True
    assert Comparison([4.0, 4.2, 3.9], [1.0, 1.1, 0.9]).reached is False
    assert Comparison([1.0, 1.1, 0.9], [4.0, 4.2, 3.9], 0.2).reached is False


def test_nothing_is_concluded_when_values_spread_more_than_they_differ() -> None:
    wide = Comparison([1.0, 5.0, 9.0], [6.0, 6.1, 6.2])
    assert wide.reached is None
    assert "spread is larger than the difference" in str(wide)
    assert Comparison([9.0, 9.1, 9.2], [10.0, 10.1, 10.2], bar=0.9).reached is None


def test_one_repeat_says_nothing_about_its_spread() -> None:
    alone = Comparison([1.0], [100.0])
    assert alone.reached is None
    assert str(alone) == "cannot tell: one repeat"


def test_values_that_are_all_one_are_the_same() -> None:
    assert str(Comparison([0.0, 0.0], [0.0, 0.0])) == "the same"
    assert Comparison([0.0, 0.0], [0.0, 0.0]).ratio == 1
    assert str(Comparison([1.0, 1.0], [0.0, 0.0])) == "more"


@given(samples, samples, st.none() | st.floats(0.05, 20))
def test_a_conclusion_is_that_of_the_medians_and_outdoes_both_spreads(
    ours: list[float], theirs: list[float], bar: float | None
) -> None:
    reached = Comparison(ours, theirs, bar).reached
    allowed = (1.0 if bar is None else bar) * statistics.median(theirs)
    difference = abs(statistics.median(ours) - allowed)
    if reached is None:
        assert difference <= max(spread(ours), (bar or 1.0) * spread(theirs))
    else:
        assert reached == (statistics.median(ours) <= allowed)
        assert difference > spread(ours)


@given(samples, samples)
def test_swapping_the_contestants_swaps_the_conclusion(ours: list[float], theirs: list[float]) -> None:
    there, back = Comparison(ours, theirs).reached, Comparison(theirs, ours).reached
    assert (there is None) == (back is None)
    assert there is None or there != back


@pytest.mark.parametrize(
    ("ours", "bar", "status"),
    [
        ([1.0, 1.0, 1.1], 0.5, ACCEPTED),
        ([3.0, 3.0, 3.1], 0.5, FELL_SHORT),
        ([1.0, 2.0, 3.0], 0.5, CANNOT_TELL),
        ([2.0], 0.9, CANNOT_TELL),
    ],
)
def test_a_bar_is_met_missed_or_not_decided(ours: list[float], bar: float, status: int) -> None:
    found, why = hold([measurement(ours, [4.0, 4.0, 4.1])], {"embed.outlet": {"pyzmq": bar}}, of_embed)
    assert found == status
    assert (why == []) == (status == ACCEPTED)


def test_a_missed_bar_outweighs_an_undecided_one() -> None:
    bars = {"embed.outlet": {"pyzmq": 0.5, AT_MOST: 1.0}}
    for order in (bars, {"embed.outlet": dict(reversed(bars["embed.outlet"].items()))}):
        assert hold([measurement([1.9, 2.0, 2.2], [4.0, 4.0, 4.1])], order, of_embed)[0] == FELL_SHORT


def test_a_bar_on_what_was_not_measured_falls_short_unless_it_was_not_asked_for() -> None:
    bars = {"embed.outlet": {"vllm client": 0.5}, "http.chat": {"rust": 0.5}}
    status, why = hold([measurement([1.0, 1.0], [4.0, 4.0])], bars, of_embed)
    assert status == FELL_SHORT
    assert why == ["embed.outlet, vllm client: was not measured"]


def test_a_limit_is_held_against_our_own_median() -> None:
    alone = Measurement("embed.idle", "idle", "MB", {OURS: [3.0, 3.1, 3.2]})
    assert hold([alone], {"embed.idle": {AT_MOST: 20}}, of_embed) == (ACCEPTED, [])
    assert hold([alone], {"embed.idle": {AT_MOST: 2}}, of_embed)[0] == FELL_SHORT


def test_the_table_has_a_row_per_rival_with_ratio_and_conclusion() -> None:
    both = Measurement("a", "what", "ms", {OURS: [1.0, 1.0], "one": [2.0, 2.0], "two": [4.0, 4.0]})
    header, shown = table([both], {"a": {"two": 0.2}})
    assert header == ["measurement", "smg", "rival", "rival's", "smg / rival", "conclusion"]
    assert [row[2] for row in shown] == ["one", "two"]
    assert [row[4:] for row in shown] == [["0.50", "less"], ["0.25", "≤ 0.2: missed"]]


def test_the_table_of_one_server_alone_has_its_name_and_nothing_to_compare() -> None:
    alone = Measurement("http.closed.1.ttft_p50", "TTFT", "ms", {"10.0.0.1:80": [1.0, 1.0]})
    assert table([alone], {}) == (["measurement", "10.0.0.1:80"], [["TTFT (ms)", "1.00 (1.00–1.00)"]])
    assert len(table([alone], {alone.name: {AT_MOST: 2}})[0]) == 6
    wake = Measurement("embed.wake.ranks8", "wake", "µs", {"8 ranks": [1.0], "1 rank": [1.0]})
    assert table([measurement([1.0], [2.0]), wake], {})[0][1] == OURS


@given(samples, samples)
def test_the_document_keeps_every_sample_and_is_plain_json(ours: list[float], theirs: list[float]) -> None:
    written = json.loads(json.dumps(document([measurement(ours, theirs)], {"seed": 1}), allow_nan=False))
    [kept] = written["measurements"]
    assert written["seed"] == 1
    assert kept["contestants"][OURS]["samples"] == ours
    assert kept["contestants"]["pyzmq"]["samples"] == theirs


@pytest.mark.parametrize("text", ["[]", '{"a": 1}', '{"a": {}}', '{"a": {"b": "c"}}', '{"a": {"b": 0}}'])
def test_a_file_of_bars_that_is_none_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bars.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bars\.json"):
        read_bars(path)
