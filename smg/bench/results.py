"""What was measured, and what may be concluded from it.

A measurement has one value per repeat for each contestant; smg is the first of them. Two contestants are compared by
the ratio of their medians, and only when those are further apart than either's values spread (interquartile range).
Where repeats are pairs, such as seeds of a simulation, it is the repeats' ratios that are looked at in the same way.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS = "smg"
AT_MOST = "at most"  # in a file of bars: the highest allowed median of smg's own values
ACCEPTED, FELL_SHORT, CANNOT_TELL = 0, 1, 3  # exit statuses of --assert

Bars = dict[str, dict[str, float]]  # measurement -> rival (or AT_MOST) -> the highest allowed ratio (or median)


@dataclass(frozen=True)
class Measurement:
    """Samples of one quantity. `facts` say what was set for it: streams, ranks, … Bars bound it from above."""

    name: str
    title: str
    unit: str
    samples: dict[str, list[float]]
    facts: dict[str, Any] = field(default_factory=dict)
    paired: bool = False  # a repeat was the same for every contestant, as a seed is: compared repeat by repeat

    @property
    def ours(self) -> list[float]:
        return next(iter(self.samples.values()))

    @property
    def rivals(self) -> dict[str, list[float]]:
        return dict(list(self.samples.items())[1:])


def spread(values: Sequence[float]) -> float:
    """Interquartile range; infinite for a single value, which says nothing about it."""
    if len(values) < 2:
        return float("inf")
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def _over(ours: float, theirs: float) -> float:
    """Their ratio, also where there is nothing: none failed here and none there is as many."""
    return ours / theirs if theirs else float("inf") if ours else 1.0


@dataclass(frozen=True)
class Comparison:
    """Our values beside a rival's, or beside a limit (`theirs` is None). `bar` is the highest allowed ratio."""

    ours: Sequence[float]
    theirs: Sequence[float] | None
    bar: float | None = None
    paired: bool = False

    @property
    def ratio(self) -> float:
        """Ours / theirs, of the medians; the median of the repeats' ratios when these are pairs."""
        if self.paired and self.theirs is not None:
            return statistics.median(self._ratios)
        return _over(statistics.median(self.ours), 1.0 if self.theirs is None else statistics.median(self.theirs))

    @property
    def reached(self) -> bool | None:
        """Whether ours is at most `bar` (or 1) times theirs; None when the values spread too much to tell."""
        times = 1.0 if self.bar is None else self.bar
        if self.paired and self.theirs is not None:
            ratios = self._ratios
            clear = abs(statistics.median(ratios) - times) > spread(ratios)
            return self.ratio <= times if clear else None
        theirs = [1.0, 1.0] if self.theirs is None else self.theirs
        difference = abs(statistics.median(self.ours) - times * statistics.median(theirs))
        if difference <= max(spread(self.ours), times * spread(theirs)):
            return None
        return self.ratio <= times

    @property
    def _ratios(self) -> list[float]:
        pairs = zip(self.ours, self.theirs or (), strict=True)
        return [_over(ours, theirs) for ours, theirs in pairs]

    def __str__(self) -> str:
        reached = self.reached
        if reached is None:
            if self.bar is None and self.theirs is not None and len({*self.ours, *self.theirs}) == 1:
                return "the same"
            few = min(len(self.ours), len(self.theirs or self.ours)) < 2
            found = "cannot tell: one repeat" if few else "cannot tell: the spread is larger than the difference"
        elif self.bar is None:
            return "less" if reached else "more"
        else:
            found = "met" if reached else "missed"
        return found if self.bar is None else f"≤ {self.bar:g}: {found}"


def compare(measurement: Measurement, bars: Bars) -> dict[str, Comparison]:
    """Of a measurement, each rival's comparison, and the limit's where there is one."""
    of = bars.get(measurement.name, {})
    found = {
        rival: Comparison(measurement.ours, samples, of.get(rival), measurement.paired)
        for rival, samples in measurement.rivals.items()
    }
    if AT_MOST in of:
        found[AT_MOST] = Comparison(measurement.ours, None, of[AT_MOST])
    return found


# -------------------------------------------------------------- bars


def read_bars(path: Path) -> Bars:
    """A file of bars: {"measurement": {"rival": 0.25, "at most": 20}}. Raises ValueError, OSError."""
    bars = json.loads(path.read_text())
    if not isinstance(bars, dict) or not all(
        isinstance(of, dict) and of and all(type(bar) in (int, float) and bar > 0 for bar in of.values())
        for of in bars.values()
    ):
        raise ValueError(f'{path}: must be a JSON object such as {{"embed.outlet": {{"pyzmq": 0.3}}}}')
    return bars


def hold(measurements: Sequence[Measurement], bars: Bars, asked: Callable[[str], bool]) -> tuple[int, list[str]]:
    """The exit status of --assert, and why. Bars of measurements that were not asked for are left out."""
    by_name = {measurement.name: measurement for measurement in measurements}
    status, why = ACCEPTED, []
    for name, of in bars.items():
        if not asked(name):
            continue
        compared = compare(by_name[name], bars) if name in by_name else {}
        for rival in of:
            if rival not in compared:
                status, text = FELL_SHORT, "was not measured"
            else:
                reached = compared[rival].reached
                if reached:
                    continue
                text = f"{compared[rival].ratio:.3g}, {compared[rival]}"
                status = FELL_SHORT if reached is False else status or CANNOT_TELL
            why.append(f"{name}, {rival}: {text}")
    return status, why


# -------------------------------------------------------------- what is shown and kept


def figure(values: Sequence[float]) -> str:
    """Median and range of what the repeats gave."""
    if not values:
        return "–"
    middle = statistics.median(values)
    digits = 0 if abs(middle) >= 1000 else 1 if abs(middle) >= 100 else 2
    shown = f"{middle:.{digits}f}"
    return shown if len(values) == 1 else f"{shown} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def table(measurements: Sequence[Measurement], bars: Bars) -> tuple[list[str], list[list[str]]]:
    """Header, and a row per rival: measurement, ours, rival, theirs, ratio, conclusion.

    Where nothing has a rival or a bar, measurement and value alone.
    """
    shown = []
    for measurement in measurements:
        what, ours = f"{measurement.title} ({measurement.unit})", figure(measurement.ours)
        compared = compare(measurement, bars)
        for rival, comparison in compared.items():
            theirs = "–" if comparison.theirs is None else figure(comparison.theirs)
            ratio = "–" if comparison.theirs is None else f"{comparison.ratio:.2f}"
            shown.append([what, ours, rival, theirs, ratio, str(comparison)])
        if not compared:
            shown.append([what, ours, *NOBODY])
    names = {next(iter(measurement.samples)) for measurement in measurements}
    first = names.pop() if len(names) == 1 else OURS  # which has several names where it is set beside itself
    header = ["measurement", first, "rival", "rival's", f"{first} / rival", "conclusion"]
    if all(row[2:] == NOBODY for row in shown):
        header, shown = header[:2], [row[:2] for row in shown]
    return header, shown


NOBODY = ["–"] * 4


def document(measurements: Iterable[Measurement], context: Mapping[str, Any]) -> dict[str, Any]:
    """What --json writes: the context, and of each measurement every sample."""
    return {
        **context,
        "measurements": [
            {
                "name": m.name,
                "title": m.title,
                "unit": m.unit,
                "facts": m.facts,
                "contestants": {
                    name: {
                        "samples": samples,
                        "median": statistics.median(samples),
                        "interquartile_range": spread(samples) if len(samples) > 1 else None,
                    }
                    for name, samples in m.samples.items()
                    if samples
                },
            }
            for m in measurements
        ],
    }
