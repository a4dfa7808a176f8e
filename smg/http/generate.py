"""`/generate`: SGLang's native shape. Every event of a stream has the whole text, as its clients expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smg._sse import Choice, escape
from smg.http.completions import read_prompts
from smg.http.errors import ApiError, invalid
from smg.http.job import Job, candidates, decoding, sampled_candidate
from smg.http.render import Timings, encode, finite, likeliest
from smg.http.requests import GenerateRequest, Limits, NativeSampling, refuse, refused_fields

if TYPE_CHECKING:
    from smg.http.tokenizer import ModelTokenizer


def generate_job(request: GenerateRequest, model: ModelTokenizer, limits: Limits, backend: str) -> Job:
    """Check what spans several fields, tokenize."""
    if (request.text is None) == (request.input_ids is None):
        raise invalid("text", "text or input_ids: exactly one of them is needed")
    if request.text is not None:
        prompts, _ = read_prompts(request.text, model, "text")
        several = not isinstance(request.text, str)
    else:
        prompts, _ = read_prompts(request.input_ids or [], model, "input_ids")
        several = isinstance((request.input_ids or [None])[0], list)
    wanted = request.sampling_params or NativeSampling()
    if not isinstance(wanted, list):
        wanted = [wanted]
    elif len(wanted) != len(prompts):
        raise invalid("sampling_params", f"sampling_params: {len(wanted)} objects for {len(prompts)} prompts")
    n = wanted[0].n or 1
    for sampling in wanted:
        refuse(sampling, refused_fields(NativeSampling, backend))
        if (sampling.n or 1) != n:
            raise invalid("sampling_params", "sampling_params: n must be the same for all prompts")
    if request.logprob_start_len not in (None, -1):
        raise invalid("logprob_start_len", "logprob_start_len: only -1; the engine sends none of the prompt")
    if n > limits.choices or len(prompts) * n > limits.sequences:
        raise invalid("n", f"n={n}: at most {limits.choices}, and {limits.sequences} sequences in one request")
    rid = request.rid
    if isinstance(rid, list):
        if len(rid) != len(prompts):
            raise invalid("rid", f"rid: {len(rid)} ids for {len(prompts)} prompts")
        rid = rid[0]
    logprobs = candidates(request.top_logprobs_num or 0, backend) if request.return_logprob else None
    return Job(
        prompts=prompts,
        decodings=[
            decoding(
                sampling,
                model,
                limits,
                backend,
                max_tokens=128 if sampling.max_new_tokens is None else sampling.max_new_tokens,
                min_tokens=sampling.min_new_tokens,
                logprobs=logprobs,
            )
            for sampling in wanted
        ],
        n=n,
        model=request.model or "",
        rid=rid,
        priority=request.priority or 0,
        stream=bool(request.stream),
        logprobs=bool(request.return_logprob),
        sampled_candidate=sampled_candidate(request.top_logprobs_num, backend),
        continues_prompt=True,
        native=True,
        listed=several or n > 1,
        rids=request.rid if isinstance(request.rid, list) else None,
        logprob_texts=bool(request.return_text_in_logprobs),
    )


class GenerateShape:
    """Renders one native answer."""

    def __init__(self, job: Job, id: str, created: int, model: ModelTokenizer, timings: Timings | None) -> None:
        self._job, self._id, self._model, self._timings = job, id, model, timings

    def around_text(self, index: int) -> tuple[bytes | None, bytes | None]:
        return None, None

    def first(self, choice: Choice) -> None:
        return None

    def part(self, choice: Choice, text: bytes, entries: list[Any] | None) -> bytes:
        return self._one(choice)

    def last(self, choice: Choice) -> bytes:
        return self._one(choice)

    def closing(self, choices: Sequence[Choice]) -> None:
        return None

    def error(self, error: ApiError) -> bytes:
        return error.body()

    def body(self, choices: Sequence[Choice]) -> bytes:
        made = [self._one(choice) for choice in choices]
        return b"[" + b",".join(made) + b"]" if self._job.listed else made[0]

    def _one(self, choice: Choice) -> bytes:
        index = b',"index":%d' % choice.index if self._job.listed and self._job.stream else b""
        return b'{"text":"%b","output_ids":%b,"meta_info":%b%b}' % (
            escape(choice.whole_text),
            encode(choice.token_ids),
            encode(self._meta(choice)),
            index,
        )

    def _meta(self, choice: Choice) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._sequence_id(choice.index),
            "finish_reason": self._finish(choice),
            "prompt_tokens": choice.prompt_tokens,
            "completion_tokens": choice.completion_tokens,
            "cached_tokens": choice.cached_tokens,
        }
        if choice.finish_reason is not None:
            meta["e2e_latency"] = round(choice.seconds, 6)
            if self._timings is not None:
                meta["timings"] = self._timings.milliseconds([choice])
        if choice.logprobs is not None:
            meta["output_token_logprobs"] = [
                [finite(logprob), token, self._text(token)] for token, logprob, _ in choice.logprobs
            ]
            if self._job.decodings[0].params.logprobs or self._job.sampled_candidate:
                tops = (likeliest(entry, self._job.sampled_candidate) for entry in choice.logprobs)
                meta["output_top_logprobs"] = [
                    [[finite(value), token, self._text(token)] for token, value in top] for top in tops
                ]
        return meta

    def _sequence_id(self, index: int) -> str:
        prompt, i = divmod(index, self._job.n)
        name = self._job.rids[prompt] if self._job.rids is not None else self._id
        if not self._job.listed or (self._job.rids is not None and self._job.n == 1):
            return name
        return f"{name}-{i if self._job.rids is not None else index}"

    def _finish(self, choice: Choice) -> dict[str, Any] | None:
        if choice.finish_reason is None:
            return None
        if choice.finish_reason == "length":
            return {"type": "length", "length": choice.completion_tokens}
        if choice.finish_reason == "stop":
            return {"type": "stop", "matched": self._matched(choice)}
        return {"type": choice.finish_reason, "message": "the engine aborted the request"}

    def _matched(self, choice: Choice) -> str | int | None:
        if choice.matched is not None or not choice.token_ids:
            return choice.matched
        last = choice.token_ids[-1]
        return last if last in self._model.end_ids else None

    def _text(self, token: int) -> str | None:
        if not self._job.logprob_texts:
            return None
        return self._model.table.bytes_of(token).decode("utf-8", "replace")
