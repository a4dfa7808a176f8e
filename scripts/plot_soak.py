"""Draw what a soak sampled: python scripts/plot_soak.py SAMPLES.json docs/soak.png

The samples are those of `python -m tests.chaos.soak --out SAMPLES.json`. Needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROWS: tuple[tuple[str, Callable[[dict[str, Any]], float]], ...] = (
    ("resident memory, MB", lambda sample: sample["memory"] / 1e6),
    ("open descriptors", lambda sample: sample["descriptors"]),
    ("requests in flight", lambda sample: sample["in_flight"]),
    ("live ranks of four", lambda sample: sample["live"]),
    ("requests ended, thousands", lambda sample: sample["ended"] / 1e3),
)


def main(samples_path: str, picture_path: str) -> None:
    run = json.loads(Path(samples_path).read_text())
    minutes = [sample["seconds"] / 60 for sample in run["samples"]]
    figure = Figure(figsize=(9, 8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (label, value) in zip(figure.subplots(len(ROWS), sharex=True), ROWS, strict=True):
        axes.plot(minutes, [value(sample) for sample in run["samples"]], linewidth=0.7)
        for moment, minute in (("before", 0), ("after", minutes[-1])):
            axes.plot(minute, value(run[moment]), "o", markersize=4, color="tab:red")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    axes.set_xlabel("minutes")
    figure.suptitle(
        f"{run['after']['ended']:,} requests, {sum(run['faults'].values()):,} faults; "
        "red: the same process at rest before and after"
    )
    figure.savefig(picture_path, dpi=90)


if __name__ == "__main__":
    main(*sys.argv[1:])
