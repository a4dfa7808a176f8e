"""vLLM's `SamplingParams` as they go on the wire: a map that leaves out what has its default.

The engine checks values while it decodes them, outside of any guard: one that it dislikes leaves it deaf for
good. Others get past that and end a worker, and the engine with it. So every value is checked here, by name,
before anything is sent. The bounds are those of 0.23 to 0.32, the narrowest of them and of both model runners.

What vLLM's own frontend derives from the model, the router has to: see `Model`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from smg.errors import InvalidRequest
from smg.protocol.rules import (
    I31,
    I63,
    Check,
    biases,
    carries,
    flag,
    integer,
    is_unicode,
    number,
    passed_through,
    text,
    tokens,
)
from smg.sampling import SamplingParams

EXTRA = "vllm"  # the key in SamplingParams.extra

LONGEST_STOP_IDS = 128  # with the EOS ids; a worker's table of those that min_tokens holds back
LONGEST_ALLOWED_IDS = 1024  # a worker's table
LONGEST_BIAS = 1024  # a worker's table
LARGEST_BIAS = 100.0
LONGEST_LOGPROB_IDS = 128  # a worker's table
LONGEST_BAD_WORDS = 128  # token sequences; VLLM_MAX_NUM_BAD_WORDS
LONGEST_BAD_WORDS_TOKENS = 1024  # over all of them; VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
LONGEST_MIN_TOKENS = 2**30  # with the prompt it has to fit in 32 bits
SMALLEST_FACTOR, LARGEST_FACTOR = 2.0**-126, 3.4e38  # what a float32 can hold, and divide by
DEEPEST_SCHEMA = 64  # levels of a JSON schema
DEEPEST_TAG = DEEPEST_SCHEMA + 16  # levels of a structural tag, which has schemas in it

BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What the engine leaves to its frontend to know about the model and about how it was started.

    `eos_token_ids`: the first ends a completion and is not named as the stop reason; the others are stop tokens.
    Without any, nothing but the request's own limits ends a completion. `vocab_size`: as in the model's
    config.json; None = unknown, and then ids outside of it get through, which may end the engine.
    `max_logprobs`: the engine's --max-logprobs. `structured_backend`: what compiles grammars; the first
    constrained request settles it for the life of an engine. `lora`: whether requests may name adapters; an
    engine without them, or one that cannot load the adapter, dies of it.
    """

    eos_token_ids: Sequence[int] = ()
    vocab_size: int | None = None
    max_logprobs: int = 20
    structured_backend: str = "xgrammar"
    lora: bool = False

    def __post_init__(self) -> None:
        if self.vocab_size is not None and not 0 < self.vocab_size <= 2**31:
            raise ValueError(f"vocab_size={self.vocab_size}: must be in 1..2**31, or None")
        for token in self.eos_token_ids:
            if type(token) is not int or not 0 <= token < self.ids_below:
                raise ValueError(f"eos_token_ids has {token!r}: must be ids in 0..{self.ids_below - 1}")
        if len(self.eos_token_ids) > LONGEST_STOP_IDS:
            raise ValueError(f"eos_token_ids has {len(self.eos_token_ids)} ids: at most {LONGEST_STOP_IDS}")
        if self.max_logprobs < 0:
            raise ValueError(f"max_logprobs={self.max_logprobs}: must be 0 or more")
        if self.structured_backend not in BACKENDS:
            raise ValueError(f"structured_backend={self.structured_backend!r}: must be one of {BACKENDS}")

    @property
    def ids_below(self) -> int:
        """Every token id is smaller. The engine's tables of them are 32 bits wide, with a sign."""
        return self.vocab_size or 2**31


ModelCheck = Callable[[str, Any, Model], Any]


def plain(check: Check) -> ModelCheck:
    """A check that needs to know nothing of the model."""
    return lambda name, value, model: check(name, value)


def ids(longest: int | None = None) -> ModelCheck:
    """A list of token ids of the vocabulary; None when it is empty."""

    def check(name: str, value: Any, model: Model) -> list[int] | None:
        found = tokens(name, value)
        if found is not None:
            if longest is not None and len(found) > longest:
                raise InvalidRequest(name, len(found), f"at most {longest} token ids")
            known(name, max(found), model)
        return found

    return check


def known(name: str, token: int, model: Model) -> None:
    if token >= model.ids_below:
        raise InvalidRequest(name, token, f"token ids of the vocabulary, 0..{model.ids_below - 1}")


def some_ids(name: str, value: Any, model: Model) -> list[int]:
    found: list[int] | None = ids(LONGEST_ALLOWED_IDS)(name, value, model)
    if found is None:
        raise InvalidRequest(name, value, "one token id at least")
    return found


def logit_bias(name: str, value: Any, model: Model) -> dict[int, float] | None:
    found = biases(name, value)
    if found is None:
        return None
    if len(found) > LONGEST_BIAS:
        raise InvalidRequest(name, len(found), f"at most {LONGEST_BIAS} token ids")
    known(name, max(found), model)
    for bias in found.values():
        if not -LARGEST_BIAS <= bias <= LARGEST_BIAS:
            raise InvalidRequest(name, bias, f"biases in [-{LARGEST_BIAS:g}, {LARGEST_BIAS:g}]")
    return found


def top_k(name: str, value: Any, model: Model) -> int:
    """0 and -1 are all."""
    count: int = integer(0, I31, also=-1)(name, value)
    return max(0, count)


def logprob_count(name: str, value: Any, model: Model) -> int:
    count: int = integer(0, model.max_logprobs)(name, value)
    return count


def bad_words(name: str, value: Any, model: Model) -> list[list[int]] | None:
    """Token sequences that may not come: the words as the tokenizer splits them."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(word, (list, tuple)) for word in value):
        raise InvalidRequest(name, value, "a list of lists of token ids")
    if len(value) > LONGEST_BAD_WORDS:
        raise InvalidRequest(name, len(value), f"at most {LONGEST_BAD_WORDS} sequences")
    words = [ids()(name, word, model) for word in value]
    if None in words:
        raise InvalidRequest(name, value, "sequences of one token id at least")
    if sum(map(len, words)) > LONGEST_BAD_WORDS_TOKENS:
        raise InvalidRequest(name, value, f"at most {LONGEST_BAD_WORDS_TOKENS} token ids in all")
    return words or None


def repetition_detection(name: str, value: Any) -> dict[str, int]:
    keys = ("max_pattern_size", "min_pattern_size", "min_count")
    if not isinstance(value, Mapping) or not value.keys() <= set(keys):
        raise InvalidRequest(name, value, f"a dict with some of {', '.join(keys)}")
    sizes = {key: integer(0, I31)(f"{name}['{key}']", item) for key, item in value.items()}
    largest, smallest = sizes.get("max_pattern_size", 0), sizes.get("min_pattern_size", 0)
    if smallest > largest:
        raise InvalidRequest(name, value, "a min_pattern_size of at most max_pattern_size")
    if largest and sizes.get("min_count", 0) < 2:
        raise InvalidRequest(name, value, "a min_count of at least 2")
    return sizes


def extra_args(name: str, value: Any) -> dict[str, Any] | None:
    """What custom code in the engine reads: as JSON has it, since other things may not survive decoding."""
    passed_through(name, value)
    for key in ("kv_transfer_params", "ec_transfer_params"):
        if not isinstance(value.get(key), (dict, type(None))):
            raise InvalidRequest(f"{name}['{key}']", value[key], "a dict")
    return value or None


class Field(NamedTuple):
    """One key of the map."""

    name: str
    default: Any  # the engine's; a value equal to it is left out
    check: ModelCheck
    param: str | None = None  # field of SamplingParams that sets it; None: one of extra["vllm"]


ALWAYS = object()  # the default of a key that is never left out

SAMPLING = (
    Field("presence_penalty", 0.0, plain(number(-2, 2)), "presence_penalty"),
    Field("frequency_penalty", 0.0, plain(number(-2, 2)), "frequency_penalty"),
    Field("repetition_penalty", 1.0, plain(number(SMALLEST_FACTOR, LARGEST_FACTOR)), "repetition_penalty"),
    Field("temperature", 1.0, plain(number(0, 2)), "temperature"),
    Field("top_p", 1.0, plain(number(0, 1, above_low=True)), "top_p"),
    Field("top_k", 0, top_k, "top_k"),
    Field("min_p", 0.0, plain(number(0, 1)), "min_p"),
    Field("seed", None, plain(integer(0, I63)), "seed"),
    Field("stop_token_ids", None, ids(LONGEST_STOP_IDS), "stop_token_ids"),
    Field("max_tokens", ALWAYS, plain(integer(1, I31)), "max_tokens"),
    Field("min_tokens", 0, plain(integer(0, LONGEST_MIN_TOKENS)), "min_tokens"),
    Field("logprobs", None, logprob_count, "logprobs"),
    Field("prompt_logprobs", None, logprob_count),
    Field("logprob_token_ids", None, ids(LONGEST_LOGPROB_IDS)),
    Field("logit_bias", None, logit_bias, "logit_bias"),
    Field("allowed_token_ids", None, some_ids),
    Field("extra_args", None, plain(extra_args)),
    Field("_bad_words_token_ids", None, bad_words),
    Field("skip_reading_prefix_cache", None, plain(flag)),
    Field("thinking_token_budget", None, plain(integer(0, I31, also=-1))),  # -1 = unlimited
    Field("repetition_detection", None, plain(repetition_detection)),
)
FROM_PARAMS = tuple((field.name, field.param, field.check, field.default) for field in SAMPLING if field.param)
# In extra, names have no underscore before them.
FROM_EXTRA = {field.name.lstrip("_"): (field.name, field.check, field.default) for field in SAMPLING if not field.param}

# Structured outputs: exactly one constraint, and how it is compiled


def schema(deepest: int) -> Check:
    """JSON text or a dict, of which the text is sent."""

    def check(name: str, value: Any) -> str:
        if type(value) is dict and carries(value, deepest):
            return json.dumps(value)
        if type(value) is str and is_unicode(value):
            try:
                if carries_json(value, deepest):
                    return value
            except (ValueError, RecursionError):
                pass
        raise InvalidRequest(name, value, f"a JSON object or its text, at most {deepest} levels deep")

    return check


def carries_json(value: str, deepest: int) -> bool:
    parsed = json.loads(value, parse_int=float)  # integers of any length are good JSON
    return type(parsed) is dict and carries(parsed, deepest)


def regex(name: str, value: Any) -> str:
    if "\0" in text(name, value):
        raise InvalidRequest(name, value, "a pattern without the character NUL")
    pattern: str = value
    return pattern


def grammar(name: str, value: Any) -> str:
    if not text(name, value).strip():
        raise InvalidRequest(name, value, "a grammar")
    rules: str = value
    return rules


def choice(name: str, value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)) or not value:
        raise InvalidRequest(name, value, "a list of one str at least")
    return [text(name, item) for item in value]


def json_object(name: str, value: Any) -> bool:
    if value is not True:
        raise InvalidRequest(name, value, "True")
    return True


def backend(name: str, value: Any) -> str:
    if value not in BACKENDS:
        raise InvalidRequest(name, value, f"one of {', '.join(BACKENDS)}")
    chosen: str = value
    return chosen


# Constraints by their key, each with the field of SamplingParams that sets it as well
CONSTRAINTS: dict[str, tuple[Check, str | None]] = {
    "json": (schema(DEEPEST_SCHEMA), "json_schema"),
    "regex": (regex, "regex"),
    "choice": (choice, None),
    "grammar": (grammar, "ebnf"),
    "json_object": (json_object, None),
    "structural_tag": (schema(DEEPEST_TAG), "structural_tag"),
}
OPTIONS: dict[str, Check] = {
    "disable_any_whitespace": flag,
    "disable_additional_properties": flag,
    "whitespace_pattern": text,
    "backend": backend,
}


def structured_outputs(params: SamplingParams, given: Any, model: Model) -> dict[str, Any] | None:
    """The map of the constraint in `params` or in extra["vllm"]["structured_outputs"], if there is one."""
    where = f"extra['{EXTRA}']['structured_outputs']"
    if given is None and params.json_schema is params.regex is params.ebnf is params.structural_tag is None:
        return None
    found: dict[str, Any] = {}
    named: list[tuple[str, Any]] = []  # the constraints among them
    for key, (check, param) in CONSTRAINTS.items():
        value = getattr(params, param) if param else None
        if param and value is not None:
            found[key] = check(param, value)
            named.append((param, value))
    if given is not None:
        if not isinstance(given, Mapping):
            raise InvalidRequest(where, given, "a dict")
        for key, value in given.items():
            if key not in CONSTRAINTS and key not in OPTIONS:
                raise InvalidRequest(where, key, f"one of {', '.join((*CONSTRAINTS, *OPTIONS))}")
            name = f"{where}['{key}']"
            if value is not None:
                found[key] = (CONSTRAINTS[key][0] if key in CONSTRAINTS else OPTIONS[key])(name, value)
                named += [(name, value)] if key in CONSTRAINTS else []
    if len(named) > 1:
        raise InvalidRequest(*named[1], f"None, since {named[0][0]} is set and only one can be")
    if given is not None and not named:
        raise InvalidRequest(where, given, f"a dict with one of {', '.join(CONSTRAINTS)}")
    if not named:
        return None
    found["_backend"] = found.pop("backend", model.structured_backend)
    return found


# The whole map


def sampling_map(
    params: SamplingParams,
    extra: Mapping[str, Any],
    prompt_length: int,
    context_length: int | None,
    model: Model,
) -> dict[str, Any]:
    """The keys that do not have their defaults. `extra` are the fields of extra["vllm"]; others are ignored."""
    values: dict[str, Any] = {}
    for key, param, check, default in FROM_PARAMS:
        value = getattr(params, param)
        if value is not None and (value := check(param, value, model)) != default:
            values[key] = value
    for name, value in extra.items():
        if name in FROM_EXTRA and value is not None:
            key, check, default = FROM_EXTRA[name]
            if (value := check(f"extra['{EXTRA}']['{name}']", value, model)) != default:
                values[key] = value
    if "max_tokens" not in values:
        # The engine stops at the end of the context in any case.
        values["max_tokens"] = I31 if context_length is None else context_length - prompt_length
    if values.get("min_tokens", 0) > values["max_tokens"]:
        raise InvalidRequest("min_tokens", values["min_tokens"], f"at most max_tokens, {values['max_tokens']}")
    chosen = values.get("logprob_token_ids")
    if chosen and values.get("logprobs", len(chosen)) != len(chosen):
        raise InvalidRequest("logprobs", values["logprobs"], f"None or the {len(chosen)} logprob_token_ids")
    ignore_eos = params.ignore_eos is not None and flag("ignore_eos", params.ignore_eos)
    values |= stops(tuple(values.get("stop_token_ids", ())), tuple(model.eos_token_ids), ignore_eos)
    constraint = structured_outputs(params, extra.get("structured_outputs"), model)
    if constraint is not None:
        values["structured_outputs"] = constraint
    return values


@lru_cache(256)
def stops(given: tuple[int, ...], eos: tuple[int, ...], ignore_eos: bool) -> dict[str, Any]:
    """The keys that end a completion: EOS as the engine wants it, the first apart from the others.

    `_all_stop_token_ids` is what min_tokens holds back and what grammars end with, whether or not EOS counts.
    """
    keys: dict[str, Any] = {}
    tokens = list(dict.fromkeys(given))
    if eos and not ignore_eos:
        keys["_eos_token_id"] = eos[0]
        tokens += [token for token in eos[1:] if token not in tokens]
    if tokens:
        keys["stop_token_ids"] = tokens
    every = sorted({*tokens, *eos})
    if len(every) > LONGEST_STOP_IDS:
        raise InvalidRequest("stop_token_ids", len(every), f"at most {LONGEST_STOP_IDS} ids with EOS")
    if every:
        keys["_all_stop_token_ids"] = every
    return keys
