"""Requests to simulate: when they arrive, how long they are. Drawn from a seed, or read from a file.

Lengths are lognormal, so that a few are very long; arrivals come in bursts: the rate jumps between a calm and a busy
level, and within each the gaps spread more than those of a Poisson process do.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple


class Arrival(NamedTuple):
    """One request: seconds from the start, prompt and output tokens."""

    at: float
    prompt: int
    output: int


class Lengths(NamedTuple):
    """A lognormal: its median and the standard deviation of its logarithm, cut off at `longest`."""

    median: float
    sigma: float
    longest: int

    def draw(self, chance: random.Random) -> int:
        return max(1, min(self.longest, round(chance.lognormvariate(0.0, self.sigma) * self.median)))


@dataclass(frozen=True)
class Shape:
    """A kind of traffic."""

    prompt: Lengths
    output: Lengths


SHAPES = {
    "sharegpt": Shape(Lengths(100, 1.2, 4_000), Lengths(160, 0.9, 2_000)),  # first turns, as chat load tests have them
    "chat": Shape(Lengths(1000, 1.0, 16_000), Lengths(130, 1.1, 4_000)),  # long conversations, answers of all lengths
    "code": Shape(Lengths(1500, 0.9, 16_000), Lengths(15, 1.3, 2_000)),  # completions: much to read, little to write
}

BUSY, BUSY_SECONDS, CALM_SECONDS = 1.8, 4.0, 12.0  # rate in a burst over the mean rate; mean durations
GAP_SPREAD = 2.0  # squared coefficient of variation of gaps; a Poisson process has 1


def draw(shape: Shape, rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Requests at `rate` a second, on average over long times."""
    chance = random.Random(seed)
    lengths = random.Random(seed + 1_000_003)  # of their own, so that a rate changes when and not what
    busy_share = BUSY_SECONDS / (BUSY_SECONDS + CALM_SECONDS)
    calm = (1 - busy_share * BUSY) / (1 - busy_share)
    found: list[Arrival] = []
    now, busy, until = 0.0, False, chance.expovariate(1 / CALM_SECONDS)
    while True:
        level = rate * (BUSY if busy else calm)
        now += chance.gammavariate(1 / GAP_SPREAD, GAP_SPREAD / level)
        while now >= until:
            busy = not busy
            until += chance.expovariate(1 / (BUSY_SECONDS if busy else CALM_SECONDS))
        if now >= seconds:
            return found
        found.append(Arrival(now, shape.prompt.draw(lengths), shape.output.draw(lengths)))


COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(path: Path) -> list[Arrival]:
    """A CSV file with COLUMNS: seconds or an ISO time, prompt tokens, output tokens. Raises ValueError, OSError."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if not set(COLUMNS) <= set(reader.fieldnames or ()):
            raise ValueError(f"{path}: the first line must name the columns {', '.join(COLUMNS)}")
        try:
            found = sorted(_arrivals(reader))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
    if not found:
        raise ValueError(f"{path}: holds no request")
    first = found[0].at
    return [arrival._replace(at=arrival.at - first) for arrival in found]


def _arrivals(reader: csv.DictReader[str]) -> Iterator[Arrival]:
    for line in reader:
        stamp, prompt, output = (line[name] for name in COLUMNS)
        try:
            at = float(stamp)
        except ValueError:
            at = datetime.fromisoformat(stamp[:26]).timestamp()  # Python 3.10 reads microseconds at most
        yield Arrival(at, max(1, int(prompt)), max(1, int(output)))


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests in the same order and bursts, as many a second as `rate` says."""
    stretch = len(arrivals) / rate / max(arrivals[-1].at, 1e-9)
    return [arrival._replace(at=arrival.at * stretch) for arrival in arrivals]
