"""A request that runs: its streams submitted, their text delivered, its end told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from smg._sse import Choice, Wire
from smg.errors import Error, RankDied
from smg.http.counts import Counts
from smg.http.errors import ApiError, describe
from smg.http.exchange import Exchange
from smg.http.job import Job
from smg.routing.router import Place

if TYPE_CHECKING:
    from smg._streams import Stream
    from smg.http.tokenizer import ModelTokenizer

log = logging.getLogger(__name__)


class Shape(Protocol):
    """Renders one response as its endpoint's clients read it. Events are JSON lines without framing."""

    def around_text(self, index: int) -> tuple[bytes | None, bytes | None]: ...
    def first(self, choice: Choice) -> bytes | None: ...
    def part(self, choice: Choice, text: bytes, entries: list[Any] | None) -> bytes: ...
    def last(self, choice: Choice) -> bytes: ...
    def closing(self, choices: Sequence[Choice]) -> bytes | None: ...
    def error(self, error: ApiError) -> bytes: ...
    def body(self, choices: Sequence[Choice]) -> bytes: ...


class Sender(Protocol):
    """Sends sequences to ranks, and knows what runs."""

    loop: asyncio.AbstractEventLoop
    model: ModelTokenizer
    counts: Counts
    active: set[Completion]

    def submit(self, job: Job, index: int, tried: list[Place]) -> Stream: ...
    def resubmit(self, job: Job, index: int, tried: list[Place], since: float) -> Stream | None: ...


class Completion:
    """One request's sequences, from their submission to the last byte.

    `start`, await `done`, then `close` whatever happened; `close` aborts what still runs. After `done`,
    `error` says what went wrong, or else the event stream is complete or `choices` hold the answer's texts.
    """

    def __init__(self, front: Sender, job: Job, shape: Shape, exchange: Exchange) -> None:
        self.front, self.job, self.shape, self.exchange = front, job, shape, exchange
        self.choices: list[Choice] = []
        self.tried: list[list[Place]] = []  # per sequence, the ranks it was sent to, in order
        self.rank_header = b""
        self.running = job.sequences
        self.error: ApiError | None = None
        self.wire = Wire(exchange.request.protocol, exchange.http11) if job.stream else None
        self.done: asyncio.Future[None] = front.loop.create_future()

    def start(self) -> None:
        """Submit every sequence. Raises what `submit` raises, and then nothing is left running."""
        job, front, wire = self.job, self.front, self.wire
        protocol: Any = self.exchange.request.protocol
        latencies = front.counts.latencies[self.exchange.path]
        front.active.add(self)
        try:
            for index in range(job.sequences):
                decoding = job.decoding(index)
                tried: list[Place] = []
                stream = front.submit(job, index, tried) if decoding.params.max_tokens != 0 else None
                self.tried.append(tried)
                before, after = self.shape.around_text(index) if wire is not None else (None, None)
                choice = Choice(
                    index,
                    job.detokenizer(front.model, index),
                    self,
                    wire=wire,
                    shape=self.shape,
                    before=before,
                    after=after,
                    stop_ids=decoding.stop_ids,
                    keep_stop=decoding.keep_stop,
                    logprobs=job.logprobs,
                    collect=job.native,
                    keep_ids=job.native,
                    prompt_tokens=len(job.prompt(index)),
                    first_token=latencies.first_token,
                    between_tokens=latencies.between_tokens,
                )
                if stream is not None:
                    choice.stream = stream
                    stream.data = choice
                self.choices.append(choice)
        except BaseException:
            self.close()
            raise
        self._name_ranks()
        if wire is not None:
            protocol.wire = wire
            if protocol.writing_paused:
                wire.pause()
        for choice in self.choices:
            if choice.stream is None:  # no token of it was asked for
                choice.feed([], "length")

    def _name_ranks(self) -> None:
        """Tell in the head who has the sequences, unless it was sent."""
        ranks = [str(tried[-1][1]) for tried in self.tried if tried]
        if ranks:
            self.rank_header = b"X-SMG-Rank: %b\r\n" % ",".join(ranks).encode()
        if self.wire is not None and not self.wire.started:
            self.wire.head = self.exchange.stream_head(self.rank_header)

    def retried(self, choice: Choice, exc: Exception) -> bool:
        """Give a sequence whose rank died before its first token to another rank, under the same ids."""
        if not isinstance(exc, RankDied):
            return False
        stream = self.front.resubmit(self.job, choice.index, self.tried[choice.index], choice.submitted)
        self.front.counts.retried(self.exchange.path, stream is not None)
        if stream is None:
            return False
        choice.stream = stream
        stream.data = choice
        self._name_ranks()
        return True

    def ended(self, choice: Choice) -> None:
        """A sequence is complete."""
        self.running -= 1
        if self.running:
            return
        if self.wire is not None:
            closing = self.shape.closing(self.choices)
            if closing is not None:
                self.wire.event(closing)
            self.wire.event(b"[DONE]")
            self.wire.close()
        self._finish()

    def failed(self, choice: Choice | None, exc: BaseException) -> None:
        """A sequence cannot be completed: the response ends, with an error and no made-up finish reason."""
        if self.error is not None or self.done.done():
            return
        if not isinstance(exc, Error | ApiError):
            log.error("a response failed", exc_info=exc)
        self.error = describe(exc)
        self._abort()
        if self.wire is not None and self.wire.started:
            self.exchange.code = self.error.code
            self.wire.event(self.shape.error(self.error))
            self.wire.close()
        self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def _abort(self) -> None:
        for choice in self.choices:
            choice.abort()

    def close(self) -> None:
        """Abort what still runs and let go of the connection."""
        self.front.active.discard(self)
        self._abort()
        protocol: Any = self.exchange.request.protocol
        if self.wire is not None:
            self.wire.leave()
            if getattr(protocol, "wire", None) is self.wire:
                protocol.wire = None
