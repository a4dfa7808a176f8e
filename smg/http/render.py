"""JSON of answers that is common to the OpenAI-style endpoints: ids, usage, logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from smg._sse import Choice

if TYPE_CHECKING:
    from smg._text import TokenTable
    from smg.http.job import Job

encode = msgspec.json.Encoder().encode

_random = Random()  # its own: a host that seeds Python's shared one gets no id twice
LOWEST_LOGPROB = -9999.0  # JSON has no infinity; what OpenAI sends for one


def new_id(prefix: str) -> str:
    """`prefix` and 24 random hex digits."""
    return f"{prefix}{_random.getrandbits(96):024x}"


def usage_counts(choices: Sequence[Choice], n: int) -> tuple[int, int, int]:
    """Prompt, completion and cached tokens of a response. A prompt counts once, whatever `n` is."""
    prompt = completion = cached = longest = most_cached = 0
    for i, choice in enumerate(choices):
        if i % n == 0:  # the next prompt's first
            prompt, cached, longest, most_cached = prompt + longest, cached + most_cached, 0, 0
        longest = max(longest, choice.prompt_tokens)
        most_cached = max(most_cached, choice.cached_tokens)
        completion += choice.completion_tokens
    return prompt + longest, completion, cached + most_cached


def usage_json(prompt: int, completion: int, cached: int = 0, extra: bytes = b"") -> bytes:
    details = b',"prompt_tokens_details":{"cached_tokens":%d}' % cached if cached else b""
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d%b%b}' % (
        prompt,
        completion,
        prompt + completion,
        details,
        extra,
    )


def response_usage(job: Job, choices: Sequence[Choice], timings: Timings | None) -> bytes:
    extra = timings.json(choices) if timings is not None else b""
    return usage_json(*usage_counts(choices, job.n), extra)


class Timings:
    """How long a request took, for `usage`: `queued` in admission, until the first token, in all."""

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived  # monotonic seconds

    def milliseconds(self, choices: Sequence[Choice]) -> dict[str, float]:
        sent = min(choice.submitted for choice in choices)
        first = min(choice.first or choice.submitted for choice in choices)
        end = max(choice.submitted + choice.seconds for choice in choices)
        return {
            "queued_ms": round((sent - self.arrived) * 1e3, 3),
            "first_token_ms": round((first - self.arrived) * 1e3, 3),
            "total_ms": round((end - self.arrived) * 1e3, 3),
        }

    def json(self, choices: Sequence[Choice]) -> bytes:
        return b',"timings":' + encode(self.milliseconds(choices))


def matched_json(choice: Choice) -> bytes:
    return b"" if choice.matched is None else b',"matched_stop":' + encode(choice.matched)


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def likeliest(entry: Any, sampled: bool) -> list[tuple[int, float]]:
    """The likeliest tokens of a (token_id, logprob, top) triple: the sampled one, where the engine names no others."""
    return [entry[:2]] if sampled else entry[2]


def chat_logprobs(table: TokenTable, entries: Iterable[Any], sampled: bool) -> bytes:
    """`logprobs` of a chat choice from (token_id, logprob, top) triples; `sampled` as for `likeliest`."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = table.bytes_of(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}

    content = []
    for entry in entries:
        content.append(one(*entry[:2]) | {"top_logprobs": [one(*pair) for pair in likeliest(entry, sampled)]})
    return encode({"content": content})


class TextLogprobs:
    """`logprobs` of a text completion's choice, whose `text_offset`s go on from part to part."""

    def __init__(self, table: TokenTable, sampled: bool) -> None:
        self._table, self._sampled, self._offset = table, sampled, 0

    def json(self, entries: Iterable[Any]) -> bytes:
        tokens, logprobs, tops, offsets = [], [], [], []
        for entry in entries:
            token, logprob, _ = entry
            text = self._text(token)
            tokens.append(text)
            logprobs.append(finite(logprob))
            tops.append({self._text(other): finite(value) for other, value in likeliest(entry, self._sampled)})
            offsets.append(self._offset)
            self._offset += len(text)
        return encode({"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets})

    def _text(self, token: int) -> str:
        return self._table.bytes_of(token).decode("utf-8", "replace")
