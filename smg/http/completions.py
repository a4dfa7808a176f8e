"""`/v1/completions`: one or several prompts, as text or token ids, and the texts that follow them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smg._sse import Choice, escape
from smg.http.errors import ApiError, invalid, unsupported
from smg.http.job import Job, candidates, decoding, sampled_candidate
from smg.http.render import TextLogprobs, Timings, matched_json, response_usage, usage_json
from smg.http.requests import CompletionRequest, Limits, token_lists

if TYPE_CHECKING:
    from smg.http.tokenizer import ModelTokenizer


def completion_job(request: CompletionRequest, model: ModelTokenizer, limits: Limits, backend: str) -> Job:
    """Check what spans several fields, tokenize."""
    n = request.n or 1
    if n > limits.choices:
        raise invalid("n", f"n={n}: must be 1..{limits.choices}")
    if request.best_of is not None and request.best_of < n:
        raise invalid("best_of", f"best_of={request.best_of}: must be at least n={n}")
    if request.best_of is not None and request.best_of > n:
        raise unsupported("best_of", f"best_of={request.best_of}: more than n={n} is not supported")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "stream_options is only allowed with stream: true")
    if request.echo and request.logprobs is not None:
        raise unsupported("logprobs", "logprobs with echo is not supported: the engine sends none of the prompt")
    prompts, texts = read_prompts(request.prompt, model, "prompt")
    if len(prompts) * n > limits.sequences:
        raise invalid("n", f"{len(prompts)} prompts x n={n}: at most {limits.sequences} in one request")
    echo = None
    if request.echo:
        echo = texts or [model.decode(ids, skip_special_tokens=False) for ids in prompts]
    options = request.stream_options
    return Job(
        prompts=prompts,
        decodings=[
            decoding(
                request,
                model,
                limits,
                backend,
                # OpenAI's default here, unlike in chat.
                max_tokens=16 if request.max_tokens is None else request.max_tokens,
                min_tokens=request.min_tokens,
                logprobs=candidates(request.logprobs, backend),
            )
        ],
        n=n,
        model=request.model or "",
        rid=request.rid,
        priority=request.priority or 0,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        logprobs=request.logprobs is not None,
        sampled_candidate=sampled_candidate(request.logprobs, backend),
        continues_prompt=True,
        echo=None if echo is None else [text.encode("utf-8", "surrogatepass") for text in echo],
        suffix=(request.suffix or "").encode("utf-8", "surrogatepass"),
    )


def read_prompts(
    prompt: str | list[Any], model: ModelTokenizer, field: str
) -> tuple[list[Sequence[int]], list[str] | None]:
    """A prompt or several, as text or ids, as lists of ids; the texts where they were given as text."""
    if isinstance(prompt, str):
        texts = [prompt]
    elif prompt and isinstance(prompt[0], str):
        texts = prompt
        if not all(isinstance(text, str) for text in texts):
            raise invalid(field, f"{field}: text and token ids do not mix")
    else:
        return [*token_lists(prompt, field, model.vocab_size)], None
    lists = [model.encode(text, add_special_tokens=True) for text in texts]
    if not all(lists):
        raise invalid(field, f"{field}: must not be empty")
    return lists, texts


class CompletionShape:
    """Renders one text completion."""

    def __init__(self, job: Job, id: str, created: int, model: ModelTokenizer, timings: Timings | None) -> None:
        self._job, self._model, self._timings = job, model, timings
        self._head = b'{"id":"%b","object":"text_completion","created":%d,"model":"%b","choices":[' % (
            escape(id),
            created,
            escape(job.model),
        )
        self._tail = b'],"usage":null}' if job.include_usage else b"]}"
        self._constant = not job.logprobs and not job.continuous_usage
        self._logprobs: dict[int, TextLogprobs] = {}

    def around_text(self, index: int) -> tuple[bytes | None, bytes | None]:
        if not self._constant:
            return None, None
        before = b'data: %b{"index":%d,"text":"' % (self._head, index)
        return before, b'","logprobs":null,"finish_reason":null}' + self._tail + b"\n\n"

    def first(self, choice: Choice) -> bytes | None:
        if self._job.echo is None:
            return None
        return self._event(choice, self._job.echo[choice.index // self._job.n])

    def part(self, choice: Choice, text: bytes, entries: list[Any] | None) -> bytes:
        logprobs = self._logprobs_json(choice, entries) if entries else b"null"
        return self._event(choice, text, logprobs)

    def last(self, choice: Choice) -> bytes:
        reason = b'"%b"%b' % ((choice.finish_reason or "").encode(), matched_json(choice))
        return self._event(choice, self._job.suffix, b"null", reason)

    def _event(self, choice: Choice, text: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        tail = self._tail
        if self._job.continuous_usage:
            tail = b'],"usage":' + usage_json(choice.prompt_tokens, choice.completion_tokens) + b"}"
        return b'%b{"index":%d,"text":"%b","logprobs":%b,"finish_reason":%b}%b' % (
            self._head,
            choice.index,
            escape(text),
            logprobs,
            reason,
            tail,
        )

    def _logprobs_json(self, choice: Choice, entries: list[Any]) -> bytes:
        writer = self._logprobs.get(choice.index)
        if writer is None:
            writer = self._logprobs[choice.index] = TextLogprobs(self._model.table, self._job.sampled_candidate)
        return writer.json(entries)

    def closing(self, choices: Sequence[Choice]) -> bytes | None:
        if not self._job.include_usage:
            return None
        return self._head + b'],"usage":' + response_usage(self._job, choices, self._timings) + b"}"

    def error(self, error: ApiError) -> bytes:
        return error.body()

    def body(self, choices: Sequence[Choice]) -> bytes:
        job = self._job
        made = []
        for choice in choices:
            echo = b"" if job.echo is None else job.echo[choice.index // job.n]
            entries = choice.logprobs
            made.append(
                b'{"index":%d,"text":"%b","logprobs":%b,"finish_reason":"%b"%b}'
                % (
                    choice.index,
                    escape(echo + choice.whole_text + job.suffix),
                    b"null" if entries is None else self._logprobs_json(choice, entries),
                    (choice.finish_reason or "").encode(),
                    matched_json(choice),
                )
            )
        usage = response_usage(job, choices, self._timings)
        return self._head + b",".join(made) + b'],"usage":' + usage + b"}"
