"""Data-parallel ranks as a discrete-event simulation: requests in, waiting times out, no clock and no process.

A rank batches continuously: a step decodes a token for every running request and takes in up to `chunk` prompt tokens
of admitted ones; requests wait, first come first served, for a place in the batch and for KV memory. A request takes
the KV memory of its whole length when it is admitted, so that none is ever preempted. What a step takes is linear in
what it does. Ranks tell their load at the end of every step, as engines do with their output.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from smg.bench.trace import Arrival


@dataclass(frozen=True)
class Engine:
    """What a rank is like. Seconds, tokens."""

    step: float = 0.008  # a step with nothing in it: the weights are read once
    per_request: float = 0.000_05  # each request that decodes
    per_prompt_token: float = 0.000_06
    chunk: int = 2048  # prompt tokens per step
    batch: int = 128  # requests
    kv: int = 200_000  # tokens

    def capacity(self, arrivals: Sequence[Arrival]) -> float:
        """Requests a second that a rank sustains, of the lengths of these, with its batch full.

        What bounds it is the step time at the largest batch that the lengths leave KV memory for.
        """
        prompt = sum(a.prompt for a in arrivals) / len(arrivals)
        output = sum(a.output for a in arrivals) / len(arrivals)
        # a request holds KV memory in proportion to its length and to how long it runs, which is its output
        held = sum((a.prompt + a.output) * a.output for a in arrivals) / sum(a.output for a in arrivals)
        batch = min(self.batch, self.kv / held)
        return 1 / (prompt * self.per_prompt_token + output * (self.step / batch + self.per_request))


@dataclass(slots=True, eq=False)
class Request:
    """A request on its way through a rank."""

    arrival: Arrival
    number: int
    left: int  # prompt tokens not taken in yet
    began: float = 0.0  # when the first of them was
    first: float = 0.0  # when its first token was out
    ended: float = 0.0

    @property
    def size(self) -> int:
        return self.arrival.prompt + self.arrival.output


class Chooser(Protocol):
    """Who chooses ranks: what the router knows, and when it learns of it."""

    def choose(self, request: Request) -> int:
        """The rank for a request that has just arrived."""

    def finished(self, request: Request, rank: int) -> None:
        """A request of that rank has ended."""

    def report(self, rank: int, running: int, waiting: int, kv_usage: float) -> None:
        """The rank's load at the end of a step, after what ended in it."""


@dataclass(slots=True)
class Rank:
    """A rank's state."""

    waiting: deque[Request] = field(default_factory=deque)
    prefilling: deque[Request] = field(default_factory=deque)
    ending: list[tuple[int, int, Request]] = field(default_factory=list)  # heap: step, number, request
    taken: list[Request] = field(default_factory=list)  # their prompts are complete with this step
    steps: int = 0
    kv_used: int = 0
    busy: bool = False

    def begin(self, engine: Engine, now: float) -> float | None:
        """Start a step. Returns when it ends; None when there is nothing to do."""
        while (
            self.waiting
            and len(self.ending) + len(self.prefilling) < engine.batch
            and self.kv_used + self.waiting[0].size <= max(engine.kv, self.waiting[0].size)
        ):
            request = self.waiting.popleft()
            self.kv_used += request.size
            self.prefilling.append(request)
        budget = engine.chunk
        while self.prefilling and budget:
            request = self.prefilling[0]
            if request.left == request.arrival.prompt:
                request.began = now
            part = min(budget, request.left)
            budget -= part
            request.left -= part
            if not request.left:
                self.taken.append(self.prefilling.popleft())
        if not self.ending and budget == engine.chunk:
            self.busy = False
            return None
        self.busy = True
        self.steps += 1
        prompt_tokens = engine.chunk - budget
        return now + engine.step + engine.per_request * len(self.ending) + engine.per_prompt_token * prompt_tokens

    def end(self, now: float) -> list[Request]:
        """End the step. Returns the requests that ended with it."""
        for request in self.taken:
            request.first = now
            heapq.heappush(self.ending, (self.steps + request.arrival.output - 1, request.number, request))
        self.taken.clear()
        ended = []
        while self.ending and self.ending[0][0] <= self.steps:
            request = heapq.heappop(self.ending)[2]
            request.ended = now
            self.kv_used -= request.size
            ended.append(request)
        return ended

    @property
    def queued(self) -> int:
        """Requests that wait for a place."""
        return len(self.waiting)

    @property
    def running(self) -> int:
        return len(self.ending) + len(self.prefilling)


@dataclass(frozen=True)
class Outcome:
    """What became of a trace."""

    requests: list[Request]
    imbalance: list[float]  # at each arrival: the fullest rank's requests over the mean
    end: float  # seconds until the last request ended


def simulate(arrivals: Sequence[Arrival], ranks: int, chooser: Chooser, engine: Engine) -> Outcome:
    """Run a trace to its end. The same arguments give the same outcome."""
    state = [Rank() for _ in range(ranks)]
    counts = [0] * ranks
    requests = [Request(arrival, number, arrival.prompt) for number, arrival in enumerate(arrivals)]
    imbalance: list[float] = []
    ends: list[tuple[float, int]] = []  # heap: when the step of a rank ends
    upcoming, now, in_system = 0, 0.0, 0
    while upcoming < len(requests) or ends:
        if ends and (upcoming == len(requests) or ends[0][0] <= requests[upcoming].arrival.at):
            now, index = heapq.heappop(ends)
            rank = state[index]
            for request in rank.end(now):
                counts[index] -= 1
                in_system -= 1
                chooser.finished(request, index)
            chooser.report(index, rank.running, rank.queued, min(1.0, rank.kv_used / engine.kv))
        else:
            request = requests[upcoming]
            upcoming += 1
            now = request.arrival.at
            index = chooser.choose(request)
            rank = state[index]
            rank.waiting.append(request)
            counts[index] += 1
            in_system += 1
            imbalance.append(max(counts) * ranks / in_system)
            if rank.busy:
                continue
        if (end := rank.begin(engine, now)) is not None:
            heapq.heappush(ends, (end, index))
    return Outcome(requests, imbalance, now)
