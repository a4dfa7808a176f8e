"""What becomes of a request in a vLLM engine: how it is read, and what of it the engine does not survive.

The engine reads an ADD with a typed decoder, whose structs check their own values, outside of any guard: what
fails there ends its input thread. What comes later is guarded only where the request is prepared; the scheduler
and the workers take values for granted, and what trips them ends the engine. The bounds here are the engine's
own, not those within which `smg.protocol.vllm` keeps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import msgpack

from smg.errors import DecodeError
from smg.mock.dialect import Deadly, Deafening
from smg.mock.fields import (
    Field,
    Kind,
    anything,
    ints,
    is_bool,
    is_float,
    is_int,
    is_list,
    is_map,
    is_str,
    str_or_strs,
    strs,
)
from smg.mock.settings import Settings
from smg.protocol.vllm import decode_request

Values = dict[str, Any]
Version = tuple[int, int]

LARGEST_N = 16384
INT32, INT64 = 2**31 - 1, 2**63 - 1
BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
RAW_BYTES = 3  # the extension that stands for an array's data


def _list_of(kind: Kind) -> Kind:
    return lambda value: type(value) is list and all(map(kind, value))


def _str_map(value: Any) -> bool:
    return is_map(value) and all(map(is_str, value.values()))


def _biases(value: Any) -> bool:
    return type(value) is dict and all(map(is_int, value)) and all(map(is_float, value.values()))


def _one_of(*values: Any) -> Kind:
    return lambda value: type(value) is type(values[0]) and value in values


# The elements of an ADD that are checked by type alone. Which of them a version has, and in which order, is
# `smg.protocol.vllm.layout`'s to say.
REQUEST = (
    Field("request_id", is_str, nil=False),
    Field("prompt_token_ids", ints),
    Field("mm_features", _list_of(is_map)),
    Field("sampling_params", is_map),
    Field("pooling_params", is_list),
    Field("arrival_time", is_float, nil=False),
    Field("lora_request", is_list),
    Field("cache_salt", is_str),
    Field("data_parallel_rank", is_int),
    Field("prompt_embeds", is_list),
    Field("prompt_is_token_ids", _list_of(is_bool)),
    Field("client_index", is_int, nil=False),
    Field("current_wave", is_int, nil=False),
    Field("priority", is_int, nil=False),
    Field("trace_headers", _str_map),
    Field("resumable", is_bool, nil=False),
    Field("external_req_id", is_str),
    Field("reasoning_ended", is_bool),
    Field("reasoning_parser_kwargs", is_map),
    Field("abort_immediately", is_bool, nil=False),
    Field("session_id", is_str),
    Field("kv_hints", is_map),
)

# SamplingParams: a map, in which other keys are skipped.
SAMPLING = (
    Field("n", is_int, 1, nil=False),
    Field("presence_penalty", is_float, 0.0, nil=False),
    Field("frequency_penalty", is_float, 0.0, nil=False),
    Field("repetition_penalty", is_float, 1.0, nil=False),
    Field("temperature", is_float, 1.0, nil=False),
    Field("watermarking", is_bool),
    Field("top_p", is_float, 1.0, nil=False),
    Field("top_k", is_int, 0, nil=False),
    Field("min_p", is_float, 0.0, nil=False),
    Field("seed", is_int),
    Field("stop", str_or_strs),
    Field("stop_token_ids", ints),
    Field("ignore_eos", is_bool, False, nil=False),
    Field("max_tokens", is_int, 16),
    Field("min_tokens", is_int, 0, nil=False),
    Field("logprobs", is_int),
    Field("prompt_logprobs", is_int),
    Field("prompt_logprob_token_ids", anything),
    Field("prompt_logprob_start", is_int),
    Field("logprob_token_ids", ints),
    Field("flat_logprobs", is_bool, False, nil=False),
    Field("detokenize", is_bool, True, nil=False),
    Field("skip_special_tokens", is_bool, True, nil=False),
    Field("spaces_between_special_tokens", is_bool, True, nil=False),
    Field("include_stop_str_in_output", is_bool, False, nil=False),
    Field("output_kind", _one_of(0, 1, 2), 0, nil=False),
    Field("stream_interval", is_int),
    Field("skip_clone", is_bool, False, nil=False),
    Field("output_text_buffer_length", is_int, 0, nil=False),
    Field("_eos_token_id", is_int),
    Field("_all_stop_token_ids", ints, [], nil=False),
    Field("_watermarking_skipped", is_bool, False, nil=False),
    Field("structured_outputs", is_map),
    Field("logit_bias", _biases),
    Field("allowed_token_ids", ints),
    Field("extra_args", is_map),
    Field("bad_words", strs),
    Field("_bad_words_token_ids", _list_of(ints)),
    Field("skip_reading_prefix_cache", is_bool),
    Field("thinking_token_budget", is_int),
    Field("repetition_detection", is_map),
    Field("routed_experts_prompt_start", is_int, 0, nil=False),
    Field("trace_decode_token_ids", ints),
)
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
STRUCTURED = (
    Field("json", lambda value: is_str(value) or is_map(value)),
    Field("regex", is_str),
    Field("choice", strs),
    Field("grammar", is_str),
    Field("json_object", is_bool),
    Field("structural_tag", is_str),
    Field("disable_any_whitespace", is_bool, False, nil=False),
    Field("disable_additional_properties", is_bool, False, nil=False),
    Field("whitespace_pattern", is_str),
    Field("_backend", is_str),
    Field("_backend_was_auto", is_bool, False, nil=False),
)
REPETITION = (
    Field("max_pattern_size", is_int, 0, nil=False),
    Field("min_pattern_size", is_int, 0, nil=False),
    Field("min_count", is_int, 0, nil=False),
)
LORA = (  # an array, of which the first two are needed
    Field("lora_name", is_str, nil=False),
    Field("lora_int_id", is_int, nil=False),
    Field("lora_path", is_str, "", nil=False),
    Field("base_model_name", is_str),
    Field("tensorizer_config_dict", is_map),  # before 0.27
    Field("load_inplace", is_bool, False, nil=False),
    Field("is_3d_lora_weight", is_bool, False, nil=False),
)

Check = Callable[[Any], bool]

# What SamplingParams checks of its own values.
CHECKS: tuple[tuple[str, Check], ...] = (
    ("n", lambda v: 1 <= v <= LARGEST_N),
    ("presence_penalty", lambda v: -2 <= v <= 2),
    ("frequency_penalty", lambda v: -2 <= v <= 2),
    ("repetition_penalty", lambda v: math.isfinite(v) and v > 0),
    ("temperature", lambda v: math.isfinite(v) and 0 <= v <= 2),
    ("top_p", lambda v: 0 < v <= 1),
    ("top_k", lambda v: v >= -1),
    ("min_p", lambda v: 0 <= v <= 1),
    ("max_tokens", lambda v: v is None or v >= 1),
    ("min_tokens", lambda v: v >= 0),
    ("stream_interval", lambda v: v is None or v >= 1),
    ("logprobs", lambda v: v is None or v >= -1),
    ("prompt_logprobs", lambda v: v is None or v >= -1),
    ("thinking_token_budget", lambda v: v is None or v >= -1),
    ("stop", lambda v: v != "" and (is_str(v) or "" not in (v or ()))),
    ("bad_words", lambda v: "" not in (v or ())),
)


def version_of(text: str) -> Version:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def read_add(payload: bytes, version: str) -> Values:
    """A request by field name, `sampling_params` and what is in it by field name too. Raises Deafening."""
    try:
        request = decode_request(payload, version)
    except DecodeError as error:
        raise Deafening(str(error)) from None
    for field in REQUEST:
        if field.name in request and (fault := field.fault(request[field.name])):
            raise Deafening(fault)
    if any(_foreign(value) for name, value in request.items() if name != "prompt_token_ids"):
        raise Deafening("an extension type that the engine does not know")
    if request["lora_request"] is not None:
        request["lora_request"] = read_lora(request["lora_request"], version)
    if request["sampling_params"] is not None:
        request["sampling_params"] = _read_sampling(request["sampling_params"])
    return request


def read_lora(array: list[Any], version: str) -> Values:
    """An adapter by field name. Raises Deafening."""
    if len(array) < 2:
        raise Deafening("lora_request is shorter than 2")
    fields = [f for f in LORA if f.name != "tensorizer_config_dict" or version_of(version) < (0, 27)]
    lora = _by_name(fields, dict(zip((field.name for field in fields), array, strict=False)), "lora_request.")
    if lora["lora_int_id"] < 1 or not lora["lora_path"]:
        raise Deafening(f"lora_request has the id {lora['lora_int_id']} and the path {lora['lora_path']!r}")
    return lora


def _read_sampling(given: Values) -> Values:
    sampling = _by_name(SAMPLING, given, "")
    for name, holds in CHECKS:
        if not holds(sampling[name]):
            raise Deafening(f"{name}={sampling[name]!r:.80} is out of range")
    limit = sampling["max_tokens"]
    if limit is not None and sampling["min_tokens"] > limit:
        raise Deafening(f"min_tokens={sampling['min_tokens']} is above max_tokens={limit}")
    if sampling["stop"] and not sampling["detokenize"]:
        raise Deafening("stop needs detokenize")
    if sampling["temperature"] < 1e-5 and sampling["n"] > 1:
        raise Deafening(f"n={sampling['n']} with temperature={sampling['temperature']}")
    if sampling["structured_outputs"] is not None:
        sampling["structured_outputs"] = found = _by_name(STRUCTURED, sampling["structured_outputs"], "")
        count = sum(found[name] is not None for name in CONSTRAINTS)
        if count != 1:
            raise Deafening(f"structured_outputs has {count} constraints")
    if sampling["repetition_detection"] is not None:
        sampling["repetition_detection"] = sizes = _by_name(REPETITION, sampling["repetition_detection"], "")
        largest, smallest = sizes["max_pattern_size"], sizes["min_pattern_size"]
        if not 0 <= smallest <= largest or (largest and sizes["min_count"] < 2):
            raise Deafening(f"repetition_detection={sizes}")
    sampling["stop_token_ids"] = sampling["stop_token_ids"] or []
    sampling["_all_stop_token_ids"] = sorted({*sampling["_all_stop_token_ids"], *sampling["stop_token_ids"]})
    return sampling


def _by_name(fields: Iterable[Field], given: Values, prefix: str) -> Values:
    values = {}
    for field in fields:
        values[field.name] = value = given.get(field.name, field.default)
        if field.name in given and (fault := field.fault(value)):
            raise Deafening(f"{prefix}{fault}")
    return values


def _foreign(value: Any) -> bool:
    """Whether an extension other than an array's data is anywhere in a value."""
    if type(value) is msgpack.ExtType:
        return bool(value.code != RAW_BYTES)
    if type(value) is dict:
        return any(map(_foreign, value.values()))
    return type(value) is list and any(map(_foreign, value))


def unpreparable(request: Values) -> str | None:
    """Why the engine answers a request with an error: what fails where failures are caught. None: it does not."""
    sampling = request["sampling_params"]
    if sampling is None:
        return None if request["pooling_params"] is not None else "there are no sampling_params"
    if sampling["max_tokens"] is None:
        return "max_tokens is nil"
    if request["prompt_token_ids"] is None and request["prompt_embeds"] is None:
        return "there is no prompt"
    structured = sampling["structured_outputs"]
    if structured is not None:
        if structured["_backend"] not in BACKENDS:
            return f"the structured output backend is {structured['_backend']!r}"
        return _uncompilable(structured)
    return None


def _uncompilable(structured: Values) -> str | None:
    """What is wrong with a constraint, as far as it can be told without a grammar compiler."""
    for name in ("json", "structural_tag"):
        text = structured[name]
        if is_str(text):
            try:
                found = json.loads(text)
            except (ValueError, RecursionError):
                found = None
            if type(found) is not dict:
                return f"{name} is no JSON object"
    for name in ("regex", "choice", "grammar", "json_object"):
        if structured[name] is not None and not structured[name]:
            return f"{name} is empty"
    return None


def check_survivable(request: Values, settings: Settings, context: int, vocab_size: int) -> None:
    """Raise Deadly for what ends an engine of that context and vocabulary."""
    for reason in _deadly(request, settings, context, vocab_size):
        raise Deadly(reason)


def _deadly(request: Values, settings: Settings, context: int, vocab_size: int) -> Iterator[str]:
    sampling, prompt = request["sampling_params"], request["prompt_token_ids"]
    if request["pooling_params"] is not None:
        yield "the model does not support pooling"
    if request["prompt_embeds"] is not None:
        yield "the engine was started without prompt embeds"
    if not prompt:
        yield "the prompt is empty"
    if len(prompt) >= context:
        yield f"the prompt has {len(prompt)} tokens, the context {context}"
    if request["lora_request"] is not None and not settings.max_loras:
        yield "the engine has no adapters"
    named: list[tuple[str, Collection[int]]] = [
        ("prompt_token_ids", prompt),
        ("_all_stop_token_ids", sampling["_all_stop_token_ids"]),
        ("allowed_token_ids", sampling["allowed_token_ids"] or ()),
        ("logit_bias", sampling["logit_bias"] or ()),
        ("logprob_token_ids", sampling["logprob_token_ids"] or ()),
        *(("_bad_words_token_ids", word) for word in sampling["_bad_words_token_ids"] or ()),
    ]
    for name, tokens in named:
        # Ids index arrays of the vocabulary's size.
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
            yield f"{name} has an id outside of the vocabulary of {vocab_size}"
    if sampling["allowed_token_ids"] == []:
        yield "allowed_token_ids is empty"
    if not all(sampling["_bad_words_token_ids"] or ()):
        yield "_bad_words_token_ids has an empty word"
    for name, longest in LONGEST.items():
        if len(sampling[name] or ()) > longest:
            yield f"{name} has {len(sampling[name])} entries, its table {longest}"
    if sum(map(len, sampling["_bad_words_token_ids"] or ())) > LONGEST_BAD_WORDS_TOKENS:
        yield "_bad_words_token_ids has more tokens than its table"
    for name in ("logprobs", "prompt_logprobs"):
        if (sampling[name] or 0) > vocab_size:
            yield f"{name}={sampling[name]} is more than the vocabulary"
    if abs(sampling["seed"] or 0) > INT64:
        yield f"seed={sampling['seed']} does not fit in 64 bits"
    if len(prompt) + sampling["min_tokens"] > INT32:
        yield f"min_tokens={sampling['min_tokens']} does not fit in 32 bits"


# The workers' tables.
LONGEST = {
    "_all_stop_token_ids": 128,
    "allowed_token_ids": 1024,
    "logit_bias": 1024,
    "logprob_token_ids": 128,
    "_bad_words_token_ids": 128,
}
LONGEST_BAD_WORDS_TOKENS = 1024
