"""The engine-neutral sampling parameters. Each protocol module says what its engine can take of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one completion. `None` leaves a value to the engine's own default.

    Values are checked when a request is submitted, by the protocol of the group's engine, which raises
    `InvalidRequest` with the field's name. Stop strings are not here: they need a tokenizer and live in `smg.http`.
    """

    max_tokens: int | None = None  # tokens to generate; None = context length - prompt length
    min_tokens: int | None = None  # no end of sequence before this many tokens
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # -1 = all
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None  # None = off, 0 = the sampled token's, k = that and the k likeliest
    logit_bias: dict[int, float] | None = None  # token id -> bias
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)  # backend name -> its own fields
