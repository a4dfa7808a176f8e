"""Hypothesis strategies for requests to vLLM: values that should pass, and any that a caller may come up with."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from smg.protocol.vllm import Model
from smg.sampling import SamplingParams

VOCAB_SIZE = 1000
CONTEXT_LENGTH = 64

ids = st.integers(0, VOCAB_SIZE - 1)
texts = st.text(min_size=1, max_size=8)
I31 = 2**31 - 1


@dataclass(frozen=True)
class Call:
    """The arguments of one `submit`, and what is known of the model."""

    prompt: Any
    params: SamplingParams
    priority: Any
    model: Model


models = st.builds(
    Model,
    eos_token_ids=st.lists(ids, max_size=4, unique=True).map(tuple),
    vocab_size=st.just(VOCAB_SIZE),
    max_logprobs=st.sampled_from([0, 5, 20]),
    structured_backend=st.sampled_from(["xgrammar", "guidance"]),
    lora=st.booleans(),
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
schemas = st.sampled_from(
    [{"type": "object"}, {"type": "object", "properties": {"a": {"type": "integer"}}}, {"$defs": {"x": {}}}]
)

GOOD: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 64) | st.just(I31) | st.just(16),
    "temperature": st.floats(0, 2) | st.sampled_from([0, 1, 2, np.float32(0.5)]),
    "top_p": st.floats(0, 1, exclude_min=True) | st.just(1),
    "top_k": st.integers(-1, I31),
    "min_p": st.floats(0, 1) | st.just(0),
    "frequency_penalty": st.floats(-2, 2) | st.integers(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 100),
    "seed": st.integers(0, 2**63 - 1),
    "stop_token_ids": st.lists(ids, max_size=8) | st.lists(ids, max_size=3).map(tuple),
    "ignore_eos": st.booleans(),
    "logit_bias": st.dictionaries(ids, st.floats(-100, 100) | st.integers(-100, 100), max_size=5),
}
GOOD_EXTRA: dict[str, st.SearchStrategy[Any]] = {
    "allowed_token_ids": st.lists(ids, min_size=1, max_size=8),
    "bad_words_token_ids": st.lists(st.lists(ids, min_size=1, max_size=3), max_size=4),
    "skip_reading_prefix_cache": st.booleans(),
    "thinking_token_budget": st.integers(-1, I31),
    "repetition_detection": st.builds(
        lambda low, more, count: {"max_pattern_size": low + more, "min_pattern_size": low, "min_count": count},
        st.integers(0, 5),
        st.integers(0, 5),
        st.integers(2, 9),
    ),
    "extra_args": st.dictionaries(texts, json_values, max_size=3)
    | st.fixed_dictionaries({"kv_transfer_params": st.dictionaries(texts, json_values, max_size=2)}),
    "cache_salt": texts,
}
GOOD_CONSTRAINTS: dict[str, st.SearchStrategy[Any]] = {
    "json_schema": schemas.map(json.dumps),
    "regex": st.sampled_from(["[0-9]+", "a|b", " "]),
    "ebnf": st.just('root ::= "a" | "b"'),
    "structural_tag": st.just('{"type": "structural_tag", "format": {"type": "any_text"}}'),
}
GOOD_STRUCTURED: dict[str, st.SearchStrategy[Any]] = {
    "json": schemas,
    "choice": st.lists(texts, min_size=1, max_size=3),
    "json_object": st.just(True),
    "grammar": st.just('root ::= "a"'),
}


@st.composite
def good_calls(draw: st.DrawFn) -> Call:
    """A request that an engine takes."""
    model = draw(models)
    values = draw(st.fixed_dictionaries({}, optional=GOOD))
    extra = draw(st.fixed_dictionaries({}, optional=GOOD_EXTRA))
    prompt = draw(st.lists(ids, min_size=1, max_size=CONTEXT_LENGTH - 2))
    longest = min(values.get("max_tokens", I31), CONTEXT_LENGTH - len(prompt))
    counts = st.integers(0, model.max_logprobs)
    values |= draw(st.fixed_dictionaries({}, optional={"min_tokens": st.integers(0, longest), "logprobs": counts}))
    extra |= draw(st.fixed_dictionaries({}, optional={"prompt_logprobs": counts}))
    if "logprobs" not in values and draw(st.booleans()):
        extra["logprob_token_ids"] = draw(st.lists(ids, min_size=1, max_size=5))
    constraint = draw(st.none() | st.sampled_from([*GOOD_CONSTRAINTS, *GOOD_STRUCTURED]))
    if constraint in GOOD_CONSTRAINTS:
        values[constraint] = draw(GOOD_CONSTRAINTS[constraint])
    elif constraint:
        extra["structured_outputs"] = {constraint: draw(GOOD_STRUCTURED[constraint])}
        options = {"disable_any_whitespace": st.booleans(), "backend": st.just("outlines")}
        extra["structured_outputs"] |= draw(st.fixed_dictionaries({}, optional=options))
    if model.lora and draw(st.booleans()):
        extra["lora"] = ["name", draw(st.integers(1, I31)), "/path"]
    priority = draw(st.just(0) | st.integers(-(2**63) + 1, 2**63 - 1))
    return Call(prompt, SamplingParams(**values, extra={"vllm": extra} if extra else {}), priority, model)


odd_numbers = st.sampled_from([
    0, -1, 1, 2, 3, 2.0, -0.0, 1e-30, 1e-320, 1.0000001, 2.0000001, -2.0000001, 100.5, 128, 1025, VOCAB_SIZE, I31,
    I31 + 1, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 1e308, math.inf, -math.inf, math.nan, True, False,
    np.int64(5), np.float64(0.5), np.float32("nan"), np.bool_(True), 10**400, 1j,
])  # fmt: skip
odd = (
    odd_numbers
    | st.none()
    | st.text(max_size=3)
    | st.sampled_from(["\ud800", "\0", "{}", "[]", "null", '{"a":' * 70 + "1" + "}" * 70, b"x", "5", "true"])
    | st.binary(max_size=2)
)
anything = st.recursive(
    odd,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(-1, VOCAB_SIZE), inner, max_size=3)
    ),
    max_leaves=8,
)
deep = st.integers(1, 2000).map(lambda depth: json.loads("[" * depth + "]" * depth) if depth < 900 else {"a": object()})
many = st.integers(100, 1100).map(lambda count: [at % VOCAB_SIZE for at in range(count)])


def _mixed(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return good | good | good | anything


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Any request that a caller may send, sound or not: a good one with some values exchanged."""
    call = draw(good_calls())
    values = {name: getattr(call.params, name) for name in SamplingParams.__dataclass_fields__}
    names = [name for name in values if name != "extra"]
    for name in draw(st.lists(st.sampled_from(names), max_size=3)):
        values[name] = draw(anything | many | many.map(lambda found: dict.fromkeys(found, 1.0)))
    extra = dict(values["extra"].get("vllm", {}))
    inner = st.sampled_from([*GOOD_EXTRA, "prompt_logprobs", "logprob_token_ids", "structured_outputs", "lora"])
    for name in draw(st.lists(inner, max_size=2)):
        extra[name] = draw(
            anything
            | many
            | many.map(lambda found: [[token] for token in found])
            | deep.map(lambda value: {"a": value})
            | st.dictionaries(
                st.sampled_from([*GOOD_STRUCTURED, "regex", "structural_tag", "backend", "whitespace_pattern"]),
                _mixed(texts),
                max_size=2,
            )
            | st.tuples(_mixed(texts), _mixed(st.integers(0, 3)), _mixed(texts)).map(list)
            | st.dictionaries(st.sampled_from(["kv_transfer_params", "a"]), anything, max_size=2)
        )
    values["extra"] = draw(st.just({"vllm": extra}) if draw(st.integers(0, 20)) else anything)
    prompt = call.prompt
    if draw(st.integers(0, 9)) == 0:
        prompt = draw(st.lists(_mixed(ids), max_size=CONTEXT_LENGTH + 2) | anything)
    return Call(prompt, SamplingParams(**values), draw(_mixed(st.just(call.priority))), call.model)
