"""The engine model: continuous batching as a pure object. The caller gives the time, and nothing here waits.

A step is planned (who is admitted, how many prompt tokens, how long it will take), and when it is due it is
completed: every decoding request gains `tokens_per_step` tokens, every finished prompt its first one.

Work per token is kept to an index or two. All decoding requests advance alike, so their lengths follow from
the step counter; what happens to one of them at a known step (its end, a row of a request that does not
stream every step) is filed under that step's number. Requests that stream every step live in parallel lists
that turn into an output's columns by comprehension.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from smg.mock.replies import Replies
from smg.mock.settings import Settings

CATCH_UP = 0.05  # seconds a late caller may lag and still have the steps it missed made up


class Load(NamedTuple):
    """What an engine reports of itself, as of the moment a step was planned."""

    running: int  # requests admitted
    waiting: int  # requests
    kv_active_pages: int
    kv_total_pages: int


class Ending(NamedTuple):
    """How an engine ends a reply at its limits."""

    spare: int = 0  # places of the context that no reply may take
    limit_first: bool = False  # whether a token that is the last one allowed counts as that, even if it would stop


@dataclass(slots=True)
class Batch:
    """The outputs of one step as parallel columns, one entry per request."""

    rids: list[str]
    token_ids: list[list[int]]  # new ones
    finish_reasons: list[str]  # "" while running
    prompt_tokens: list[int]
    completion_tokens: list[int]  # cumulative
    cached_tokens: list[int]
    logprobs: list[list[float]]  # [] when off
    logprob_ids: list[list[int]]
    load: Load | None  # None: not a step's, but an answer that the engine gives beside them


@dataclass(slots=True, eq=False)
class Request:
    """One request. The first fields are the caller's; the others are the engine's."""

    rid: str
    prompt_tokens: int
    seed: int = 0
    max_tokens: int | None = None  # None: up to the context
    min_tokens: int = 0
    ignore_eos: bool = False  # nothing but its limits ends it
    knows_eos: bool = True  # it may end by itself, as the model would
    stop_token_ids: frozenset[int] = frozenset()
    interval: int = 1  # after the first token, a row when the length passes k * interval + phase
    phase: int = 0
    return_logprob: bool = False

    start: int = 0  # of its reply in the ring
    finish_at: int = 0  # tokens
    finish_reason: str = ""  # what it will end with
    ends_with_eos: bool = False
    cached: int = 0  # prompt tokens found in the cache
    sent: int = 0  # tokens already in a row
    done: int = 0  # tokens, up to date while it does not decode
    todo: int = 0  # tokens still to prefill
    paid: int = 0  # tokens its pages were taken for at admission
    base: int = 0  # while decoding, tokens are base + tokens_per_step * tick
    event: int = -1  # the tick under which it is filed
    place: int = -1  # in the parallel lists, or -1
    state: str = "new"  # waiting, prefilling, decoding, gone

    @property
    def streams_every_step(self) -> bool:
        return self.interval <= 1


@dataclass(slots=True)
class Counts:
    """Totals of one engine's life."""

    tokens: int = 0
    steps: int = 0
    late_steps: int = 0  # planned later than CATCH_UP after their time: the caller was too slow
    preempted: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # requests by finish reason


class Engine:
    """One rank. `due` is the time of the next thing to do, None while there is nothing.

    The caller adds and aborts at any time, and calls `step(now)` when `due` has come. Times are seconds on
    any clock that does not go back.
    """

    def __init__(self, settings: Settings, replies: Replies, ending: Ending) -> None:
        self.due: float | None = None
        self.admitting = True  # whether requests may leave the queue
        self.tick = 0  # steps completed
        self.counts = Counts()
        self._settings = settings
        self._replies = replies
        self._ending = ending
        self._halted = False
        self._gain = settings.tokens_per_step
        self._page = settings.page_size
        self._pages_total = settings.kv_pages
        self._pages_active = 0
        self._page_phases = [0] * settings.page_size  # decoding requests by (prompt + base) mod page size
        self._planned = False  # a step is under way; pages for it are taken
        self._timed = False  # it takes time, so the next one has a schedule to keep
        self._load = Load(0, 0, 0, settings.kv_pages)
        self._chunks: list[tuple[Request, int]] = []  # the planned step's prompt tokens
        self._by_rid: dict[str, Request] = {}
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._prefilling: dict[Request, None] = {}
        self._decoding: dict[Request, None] = {}  # oldest first
        self._events: dict[int, dict[Request, None]] = {}  # by tick, in order of filing
        # Parallel lists of the decoding requests that stream every step.
        self._steady: list[Request] = []
        self._logprobs_wanted = 0  # by requests among them
        self._rids: list[str] = []
        self._bases: list[int] = []
        self._offsets: list[int] = []  # start + base: place in the ring at tick 0
        self._prompts: list[int] = []
        self._cached: list[int] = []
        self._columns: tuple[list[Any], ...] = (
            self._steady, self._rids, self._bases, self._offsets, self._prompts, self._cached
        )  # fmt: skip

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def eos(self) -> int | None:
        """The id that a reply ends with by itself."""
        return self._replies.eos

    @property
    def load(self) -> Load:
        """The state right now (rows carry the one of their step's planning)."""
        return Load(self.running, len(self._waiting), self._pages_active, self._pages_total)

    @property
    def stepping(self) -> bool:
        """Whether a step is under way."""
        return self._planned and not self._halted

    @property
    def unfinished(self) -> int:
        """Requests that steps could bring further, which are none while it is halted."""
        return 0 if self._halted else self.running + (len(self._waiting) if self.admitting else 0)

    def __contains__(self, rid: str) -> bool:
        return rid in self._by_rid

    def holds(self, prompt_tokens: int) -> bool:
        """Whether the KV cache could ever hold that prompt and one step of its reply."""
        return prompt_tokens + 1 + self._gain <= self._pages_total * self._page

    def add(self, request: Request, now: float) -> None:
        """Queue a request. A request id that is already here is not refused; `abort` finds the newer one.

        Raises ValueError for a prompt that the KV cache does not hold (see `holds`), as it would never run.
        """
        if not self.holds(request.prompt_tokens):
            raise ValueError(f"request {request.rid}: {request.prompt_tokens} prompt tokens exceed the KV cache")
        self._plan_reply(request)
        request.cached = max(0, min(self._settings.cached_tokens, request.prompt_tokens - 1))
        request.state = "waiting"
        self._by_rid[request.rid] = request
        self._waiting[request] = None
        if self.due is None and self.admitting and not self._halted:
            self.due = now

    def abort(self, rid: str) -> bool:
        """Drop a request without a word; False when there is none of that id."""
        request = self._by_rid.get(rid)
        if request is None:
            return False
        self._leave(request)
        return True

    def halt(self) -> None:
        """Make no step, not even the one under way, until `go`."""
        self._halted = True
        self.due = None

    def go(self, now: float) -> None:
        """End a halt, and admit requests again."""
        self._halted = False
        self.admitting = True
        if self.due is None and self._by_rid:
            self.due = now

    def preempt_all(self) -> None:
        """Send every running request back to the queue."""
        while self.running:
            self._preempt()

    def step(self, now: float) -> Batch | None:
        """Do what is due by `now`: complete the step under way and plan the next one.

        Returns the completed step's rows, None when it gave none (or none was due).
        """
        if self.due is None or now < self.due:
            return None
        begin = self.due
        if now - begin > CATCH_UP or not self._timed:
            self.counts.late_steps += self._planned and self._timed
            begin = now
        batch = None
        if self._planned:
            self._planned = False
            batch = self._complete()
        self._plan(begin)
        return batch

    def residents(self) -> Batch:
        """A row for each running request, without new tokens: raw material for frames that tests spoil."""
        rows = [*self._prefilling, *self._decoding]
        empty: list[list[int]] = [[] for _ in rows]
        return Batch(
            rids=[r.rid for r in rows],
            token_ids=empty,
            finish_reasons=[""] * len(rows),
            prompt_tokens=[r.prompt_tokens for r in rows],
            completion_tokens=[self._length(r) for r in rows],
            cached_tokens=[r.cached for r in rows],
            logprobs=[[] for _ in rows],
            logprob_ids=empty,
            load=self.load,
        )

    # -- replies

    def _plan_reply(self, request: Request) -> None:
        """Settle how the request will end, which its seed and limits decide."""
        replies = self._replies
        request.start = replies.start(request.seed)
        room = min(
            self._settings.max_model_len - self._ending.spare - request.prompt_tokens,
            self._pages_total * self._page - self._gain - request.prompt_tokens,
        )
        limit = max(1, room if request.max_tokens is None else min(request.max_tokens, room))
        ends = [(limit, 0 if self._ending.limit_first else 3, "length")]  # the second decides at equal length
        if not request.ignore_eos:
            natural = replies.natural_length(request.seed)
            if natural is not None and request.knows_eos:
                ends.append((max(natural, request.min_tokens), 1, "eos"))
            if request.stop_token_ids:
                first = replies.first_of(request.start, request.stop_token_ids, max(request.min_tokens - 1, 0), limit)
                if first is not None:
                    ends.append((first + 1, 2, "stop"))
        request.finish_at, _, how = min(ends)
        request.ends_with_eos = how == "eos" and replies.eos is not None
        request.finish_reason = "stop" if how == "eos" else how

    # -- planning

    def _plan(self, begin: float) -> None:
        settings = self._settings
        growth = self._growth()
        while self._pages_active + growth > self._pages_total:
            self._preempt()
            growth = self._growth()
        self._pages_active += growth
        if self._waiting:
            self._admit()
        decoding = len(self._decoding)
        running = decoding + len(self._prefilling)
        self._load = Load(running, len(self._waiting), self._pages_active, self._pages_total)
        if not running:
            self.due = None
            return
        duration = (settings.step_ms + settings.decode_per_req_ms * decoding) / 1000
        if self._prefilling:
            taken = self._plan_chunks()
            if settings.prefill_tps:
                duration = max(duration, taken / settings.prefill_tps)
        self.due = begin + duration
        self._timed = duration > 0
        self._planned = True

    def _admit(self) -> None:
        """Move requests from the queue to the prefill while there is room for the next one."""
        while self._waiting and self.admitting and self.running < self._settings.max_running:
            request = next(iter(self._waiting))
            paid = request.prompt_tokens + request.done + 1
            pages = self._pages(paid)
            if self._pages_active + pages > self._pages_total:
                return
            del self._waiting[request]
            self._pages_active += pages
            request.paid = paid
            request.todo = request.prompt_tokens + request.done - request.cached
            request.state = "prefilling"
            self._prefilling[request] = None

    def _plan_chunks(self) -> int:
        """Share the step's prompt tokens out, oldest request first. Returns how many are taken in."""
        left = self._settings.prefill_chunk
        self._chunks = []
        for request in self._prefilling:
            part = min(left, request.todo)
            if part or not request.todo:
                self._chunks.append((request, part))
            left -= part
        return self._settings.prefill_chunk - left

    def _growth(self) -> int:
        """Pages that the decoding requests will open with the next step's tokens.

        A token opens a page when it is the first in one. Token number L + i of a request of length L is that
        when (L + i) mod page = 1, and L = prompt + base + gain * tick.
        """
        phases, page, shift = self._page_phases, self._page, self._gain * self.tick
        if self._gain == 1:
            return phases[-shift % page]
        return sum(phases[(1 - i - shift) % page] for i in range(1, self._gain + 1))

    def _preempt(self) -> None:
        """Send the newest request back to the head of the queue; it keeps its tokens and prefills again."""
        newest = next(reversed(self._prefilling or self._decoding))
        newest.done = self._length(newest)
        if newest.place >= 0:
            newest.sent = newest.done
        self._leave(newest, forget=False)
        newest.state = "waiting"
        self._waiting[newest] = None
        self._waiting.move_to_end(newest, last=False)
        self.counts.preempted += 1

    # -- completing

    def _complete(self) -> Batch | None:
        self.tick += 1
        rows: list[tuple[Request, int, int]] = []  # request, and the part of its reply that the row brings
        for request in self._events.pop(self.tick, ()):
            self._settle(request, rows)
        batch = self._steady_rows()
        self.counts.steps += 1
        self.counts.tokens += self._gain * len(batch.rids)
        if self._chunks:
            for request, part in self._chunks:
                if request.state == "prefilling":
                    request.todo -= part
                    if not request.todo:
                        self._first_token(request, rows)
            self._chunks = []
        for request, begin, end in rows:
            self.counts.tokens += end - begin
            self._add_row(batch, request, begin, end)
        return batch if batch.rids else None

    def _steady_rows(self) -> Batch:
        """The rows of all requests that stream every step and do not end in this one."""
        gain, tick, ring, size = self._gain, self.tick, self._replies.ring, self._replies.size
        gained, shift = gain * tick, gain * (tick - 1)
        count = len(self._rids)
        if gain == 1:
            tokens = [[ring[(offset + shift) % size]] for offset in self._offsets]
        else:
            tokens = [self._replies.window(offset, shift, gained) for offset in self._offsets]
        return Batch(
            rids=self._rids.copy(),
            token_ids=tokens,
            finish_reasons=[""] * count,
            prompt_tokens=self._prompts.copy(),
            completion_tokens=[base + gained for base in self._bases],
            cached_tokens=self._cached.copy(),
            logprobs=self._steady_logprobs(shift, gained) if self._logprobs_wanted else [[]] * count,
            logprob_ids=(
                [ids if r.return_logprob else [] for r, ids in zip(self._steady, tokens, strict=True)]
                if self._logprobs_wanted
                else [[]] * count
            ),
            load=self._load,
        )

    def _steady_logprobs(self, shift: int, gained: int) -> list[list[float]]:
        window = self._replies.logprob_window
        return [window(r.start, r.base + shift, r.base + gained) if r.return_logprob else [] for r in self._steady]

    def _settle(self, request: Request, rows: list[tuple[Request, int, int]]) -> None:
        """A decoding request's filed tick has come: its row, and its end or its next filing."""
        request.event = -1
        length = self._length(request)
        if request.place >= 0:
            request.sent = request.base + self._gain * (self.tick - 1)
        rows.append((request, request.sent, length))
        request.sent = length
        if length == request.finish_at:
            self._leave(request)
        else:
            self._file(request, length)

    def _first_token(self, request: Request, rows: list[tuple[Request, int, int]]) -> None:
        """A prompt is complete: its first token (after a preemption, its next one) comes with this step."""
        request.done += 1
        ended = request.done >= request.finish_at
        if ended or not request.sent or request.done >= _next_row(request, request.sent):
            rows.append((request, request.sent, request.done))
            request.sent = request.done
        if ended:
            self._leave(request)
            return
        del self._prefilling[request]
        request.state = "decoding"
        request.base = request.done - self._gain * self.tick
        self._decoding[request] = None
        self._page_phases[(request.prompt_tokens + request.base) % self._page] += 1
        if request.streams_every_step:
            request.place = len(self._steady)
            self._logprobs_wanted += request.return_logprob
            values = request, request.rid, request.base, request.start + request.base
            for column, value in zip(self._columns, (*values, request.prompt_tokens, request.cached), strict=True):
                column.append(value)
        self._file(request, request.done)

    def _file(self, request: Request, length: int) -> None:
        """File a decoding request under the tick at which something of its own happens next."""
        target = request.finish_at
        if request.place < 0:
            target = min(target, _next_row(request, length))
        request.event = self.tick - (length - target) // self._gain
        self._events.setdefault(request.event, {})[request] = None

    def _add_row(self, batch: Batch, request: Request, begin: int, end: int) -> None:
        """Append the row that brings the tokens [begin, end) of a request's reply."""
        replies = self._replies
        finished = end >= request.finish_at
        tokens = replies.window(request.start, begin, end)
        if finished:
            ended = self.counts.finished
            ended[request.finish_reason] = ended.get(request.finish_reason, 0) + 1
            if request.ends_with_eos and replies.eos is not None:
                tokens[-1] = replies.eos
        logprobs = replies.logprob_window(request.start, begin, end) if request.return_logprob else []
        batch.rids.append(request.rid)
        batch.token_ids.append(tokens)
        batch.finish_reasons.append(request.finish_reason if finished else "")
        batch.prompt_tokens.append(request.prompt_tokens)
        batch.completion_tokens.append(end)
        batch.cached_tokens.append(request.cached)
        batch.logprobs.append(logprobs)
        batch.logprob_ids.append(tokens if request.return_logprob else [])

    # -- leaving

    def _length(self, request: Request) -> int:
        """Tokens the request has now."""
        if request.state != "decoding":
            return request.done
        return min(request.base + self._gain * self.tick, request.finish_at)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page)

    def _leave(self, request: Request, forget: bool = True) -> None:
        """Take a request out of wherever it is and free its pages."""
        if request.state == "waiting":
            del self._waiting[request]
        elif request.state == "prefilling":
            del self._prefilling[request]
            self._pages_active -= self._pages(request.paid)
        elif request.state == "decoding":
            del self._decoding[request]
            phase = request.prompt_tokens + request.base
            self._page_phases[phase % self._page] -= 1
            paid_until = self.tick + self._planned  # a planned step has taken its pages already
            self._pages_active -= self._pages(phase + self._gain * paid_until)
            if request.place >= 0:
                self._leave_steady(request)
            if request.event >= 0:
                filed = self._events[request.event]
                del filed[request]
                if not filed:
                    del self._events[request.event]
                request.event = -1
        request.state = "gone"
        if forget and self._by_rid.get(request.rid) is request:
            del self._by_rid[request.rid]

    def _leave_steady(self, request: Request) -> None:
        """Fill the request's place in the parallel lists with their last entry."""
        place = request.place
        self._steady[-1].place = place
        request.place = -1
        self._logprobs_wanted -= request.return_logprob
        for column in self._columns:
            last = column.pop()
            if place < len(column):
                column[place] = last


def _next_row(request: Request, length: int) -> int:
    """The length at which a request that does not stream every step gets its next row."""
    interval = max(request.interval, 1)
    return ((length - request.phase) // interval + 1) * interval + request.phase
