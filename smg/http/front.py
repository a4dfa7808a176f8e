"""The front's state: its groups and outlets, the model, what is running, and whether it still takes work."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smg._outlets import Outlet
from smg._sse import drain
from smg._streams import Stream
from smg.engine.group import EngineGroup
from smg.errors import Closed, InvalidRank, InvalidRequest, NoRank, Overloaded
from smg.http.admission import Admission
from smg.http.chat import ChatShape, chat_job
from smg.http.completion import Completion, Shape
from smg.http.completions import CompletionShape, completion_job
from smg.http.counts import Counts
from smg.http.errors import ApiError, invalid, unavailable
from smg.http.exchange import Exchange
from smg.http.generate import GenerateShape, generate_job
from smg.http.job import Job
from smg.http.render import Timings
from smg.http.requests import ChatRequest, CompletionRequest, Decoder, GenerateRequest, Limits
from smg.routing.router import Place, Router

if TYPE_CHECKING:
    from smg.http.tokenizer import ModelTokenizer

# A longer body is read, rendered and tokenized on the worker thread. A faster tokenizer holds the GIL for texts up to
# the second size: the loop would wait for the thread as long, and for the way there and back besides.
INLINE_BYTES, FAST_INLINE_BYTES = 4 << 10, 32 << 10
KEEPALIVE_TICKS = 4  # of the keep-alive interval, so that a comment is at most a quarter late


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One way to ask for text. `fields` names its fields where they differ from `SamplingParams`."""

    name: str
    id_prefix: str
    request: type[Any]
    job: Callable[..., Job]
    shape: Callable[..., Shape]
    fields: dict[str, str]


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(
        "chat",
        "chatcmpl-",
        ChatRequest,
        chat_job,
        ChatShape,
        {"prompt_token_ids": "messages", "logprobs": "top_logprobs", "json_schema": "response_format"},
    ),
    "/v1/completions": Endpoint(
        "completions",
        "cmpl-",
        CompletionRequest,
        completion_job,
        CompletionShape,
        {"prompt_token_ids": "prompt", "json_schema": "response_format"},
    ),
    "/generate": Endpoint(
        "generate",
        "gnt-",
        GenerateRequest,
        generate_job,
        GenerateShape,
        {
            "prompt_token_ids": "input_ids",
            "logprobs": "top_logprobs_num",
            "max_tokens": "sampling_params.max_new_tokens",
            "min_tokens": "sampling_params.min_new_tokens",
            "seed": "sampling_params.sampling_seed",
        },
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOptions:
    """How a front behaves; the command line has a flag for each."""

    limits: Limits = field(default_factory=Limits)
    served_model_name: str | None = None
    max_concurrent_requests: int = -1
    queue_size: int = 100
    queue_timeout_secs: float = 60.0
    request_timeout_secs: float = 1800.0
    max_retries: int = 5
    sse_keepalive_secs: float = 15.0
    response_timings: bool = False


class Front:
    """Takes requests of the HTTP endpoints to the groups of `router`. `open` it on a running loop."""

    def __init__(self, router: Router, model: ModelTokenizer, options: FrontOptions | None = None) -> None:
        self.router, self.model = router, model
        self.options = options or FrontOptions()
        self.model_name = self.options.served_model_name or model.name
        self.backend = router.groups[0].backend
        self.admission = Admission(
            self.options.max_concurrent_requests, self.options.queue_size, self.options.queue_timeout_secs
        )
        self._inline_bytes = FAST_INLINE_BYTES if model.fast else INLINE_BYTES
        self.counts = Counts(ENDPOINTS)
        self.started = int(time.time())
        self.draining = False
        self.active: set[Completion] = set()
        self._decoders = {
            path: Decoder(endpoint.request, self.options.limits, self.counts.unknown_fields, self.backend)
            for path, endpoint in ENDPOINTS.items()
        }
        self._outlets: dict[EngineGroup, Outlet] = {}
        self._pool = ThreadPoolExecutor(1, "smg-tokenize")
        self._ticks: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self.loop = asyncio.get_running_loop()
        for group in self.router.groups:
            outlet = self._outlets[group] = group.outlet()
            self.loop.add_reader(outlet.fileno(), drain, outlet)
        if self.options.sse_keepalive_secs:
            self._tick()

    def close(self) -> None:
        """End what still runs, with an error, and give the outlets back."""
        if self._ticks is not None:
            self._ticks.cancel()
        self.end_all(unavailable("shutting_down", "the server was shut down before the request was complete"))
        for outlet in self._outlets.values():
            self.loop.remove_reader(outlet.fileno())
            outlet.close()
        self._outlets.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def end_all(self, error: ApiError) -> None:
        self.admission.refuse_waiting(error)
        for completion in list(self.active):
            completion.failed(None, error)

    def _tick(self) -> None:
        for completion in list(self.active):
            if completion.wire is not None:
                completion.wire.tick(KEEPALIVE_TICKS)
        self._ticks = self.loop.call_later(self.options.sse_keepalive_secs / KEEPALIVE_TICKS, self._tick)

    def check_takes_work(self) -> None:
        """Raise the refusal of a request that could not be served now, before any work is put into it."""
        if self.draining:
            raise unavailable("shutting_down", "the server is shutting down; ask another one", retry_after=5)
        for group in self.router.groups:
            if group.live:
                return
        raise NoRank("no engine rank is live yet, or none any more; see /workers")

    async def prepare(self, path: str, body: bytes) -> Job:
        """A body as what it asks of the engine. Long ones leave the loop meanwhile."""
        if len(body) <= self._inline_bytes:
            return self.job(path, body)
        job: Job = await self.off_loop(self.job, path, body)
        return job

    async def off_loop(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do on the worker thread what may take long."""
        return await self.loop.run_in_executor(self._pool, work, *arguments)

    def job(self, path: str, body: bytes) -> Job:
        request = self._decoders[path](body)
        self.check_model(request.model)
        request.model = self.model_name
        return ENDPOINTS[path].job(request, self.model, self.options.limits, self.backend)

    def check_model(self, name: str | None) -> None:
        if name and name not in (self.model_name, self.model.name):
            raise ApiError(
                404,
                "model_not_found",
                f"model '{name[:100]}' is not served here; see /v1/models",
                param="model",
            )

    def context(self, group: EngineGroup) -> int | None:
        """Tokens of prompt and answer together: what the group's ranks say, else the model's own configuration."""
        return group.max_model_len or self.model.context

    def completion(self, path: str, job: Job, exchange: Exchange) -> Completion:
        """A completion of `job`, not started yet."""
        endpoint = ENDPOINTS[path]
        count = max(map(len, job.prompts))
        for group in self.router.groups:
            longest = self.context(group)
            if longest and count >= longest:
                raise invalid(
                    endpoint.fields["prompt_token_ids"],
                    f"the prompt has {count} tokens, and the context of {longest} must hold the answer too",
                    "context_length_exceeded",
                )
        timings = Timings(exchange.arrived) if self.options.response_timings else None
        job.rid = job.rid or exchange.answer_id()
        shape = endpoint.shape(job, job.rid, int(time.time()), self.model, timings)
        return Completion(self, job, shape, exchange)

    def submit(self, job: Job, index: int, tried: list[Place]) -> Stream:
        """Send one sequence to the group that the policy picks, or to the next one that can take it.

        Adds the rank that has it to `tried`.
        """
        first = self.router.choose()
        refusal: NoRank | Overloaded | None = None
        for group in (first, *(other for other in self.router.groups if other is not first)):
            try:
                return self._submit_to(group, None, job, index, tried, self.options.request_timeout_secs)
            except (NoRank, Overloaded) as error:
                if not isinstance(refusal, Overloaded):
                    refusal = error
        assert refusal is not None
        raise refusal

    def resubmit(self, job: Job, index: int, tried: list[Place], since: float) -> Stream | None:
        """Send one sequence to a rank that has not had it yet.

        Its time goes on from `since`, in monotonic seconds. None when there is no such rank that can take it,
        or when tries or time are used up.
        """
        timeout = self.options.request_timeout_secs
        left = since + timeout - time.monotonic()
        if len(tried) > self.options.max_retries or (timeout and left <= 0):
            return None
        for group, rank in self.router.others(tried):
            try:
                return self._submit_to(group, rank, job, index, tried, left if timeout else 0.0)
            except (NoRank, InvalidRank, Overloaded, Closed):  # it went, or filled up, a moment ago
                continue
        return None

    def _submit_to(
        self, group: EngineGroup, rank: int | None, job: Job, index: int, tried: list[Place], timeout: float
    ) -> Stream:
        stream = group.submit(
            job.prompt(index),
            job.sampling(index),
            request_id=job.rid,
            rank=rank,
            priority=job.priority,
            deadline=timeout or None,
            outlet=self._outlets[group],
        )
        tried.append((group, stream.rank))
        return stream


def name_field(path: str, exc: InvalidRequest) -> ApiError:
    """A refusal by the engine's protocol, under the name the endpoint has for the field."""
    own = re.match(r"extra\['\w+'\]\['(bad_words|\w+)", exc.field)
    name = own[1] if own else exc.field
    field = ENDPOINTS[path].fields.get(name, name)
    return invalid(field, f"{field}: must be {exc.allowed}")
