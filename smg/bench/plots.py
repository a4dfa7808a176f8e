"""Pictures of what `smg bench` measured: median and range of every contestant, as PNG and SVG.

    python -m smg.bench.plots FIGURES.json DIR

draws them again from raw data.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Value = Callable[[float, float], float]  # of a sample and its x


def as_measured(value: float, x: float) -> float:
    return value


@dataclass(frozen=True)
class Picture:
    """The measurements whose name matches, against one of their facts. `{…}` in `file` are groups of the pattern."""

    file: str
    pattern: str
    x: str
    x_label: str
    y_label: str
    value: Value = as_measured
    logarithmic: bool = True


PICTURES = (
    Picture(
        "decode-rows-{0}", r"decode\.(\w+)\.rows\d+", "streams", "rows in a frame", "µs per row", lambda v, x: v / x
    ),
    Picture("cpu-per-token-streams", r"scaling\.streams\.\d+", "streams", "running requests", "µs CPU per token"),
    Picture(
        "tokens-per-core-streams",
        r"scaling\.streams\.\d+",
        "streams",
        "running requests",
        "tokens per second and core",
        lambda v, x: 1e6 / v,
    ),
    Picture("cpu-per-token-ranks", r"scaling\.ranks\.\d+", "ranks", "ranks of the group", "µs CPU per token"),
    Picture("cpu-per-token-groups", r"scaling\.groups\.\d+", "groups", "groups", "µs CPU per token"),
    Picture(
        "delay-{1}-streams-{0}",
        r"http\.(\w+)\.paced\d+\.delay_(p\d+)",
        "streams",
        "streams, a token each every 10 ms",
        "ms from the engine's send to the client",
    ),
    Picture("{0}-rate", r"http\.open\.[\d.]+\.(\w+)", "rate", "requests per second", "ms"),
    Picture(
        "{1}-load-{0}",
        r"policy\.(\w+\.ranks\d+)\.load\d+\.(\w+)",
        "load",
        "offered load, % of capacity",
        "{1}",
        logarithmic=False,
    ),
    Picture("{1}-ranks-{0}", r"policy\.(\w+)\.ranks\d+\.load70\.(\w+)", "ranks", "ranks, at 70 % load", "{1}"),
)


def draw(figures: Mapping[str, Any], directory: Path) -> list[Path]:
    """Every picture that the figures have two points or more for. Returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for picture in PICTURES:
        series: dict[tuple[str, ...], list[Any]] = {}
        for measurement in figures["measurements"]:
            if match := re.fullmatch(picture.pattern, measurement["name"]):
                series.setdefault(match.groups(), []).append(measurement)
        for groups, measurements in series.items():
            if len({m["facts"][picture.x] for m in measurements}) > 1:
                written += _draw(picture, groups, measurements, figures, directory)
    return written


def _draw(
    picture: Picture, groups: Sequence[str], measurements: list[Any], figures: Mapping[str, Any], directory: Path
) -> list[Path]:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    measurements = sorted(measurements, key=lambda m: float(m["facts"][picture.x]))
    names = list(dict.fromkeys(name for m in measurements for name in m["contestants"]))
    for name in names:
        points = [
            (float(m["facts"][picture.x]), [picture.value(v, float(m["facts"][picture.x])) for v in of["samples"]])
            for m in measurements
            if (of := m["contestants"].get(name))
        ]
        middles = [sorted(values)[len(values) // 2] for _, values in points]
        below = [middle - min(values) for middle, (_, values) in zip(middles, points, strict=True)]
        above = [max(values) - middle for middle, (_, values) in zip(middles, points, strict=True)]
        axes.errorbar([x for x, _ in points], middles, yerr=[below, above], label=name, marker="o", ms=3, capsize=2)
    if picture.logarithmic:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(picture.x_label)
    axes.set_ylabel(picture.y_label.format(*groups).replace("_", " "))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    machine = figures["machine"]
    axes.set_title(f"{machine['CPU']}, {machine['CPUs']} CPUs; {figures['started'][:10]}, median and range", fontsize=8)
    stem = picture.file.format(*groups).replace("_", "-").replace(".", "-")
    files = [directory / f"{stem}.{suffix}" for suffix in ("png", "svg")]
    for file in files:
        figure.savefig(file, dpi=120)
    return files


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    for path in draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])):
        print(path)


if __name__ == "__main__":
    main()
