"""What one HTTP request asks of the engine: prompts, sampling, and how the tokens become text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from smg._text import Detokenizer, StopStrings
from smg.http.errors import invalid
from smg.http.requests import Limits, Sampling, sampling_params, stop_strings
from smg.sampling import SamplingParams

if TYPE_CHECKING:
    from smg.http.tokenizer import ModelTokenizer

#: backends whose wire carries the sampled token's logprob only, so that one candidate is that token
SAMPLED_LOGPROB_ONLY = {"tokenspeed"}

PROMPT_TAIL = 8  # tokens that decide how a text continues its prompt
SEEDS = 2**63  # what engines take as a seed is below it


@dataclass(slots=True, kw_only=True)
class Decoding:
    """How a sequence's tokens are sampled, and how they become text."""

    params: SamplingParams
    stops: StopStrings | None = None
    stop_ids: dict[int, str | int | None] = field(default_factory=dict)
    keep_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


@dataclass(slots=True, kw_only=True)
class Job:
    """`prompts` x `n` sequences, in that order: sequence i continues prompt i // n."""

    prompts: list[Sequence[int]]
    decodings: list[Decoding]  # one for all prompts, or one for each
    n: int = 1
    model: str
    rid: str | None = None
    priority: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: bool = False
    sampled_candidate: bool = False  # the sampled token is the one candidate that was asked for
    continues_prompt: bool = False  # the text goes on where the prompt's ends
    # Per prompt, text around the answer.
    echo: list[bytes] | None = None
    suffix: bytes = b""
    # Of `/generate` only.
    native: bool = False  # every event has the whole text and all ids
    listed: bool = False  # the answer is a list, whatever it holds
    rids: list[str] | None = None  # one per prompt
    logprob_texts: bool = False

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.n

    def prompt(self, sequence: int) -> Sequence[int]:
        return self.prompts[sequence // self.n]

    def decoding(self, sequence: int) -> Decoding:
        return self.decodings[sequence // self.n if len(self.decodings) > 1 else 0]

    def sampling(self, sequence: int) -> SamplingParams:
        """Sequence i of a prompt samples with seed + i, so that they differ and can be had again."""
        params = self.decoding(sequence).params
        i = sequence % self.n
        if i == 0 or params.seed is None:
            return params
        return replace(params, seed=(params.seed + i) % SEEDS)

    def detokenizer(self, model: ModelTokenizer, sequence: int) -> Detokenizer:
        decoding = self.decoding(sequence)
        return Detokenizer(
            model.table,
            skip_special_tokens=decoding.skip_special_tokens,
            spaces_between_special_tokens=decoding.spaces_between_special_tokens,
            stop=decoding.stops,
            no_stop_trim=decoding.keep_stop,
            min_tokens=decoding.params.min_tokens or 0,
            prompt_tail_ids=self.prompt(sequence)[-PROMPT_TAIL:] if self.continues_prompt else None,
        )


def decoding(
    request: Sampling,
    model: ModelTokenizer,
    limits: Limits,
    backend: str,
    *,
    max_tokens: int | None,
    min_tokens: int | None,
    logprobs: int | None,
) -> Decoding:
    """What `request` says about it; raises for what it may not say."""
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        ids = getattr(request, name, None)
        if ids and (min(ids) < 0 or max(ids) >= model.vocab_size):
            worst = min(ids) if min(ids) < 0 else max(ids)
            raise invalid(name, f"{name}: token id {worst} is outside the vocabulary (0..{model.vocab_size - 1})")
    stop = stopping(request, model, limits)
    return Decoding(
        params=sampling_params(
            request,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            logprobs=logprobs,
            stop_token_ids=stop.engine_ids,
            limits=limits,
            extra=engine_fields(request, model, backend),
        ),
        stops=stop.stops,
        stop_ids=stop.stop_ids,
        keep_stop=bool(request.no_stop_trim or request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
    )


def engine_fields(request: Sampling, model: ModelTokenizer, backend: str) -> dict[str, dict[str, Any]]:
    """What only this backend's engine can honour, as `SamplingParams.extra`."""
    fields: dict[str, Any] = {}
    if request.bad_words:
        fields["bad_words_token_ids"] = [ids for word in request.bad_words for ids in spellings(word, model)]
    if allowed := getattr(request, "allowed_token_ids", None):
        fields["allowed_token_ids"] = allowed
    return {backend: fields} if fields else {}


def spellings(word: str, model: ModelTokenizer) -> list[Sequence[int]]:
    """A word's token ids where a text begins, and within one, after a space, where that is another first token."""
    if not word.strip():
        raise invalid("bad_words", "bad_words: a word without characters is not allowed")
    alone = model.encode(word.lstrip(), add_special_tokens=False)
    within = model.encode(" " + word.lstrip(), add_special_tokens=False)
    differs = len(within) == len(alone) and within[0] != alone[0]
    return [alone, within] if differs else [alone]


@dataclass(slots=True)
class Stopping:
    """What ends a text, from a request's `stop`, `stop_token_ids` and `ignore_eos`."""

    stops: StopStrings | None
    engine_ids: list[int]  # the engine stops at these by itself, besides its end-of-sequence tokens
    stop_ids: dict[int, str | int | None]  # the last token may be one of these: what it matched


def stopping(request: Sampling, model: ModelTokenizer, limits: Limits) -> Stopping:
    """Stop strings are found here; one that is a single token also stops the engine by itself."""
    own = request.stop_token_ids
    if request.stop in (None, []) and not own:
        return _NOTHING if request.ignore_eos else Stopping(None, [], model.end_ids)
    wanted = stop_strings(request, limits)
    ends = {} if request.ignore_eos else dict(model.end_ids)
    stops = None
    if wanted:
        stops, single = _prepared(model, tuple(wanted))
        ends.update(single)
    for token in own or ():
        ends.setdefault(token, token)
    return Stopping(stops, [token for token, matched in ends.items() if matched is not None], ends)


_NOTHING = Stopping(None, [], {})


@lru_cache(maxsize=1024)
def _prepared(model: ModelTokenizer, strings: tuple[str, ...]) -> tuple[StopStrings, dict[int, str]]:
    """The strings made ready, and those of them that are exactly one token."""
    single = {}
    for string in strings:
        ids = model.encode(string, add_special_tokens=False)
        if len(ids) == 1 and model.table.bytes_of(ids[0]) == string.encode():
            single[ids[0]] = string
    return StopStrings(strings), single


def sampled_candidate(wanted: int | None, backend: str) -> bool:
    """Whether the one likeliest token that is asked for is the sampled one, since the engine names no others."""
    return wanted == 1 and backend in SAMPLED_LOGPROB_ONLY


def candidates(wanted: int | None, backend: str) -> int | None:
    """`SamplingParams.logprobs` for a wish for this many likeliest tokens."""
    return 0 if sampled_candidate(wanted, backend) else wanted
