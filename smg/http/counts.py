"""What the front counts of its own: requests, answers, tokens, retries, and durations."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from smg._sse import Choice, Histogram
from smg.http.render import usage_counts

if TYPE_CHECKING:
    from smg.http.exchange import Exchange

BETWEEN_TOKENS_BOUNDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0,
)  # fmt: skip
FIRST_TOKEN_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
)  # fmt: skip
DURATION_BOUNDS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0,
    240.0, 300.0, 480.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0, 5400.0, 7200.0,
)  # fmt: skip


class Latencies:
    """Durations of one endpoint in seconds: of its sequences, and of whole requests."""

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS)
        self.between_tokens = Histogram(BETWEEN_TOKENS_BOUNDS)
        self.per_token = Histogram(BETWEEN_TOKENS_BOUNDS)
        self.generation = Histogram(DURATION_BOUNDS)
        self.request = Histogram(DURATION_BOUNDS)


class Counts:
    """Counters, none of them ever set back. `paths`: the endpoints for completions."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.latencies = {path: Latencies() for path in paths}
        self.routed: Counter[tuple[str, bool]] = Counter()  # (path, streaming)
        self.errors: Counter[tuple[str, str]] = Counter()  # (path, error code)
        self.requests: Counter[tuple[str, str]] = Counter()  # (method, path)
        self.responses: Counter[tuple[str, int, str]] = Counter()  # (path, status, error code)
        self.tokens: Counter[tuple[str, str]] = Counter()  # (path, "input" or "output")
        self.retries: Counter[tuple[str, bool]] = Counter()  # (path, whether another rank took it)
        self.unknown_fields: Counter[str] = Counter()  # by name
        self.durations: dict[tuple[str, str], Histogram] = {}  # by (method, path)

    def answered(self, method: str, exchange: Exchange, seconds: float) -> None:
        path = exchange.path
        self.requests[method, path] += 1
        self.responses[path, exchange.status, exchange.code] += 1
        if exchange.code and path in self.latencies:
            self.errors[path, exchange.code] += 1
        histogram = self.durations.get((method, path))
        if histogram is None:
            histogram = self.durations[method, path] = Histogram(DURATION_BOUNDS)
        histogram.observe(seconds)

    def retried(self, path: str, taken: bool) -> None:
        """A rank died with a sequence that had no token yet; `taken` says whether another rank has it now."""
        self.retries[path, taken] += 1

    def completed(self, path: str, choices: Sequence[Choice], per_prompt: int, arrived: float) -> None:
        """A completion has ended. `per_prompt`: choices of each prompt; `arrived`: monotonic seconds of its head."""
        latencies = self.latencies[path]
        for choice in choices:
            if choice.first:
                latencies.generation.observe(choice.seconds)
                if choice.completion_tokens > 1:
                    rest = choice.submitted + choice.seconds - choice.first
                    latencies.per_token.observe(rest / (choice.completion_tokens - 1))
        latencies.request.observe(time.monotonic() - arrived)
        prompt, output, _ = usage_counts(choices, per_prompt)
        self.tokens[path, "input"] += prompt
        self.tokens[path, "output"] += output
