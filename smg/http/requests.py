"""The bodies of requests: their fields, the values those may have, and the sampling parameters they ask for.

Types and ranges are checked while the JSON is decoded; rules between fields after it. Everything that is
refused raises `ApiError` or `msgspec.ValidationError` with the field's name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from smg._sse import json_depth
from smg.http.errors import ApiError, invalid, unsupported
from smg.sampling import SamplingParams

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may ask for."""

    body_bytes: int = 64 << 20
    json_depth: int = 64
    stop_strings: int = 4
    stop_bytes: int = 4096  # all stop strings of a request together
    choices: int = 128  # `n`; chat allows 10 at most
    sequences: int = 1024  # prompts x n
    output_tokens: int = 2**31 - 1  # max_tokens and its likes


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Struct, kw_only=True):
    schema: Raw = msgspec.field(default_factory=Raw)
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    type: str
    json_schema: JsonSchema | None = None
    structures: Any = None
    triggers: Any = None
    format: Any = None


class Sampling(Struct, kw_only=True):
    """What every way of asking shares."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    seed: int | None = None
    sampling_seed: int | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    logit_bias: dict[int, Bias] | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None
    structural_tag: str | None = None
    # Asked for by some clients, and nothing here can do it.
    custom_params: Any = None
    thinking_budget: Any = None
    bad_words: list[str] | None = None
    logits_processors: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None


class OpenAIFields(Sampling, kw_only=True):
    """What `/v1/chat/completions` and `/v1/completions` share."""

    model: str | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    rid: Name | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    user: str | None = None
    lora_path: Any = None
    lora_request: Any = None
    return_hidden_states: Any = None
    prompt_logprobs: Any = None
    session_params: Any = None
    allowed_token_ids: list[TokenId] | None = None
    length_penalty: Any = None
    use_beam_search: Any = None


class ChatRequest(OpenAIFields, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    documents: list[Any] | None = None
    # Accepted for the sake of clients: they change nothing where no parser or store is configured.
    parallel_tool_calls: Any = None
    separate_reasoning: Any = None
    stream_reasoning: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None


class CompletionRequest(OpenAIFields, kw_only=True):
    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None


class NativeSampling(Sampling, kw_only=True):
    """`sampling_params` of `/generate`."""

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    stop_regex: Any = None


class GenerateRequest(Struct, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    stream: bool | None = None
    rid: Name | list[Name] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: Annotated[int, Meta(ge=0, le=20)] | None = None
    return_text_in_logprobs: bool | None = None
    model: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    token_ids_logprob: Any = None
    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    return_hidden_states: Any = None
    custom_logit_processor: Any = None
    log_metrics: Any = None


class TokenizeRequest(Struct, kw_only=True):
    prompt: str | list[str]
    model: str | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Struct, kw_only=True):
    tokens: list[Any]
    model: str | None = None
    skip_special_tokens: bool = True


#: field -> why it is refused, unless its value is null, false, empty or in `HARMLESS`
REFUSED = {
    "custom_params": "is not supported",
    "thinking_budget": "is not supported",
    "bad_words": "is not supported; use logit_bias where the engine has it",
    "logits_processors": "is not supported",
    "custom_logit_processor": "is not supported",
    "guided_json": "is not supported; use response_format",
    "guided_regex": "is not supported; use regex",
    "guided_choice": "is not supported; use regex",
    "guided_grammar": "is not supported; use ebnf",
    "structured_outputs": "is not supported; use response_format, regex or ebnf",
    "stop_regex": "is not supported; stop strings are",
    "lora_path": "is not supported: the engines' wire has no adapter field here",
    "lora_request": "is not supported: the engines' wire has no adapter field here",
    "session_params": "is not supported",
    "return_hidden_states": "is not supported: hidden states do not come over the wire",
    "prompt_logprobs": "is not supported: the engine sends none",
    "token_ids_logprob": "is not supported: the engine sends none",
    "allowed_token_ids": "is not supported",
    "length_penalty": "belongs to beam search, which is not supported",
    "use_beam_search": "is not supported",
    "input_embeds": "is not supported: prompts are token ids",
    "image_data": "is not supported: multimodal inputs do not go over this wire",
    "audio_data": "is not supported: multimodal inputs do not go over this wire",
    "video_data": "is not supported: multimodal inputs do not go over this wire",
    "chat_template": "is set by the server's --chat-template, not by requests",
    "modalities": 'can only be ["text"]',
    "audio": "is not supported: only text comes out",
    "prediction": "is not supported",
    "web_search_options": "is not supported",
}
#: backend -> those of them that its engine can honour
HONOURED = {"vllm": frozenset({"bad_words", "allowed_token_ids"})}
HARMLESS: dict[str, tuple[Any, ...]] = {"modalities": (["text"],), "length_penalty": (1, 1.0)}

Body = TypeVar("Body", bound=Struct)


class Decoder:
    """Turns bodies into one kind of request, and counts the fields nobody knows."""

    def __init__(self, kind: type[Any], limits: Limits, unknown: Counter[str], backend: str) -> None:
        self._decode = msgspec.json.Decoder(kind).decode
        self._keys = msgspec.json.Decoder(dict[str, Raw]).decode
        self._known = frozenset(kind.__struct_fields__)
        self._refused = frozenset(refused_fields(kind, backend))
        self._depth = limits.json_depth
        self._unknown = unknown

    def __call__(self, body: bytes) -> Any:
        if json_depth(body) > self._depth:
            raise ApiError(400, "json_too_deep", f"the body nests deeper than {self._depth} levels")
        request = self._decode(body)
        keys = self._keys(body)
        if not self._known.issuperset(keys):
            for name in keys.keys() - self._known:
                # Bounded, since the names are the clients' own.
                self._unknown[name if name in self._unknown or len(self._unknown) < 100 else "other"] += 1
        if not self._refused.isdisjoint(keys):
            refuse(request, self._refused.intersection(keys))
        return request


def refuse(request: Struct, names: Iterable[str]) -> None:
    """Raise for one of `names` that asks for something."""
    for name in names:
        value = getattr(request, name)
        if value and value not in HARMLESS.get(name, ()):
            raise unsupported(name, f"{name} {REFUSED[name]}")


def refused_fields(kind: type[Any], backend: str) -> list[str]:
    """Those of a request's fields that ask for what neither the front nor the backend's engine can do."""
    honoured = HONOURED.get(backend, frozenset())
    return [name for name in kind.__struct_fields__ if name in REFUSED and name not in honoured]


def stop_strings(request: Sampling, limits: Limits) -> list[str]:
    stop = request.stop
    if stop is None:
        return []
    found = [stop] if isinstance(stop, str) else stop
    if len(found) > limits.stop_strings:
        raise invalid("stop", f"stop: {len(found)} strings; at most {limits.stop_strings} are allowed")
    if not all(found):
        raise invalid("stop", "stop: an empty string is not allowed")
    if sum(map(len, found)) > limits.stop_bytes:
        raise invalid("stop", f"stop: more than {limits.stop_bytes} characters together")
    return found


def constraint(request: Sampling) -> dict[str, Any]:
    """The one constraint on the output's grammar, as `SamplingParams` fields."""
    found: dict[str, Any] = {}
    fields = [name for name in ("regex", "ebnf", "json_schema", "structural_tag") if getattr(request, name)]
    for name in fields:
        found[name] = getattr(request, name)
    wanted = request.response_format if isinstance(request, OpenAIFields) else None
    if wanted is not None and wanted.type != "text":
        name, value = _from_response_format(wanted)
        found[name] = value
        fields.insert(0, "response_format")
    if len(fields) > 1:
        raise invalid(fields[0], f"Multiple constraints are not allowed: {', '.join(fields)}")
    return found


def _from_response_format(wanted: ResponseFormat) -> tuple[str, str]:
    if wanted.type == "json_object":
        return "json_schema", '{"type":"object"}'
    if wanted.type == "json_schema":
        schema = bytes(wanted.json_schema.schema) if wanted.json_schema is not None else b""
        if schema in (b"", b"null"):
            raise invalid("response_format.json_schema", "response_format.json_schema.schema is missing")
        return "json_schema", schema.decode()
    if wanted.type == "structural_tag":
        given = {name: getattr(wanted, name) for name in ("structures", "triggers", "format")}
        tag = {"type": "structural_tag"} | {name: value for name, value in given.items() if value is not None}
        return "structural_tag", msgspec.json.encode(tag).decode()
    raise invalid(
        "response_format.type",
        f"response_format.type='{wanted.type[:40]}': text, json_object, json_schema or structural_tag",
    )


def sampling_params(
    request: Sampling,
    *,
    max_tokens: int | None,
    min_tokens: int | None,
    logprobs: int | None,
    stop_token_ids: list[int],
    limits: Limits,
    extra: dict[str, dict[str, Any]],
) -> SamplingParams:
    """What the engine is asked for; `stop_token_ids` are the request's own and those of stop strings."""
    if request.top_k == 0:
        raise invalid("top_k", "top_k=0: must be -1 (all) or at least 1")
    if max_tokens is not None and max_tokens > limits.output_tokens:
        raise invalid("max_tokens", f"max_tokens={max_tokens}: at most {limits.output_tokens} are allowed")
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        raise invalid("min_tokens", f"min_tokens={min_tokens}: must not be more than max_tokens={max_tokens}")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
        seed=request.seed if request.sampling_seed is None else request.sampling_seed,
        stop_token_ids=stop_token_ids or None,
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        logit_bias=request.logit_bias or None,
        extra=extra,
        **constraint(request),
    )


def token_lists(values: list[Any], field: str, vocab_size: int) -> list[list[int]]:
    """Token ids, one list or several, as several. Raises when one is empty or not in the vocabulary."""
    if not values:
        raise invalid(field, f"{field}: must not be empty")
    lists = msgspec.convert(values, list[list[int]]) if isinstance(values[0], list) else [values]
    for ids in lists:
        try:
            ids = msgspec.convert(ids, list[int])
        except msgspec.ValidationError as exc:
            raise invalid(field, f"{field}: {exc}") from None
        if not ids:
            raise invalid(field, f"{field}: must not be empty")
        if min(ids) < 0 or max(ids) >= vocab_size:
            worst = min(ids) if min(ids) < 0 else max(ids)
            raise invalid(field, f"{field}: token id {worst} is outside the vocabulary (0..{vocab_size - 1})")
    return lists
