"""What a vLLM engine decodes a request into, and what it checks: msgspec structs typed as its own are.

`read(payload, version)` decodes as the engine's input thread does; what raises there leaves the engine deaf.
`admit` checks what its preprocessing and its workers take for granted; what raises there ends the engine, or the
request at best. Both raise `Refused`. Vocabulary and context are those of the model that the engine serves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

VERSIONS = ("0.20.2", "0.23.0", "0.26.0", "0.28.0", "0.32.0")  # one of each layout


class Refused(Exception):
    """The engine does not survive this request, or does not hear another."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


@dataclass
class StructuredOutputs:
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    _backend: str | None = None
    _backend_was_auto: bool = False

    def constraints(self) -> list[Any]:
        every = [self.json, self.regex, self.choice, self.grammar, self.json_object, self.structural_tag]
        return [constraint for constraint in every if constraint is not None]

    def __post_init__(self) -> None:
        require(len(self.constraints()) == 1, "not one constraint")


@dataclass
class RepetitionDetection:
    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.min_pattern_size <= self.max_pattern_size, "pattern sizes")
        require(not self.max_pattern_size or self.min_count >= 2, "min_count")


class Sampling(msgspec.Struct, omit_defaults=True):
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    output_kind: int = 0
    eos_token_id: int | None = msgspec.field(name="_eos_token_id", default=None)
    all_stop_token_ids: set[int] = msgspec.field(name="_all_stop_token_ids", default_factory=set)
    structured_outputs: StructuredOutputs | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = msgspec.field(name="_bad_words_token_ids", default=None)
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetection | None = None

    def __post_init__(self) -> None:
        require(self.n == 1, "n")
        require(-2 <= self.presence_penalty <= 2, "presence_penalty")
        require(-2 <= self.frequency_penalty <= 2, "frequency_penalty")
        require(math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0, "repetition_penalty")
        require(math.isfinite(self.temperature) and 0 <= self.temperature <= 2, "temperature")
        require(0 < self.top_p <= 1, "top_p")
        require(self.top_k >= -1, "top_k")
        require(0 <= self.min_p <= 1, "min_p")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens")
        require(self.min_tokens >= 0, "min_tokens")
        require(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens")
        require(self.logprobs is None or self.logprobs >= -1, "logprobs")
        require(self.prompt_logprobs is None or self.prompt_logprobs >= -1, "prompt_logprobs")
        require(self.thinking_token_budget is None or self.thinking_token_budget >= -1, "thinking_token_budget")
        require(not self.stop or self.detokenize, "stop")
        self.all_stop_token_ids |= set(self.stop_token_ids or ())


class Lora(msgspec.Struct, array_like=True):
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        require(self.lora_int_id >= 1 and bool(self.lora_path), "lora_request")


# Element, type, default (... = needed), the version that brought it
ELEMENTS: list[tuple[str, Any, Any, tuple[int, int]]] = [
    ("request_id", str, ..., (0, 0)),
    ("prompt_token_ids", list[int] | None, ..., (0, 0)),
    ("mm_features", list[Any] | None, ..., (0, 0)),
    ("sampling_params", Sampling | None, ..., (0, 0)),
    ("pooling_params", list[Any] | None, ..., (0, 0)),
    ("arrival_time", float, ..., (0, 0)),
    ("lora_request", Lora | None, ..., (0, 0)),
    ("cache_salt", str | None, ..., (0, 0)),
    ("data_parallel_rank", int | None, ..., (0, 0)),
    ("prompt_embeds", list[Any] | None, None, (0, 0)),
    ("prompt_is_token_ids", list[bool] | None, None, (0, 21)),
    ("client_index", int, 0, (0, 0)),
    ("current_wave", int, 0, (0, 0)),
    ("priority", int, 0, (0, 0)),
    ("trace_headers", dict[str, str] | None, None, (0, 0)),
    ("resumable", bool, False, (0, 0)),
    ("external_req_id", str | None, None, (0, 0)),
    ("reasoning_ended", bool | None, None, (0, 0)),
    ("reasoning_parser_kwargs", dict[str, Any] | None, None, (0, 21)),
    ("abort_immediately", bool, False, (0, 21)),
    ("session_id", str | None, None, (0, 28)),
    ("kv_hints", dict[str, Any] | None, None, (0, 31)),
]


@cache
def decoder(version: str) -> msgspec.msgpack.Decoder[Any]:
    major, minor, *_ = map(int, version.split("."))
    fields = [
        (name, kind) if default is ... else (name, kind, default)
        for name, kind, default, since in ELEMENTS
        if since <= (major, minor)
    ]
    request = msgspec.defstruct("EngineCoreRequest", fields, array_like=True, omit_defaults=True)
    return msgspec.msgpack.Decoder(request, ext_hook=_extension)


def _extension(code: int, data: memoryview) -> Any:
    if code == 3:
        return bytes(data)
    raise NotImplementedError(f"extension {code}")


def read(payload: bytes, version: str) -> Any:
    """The request as this version's input thread has it."""
    try:
        return decoder(version).decode(payload)
    except Exception as error:
        raise Refused(f"{version}: {type(error).__name__}: {error}") from error


INT32 = 2**31 - 1


def admit(request: Any, vocab_size: int, context_length: int, max_logprobs: int) -> None:
    """Raise `Refused` for what ends the engine, or the request, after it was decoded."""
    try:
        _admit(request, vocab_size, context_length, max_logprobs)
    except ValueError as error:
        raise Refused(str(error)) from error


def _admit(request: Any, vocab_size: int, context_length: int, max_logprobs: int) -> None:
    sampling = request.sampling_params
    ids = [*request.prompt_token_ids, *(sampling.stop_token_ids or ()), *sampling.all_stop_token_ids]
    ids += [*(sampling.allowed_token_ids or ()), *(sampling.logit_bias or ()), *(sampling.logprob_token_ids or ())]
    ids += [token for word in sampling.bad_words_token_ids or () for token in word]
    require(all(0 <= token < vocab_size for token in ids), "ids index the logits")
    require(0 < len(request.prompt_token_ids) < context_length, "the prompt leaves room")
    require(request.client_index == 0, "there is one client")
    require(sampling.max_tokens is not None, "max_tokens is the frontend's to fill in")
    require(len(request.prompt_token_ids) + sampling.min_tokens <= INT32, "lengths are 32 bits wide")
    require(sampling.seed is None or abs(sampling.seed) < 2**63, "seeds are 64 bits wide")
    require(len(sampling.all_stop_token_ids) <= 128, "a table of stop ids")
    require(sampling.allowed_token_ids != [] and len(sampling.allowed_token_ids or ()) <= 1024, "of allowed ids")
    require(len(sampling.logit_bias or ()) <= 1024, "a table of biases")
    require(all(-100 <= bias <= 100 for bias in (sampling.logit_bias or {}).values()), "biases")
    require(len(sampling.bad_words_token_ids or ()) <= 128, "a table of bad words")
    require(sum(map(len, sampling.bad_words_token_ids or ())) <= 1024, "a table of their tokens")
    require(all(sampling.bad_words_token_ids or ()), "a bad word has a token")
    require(len(sampling.logprob_token_ids or ()) <= 128, "a table of tokens to score")
    scored = sampling.logprob_token_ids and sampling.logprobs is not None
    require(not scored or sampling.logprobs == len(sampling.logprob_token_ids), "both counts of logprobs")
    require((sampling.logprobs or 0) in range(max_logprobs + 1), "logprobs")
    require((sampling.prompt_logprobs or 0) in range(max_logprobs + 1), "prompt_logprobs")
    for key in ("kv_transfer_params", "ec_transfer_params"):
        require(isinstance((sampling.extra_args or {}).get(key), (dict, type(None))), key)
    constrained = sampling.structured_outputs
    if constrained is not None:
        backends = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
        require(constrained._backend in backends, "the engine has no default backend")
        require(constrained.constraints()[0] not in ("", [], False), "an empty constraint")
