"""What is refused of a request to vLLM before it is sent: every value that ends an engine, or leaves it deaf."""

from __future__ import annotations

import json
import math
from typing import Any

import msgpack
import numpy as np
import pytest

from smg.errors import InvalidRequest
from smg.protocol import vllm
from smg.protocol.vllm import Model
from smg.protocol.vllm_sampling import CONSTRAINTS as STRUCTURED
from smg.protocol.vllm_sampling import FROM_EXTRA, OPTIONS, SAMPLING
from smg.sampling import SamplingParams

WIRE_ID = "00c0ffee0000002a00000007"
KNOWN = Model(eos_token_ids=(2, 7), vocab_size=1000)


def sent(params: SamplingParams, model: Model = KNOWN) -> dict[str, Any]:
    """The sampling map of an encoded request."""
    payload = vllm.encode_add(WIRE_ID, [1], params, model=model)
    sampling: dict[str, Any] = vllm.decode_request(payload, "0.32.0")["sampling_params"]
    return sampling


# ---------------------------------------------------------- structured outputs


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"json_schema": ' {"type": "object"}'}, {"json": ' {"type": "object"}'}),
        ({"regex": "[0-9]+"}, {"regex": "[0-9]+"}),
        ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"structural_tag": '{"type": "x"}'}, {"structural_tag": '{"type": "x"}'}),
    ],
)
@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_each_constraint_arrives_with_the_backend_that_the_engine_has_no_default_for(
    params: Any, expected: Any, backend: str
) -> None:
    got = sent(SamplingParams(**params), model=Model(structured_backend=backend))["structured_outputs"]
    assert got == expected | {"_backend": backend}


def test_constraints_and_options_may_come_as_the_engines_own_fields() -> None:
    def constrained(params: dict[str, Any], **fields: Any) -> Any:
        got = sent(SamplingParams(**params, extra={"vllm": {"structured_outputs": fields}}))
        return got["structured_outputs"]

    options = {"disable_any_whitespace": True, "whitespace_pattern": " ", "backend": "outlines"}
    expected = {"disable_any_whitespace": True, "whitespace_pattern": " ", "_backend": "outlines"}
    assert constrained({"regex": "a"}, **options) == {"regex": "a"} | expected
    assert constrained({}, choice=("a", "b")) == {"choice": ["a", "b"], "_backend": "xgrammar"}
    assert constrained({}, json_object=True) == {"json_object": True, "_backend": "xgrammar"}
    schema = {"type": "object", "properties": {"ä": {"type": "string"}}}
    assert json.loads(constrained({}, json=schema, regex=None)["json"]) == schema


def refused(params: Any, **more: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as validated:
        vllm.validate([1], params, **more)
    with pytest.raises(InvalidRequest) as encoded:
        vllm.encode_add(WIRE_ID, [1], params, **more)
    assert str(validated.value) == str(encoded.value)
    assert validated.value.allowed
    return validated.value


def own(**fields: Any) -> dict[str, Any]:
    return {"extra": {"vllm": fields}}


IN_STRUCTURED = "extra['vllm']['structured_outputs']"


@pytest.mark.parametrize(
    ("params", "field", "text"),
    [
        ({"json_schema": "{}", "structural_tag": "{}"}, "structural_tag", "json_schema is set"),
        ({"regex": "a", **own(structured_outputs={"choice": ["a"]})}, f"{IN_STRUCTURED}['choice']", "regex is set"),
        (own(structured_outputs={"backend": "xgrammar"}), IN_STRUCTURED, "one of json"),
        (own(structured_outputs={}), IN_STRUCTURED, "one of json"),
        (own(structured_outputs="json"), IN_STRUCTURED, "a dict"),
        (own(structured_outputs={"jsn": "{}"}), IN_STRUCTURED, "one of json"),
        (own(structured_outputs={"_backend": "xgrammar"}), IN_STRUCTURED, "one of json"),
    ],
)
def test_no_constraint_or_two_are_refused(params: Any, field: str, text: str) -> None:
    error = refused(SamplingParams(**params))
    assert error.field == field
    assert text in str(error)


def nested(depth: int, closing: str = "1") -> str:
    return '{"a":' * depth + closing + "}" * depth


STRUCTURED_VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "json": (
        ["{}", nested(64), {"a": 1}, '{"maximum": 1e400, "minimum": -' + "1" * 400 + "}"],
        ["", " ", "[]", "true", "{", nested(65), nested(100_000), '{"a": "\\ud800"}', {"a": object()}, {1: 2}, 5],
    ),
    "regex": (["a", " ", "é"], ["", "a\0b", 5, "\ud800"]),
    "choice": ([["a"], ("a", "b")], [[], "ab", [""], [5], None]),
    "grammar": (["root ::= 'a'"], ["", " \n", 5]),
    "json_object": ([True], [False, 1, "yes"]),
    "structural_tag": (["{}", nested(80)], ["", "[]", nested(81), "x", 5]),
    "disable_any_whitespace": ([True, False], [1, "no"]),
    "disable_additional_properties": ([True, False], [0]),
    "whitespace_pattern": ([" ?"], ["", 5]),
    "backend": (["xgrammar", "guidance", "outlines", "lm-format-enforcer"], ["auto", "", 5]),
}


def test_every_field_of_structured_outputs_is_checked_here() -> None:
    assert STRUCTURED_VALUES.keys() == STRUCTURED.keys() | OPTIONS.keys()


@pytest.mark.parametrize("name", STRUCTURED_VALUES)
def test_fields_of_structured_outputs_are_checked_by_name(name: str) -> None:
    base = {} if name in STRUCTURED else {"regex": "a"}
    good, bad = STRUCTURED_VALUES[name]
    for value in good:
        vllm.validate([1], SamplingParams(**own(structured_outputs={**base, name: value})))
    for value in bad:
        if value is not None:
            error = refused(SamplingParams(**own(structured_outputs={**base, name: value})))
            assert error.field == f"{IN_STRUCTURED}['{name}']"


# ---------------------------------------------------------- values that end or deafen an engine

NAN, INF = math.nan, math.inf
I31 = 2**31 - 1
TOP = 999  # the last id of the vocabulary

# field -> values that the engine takes, values that it does not survive
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "max_tokens": ([1, I31, np.int64(5)], [0, -1, I31 + 1, 2**64, 1.0, True, "1", NAN]),
    "min_tokens": ([0, 1, 2**30], [-1, 2**30 + 1, 1.0, False, "1"]),
    "temperature": ([0, 0.0, 1, 2, 1e-300, np.float32(0.5)], [-0.1, 2.0001, 3.0, NAN, INF, -INF, True, "1", 1j]),
    "top_p": ([1e-9, 0.5, 1, 1.0], [0, 0.0, -0.5, 1.0000001, 2, NAN, INF, True, "1"]),
    "top_k": ([-1, 0, 1, I31], [-2, I31 + 1, 1.0, True, "1", NAN]),
    "min_p": ([0, 0.5, 1], [-0.01, 1.01, NAN, INF, False]),
    "frequency_penalty": ([-2, 0, 2.0], [-2.01, 2.01, NAN, -INF, True]),
    "presence_penalty": ([-2, 0, 2.0], [-2.01, 2.01, NAN, INF, False]),
    "repetition_penalty": ([0.01, 1, 5.0, 3e38], [0, 0.0, -1.0, 1e-40, 1e39, NAN, INF, True]),
    "seed": ([0, 1, 2**32 - 1, 2**63 - 1], [-1, 2**63, 1.0, True, "1"]),
    "stop_token_ids": (
        [[], [0], (1, 2), [TOP], {7}, list(range(126))],
        [[-1], [TOP + 1], [2**32], [1.0], [True], ["1"], [None], 5, "12", list(range(129)), list(range(8, 136))],
    ),
    "ignore_eos": ([True, False], [0, 1, "yes", 1.0]),
    "logprobs": ([0, 5, 20], [-1, -2, 21, 1.0, True, "5"]),
    "logit_bias": (
        [{}, {0: 1}, {TOP: -100}, dict.fromkeys(range(TOP), 0.5)],
        [{-1: 0.0}, {TOP + 1: 0.0}, {"5": 0.0}, {1: NAN}, {1: INF}, {1: 100.5}, {1: -101}, {1: "x"}, [(1, 2.0)], "x"],
    ),
    "json_schema": (["{}"], ["", 5, {"a": {1: 2}}, b"{}", "\ud800", "{", "[]"]),
    "regex": (["a"], ["", 5, b"a", "\udcff", "\0"]),
    "ebnf": (["root ::= 'a'"], ["", " ", True]),
    "structural_tag": (["{}"], ["", [], "x"]),
}  # fmt: skip


def levels(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


EXTRA_VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "prompt_logprobs": ([0, 20, None], [-1, 21, 1.0, True]),
    "logprob_token_ids": ([[], [0, TOP], list(range(128)), None], [[-1], [TOP + 1], list(range(129)), "12", 5]),
    "allowed_token_ids": ([[0], list(range(TOP)), None], [[], [TOP + 1], [1.0], [7] * 1025, 5]),
    "bad_words_token_ids": (
        [[], [[0]], [(1, 2), [TOP]], [[1]] * 128, [[1] * 1024], None],
        [[1], [[]], [[TOP + 1]], [[1.0]], "ab", 5, [[1]] * 129, [[1] * 1025], {1: 2}],
    ),
    "skip_reading_prefix_cache": ([True, False, None], [0, 1, "no"]),
    "thinking_token_budget": ([-1, 0, I31, None], [-2, 1.0, True, I31 + 1, "5"]),
    "repetition_detection": (
        [{}, {"min_count": 0}, {"max_pattern_size": 3, "min_pattern_size": 3, "min_count": 2}, None],
        [
            5, [], {"max_pattern_size": 1}, {"max_pattern_size": 1, "min_count": 1}, {"min_pattern_size": 1},
            {"max_patern_size": 1}, {"max_pattern_size": 1.0, "min_count": 2}, {"max_pattern_size": -1},
        ],
    ),
    "extra_args": (
        [{}, {"a": [1, None, "x", 2.5, True, {"b": [-(2**63), 2**64 - 1]}]}, {"kv_transfer_params": {}}, levels(32)],
        [
            5, [1], {1: 2}, {"a": {1: 2}}, {"a": object()}, {"a": 2**64}, {"a": -(2**63) - 1}, {"a": "\ud800"},
            {"\ud800": 1}, {"a": msgpack.ExtType(1, b"pickle")}, {"a": msgpack.Timestamp(1, 2)}, {"a": b"x"},
            levels(33), levels(300), {"kv_transfer_params": "x"}, {"ec_transfer_params": [1]},
        ],
    ),
    "cache_salt": (["salt", None], ["", 5, b"x", "\ud800"]),
    "lora": (
        [["a", 1, "/l/a"], ("a", I31, "x"), None],
        [["a", 0, "/l/a"], ["a", 1], ["a", 1, ""], ["", 1, "x"], [1, "a", "x"], ["a", 1, "x", None], "a1x", {}],
    ),
}  # fmt: skip


def cases(at: int) -> list[Any]:
    plain = [pytest.param(name, v, {name: v}, id=f"{name}={v!r:.20}") for name in VALUES for v in VALUES[name][at]]
    extra = [
        pytest.param(f"extra['vllm']['{name}']", v, own(**{name: v}), id=f"{name}={v!r:.20}")
        for name in EXTRA_VALUES
        for v in EXTRA_VALUES[name][at]
    ]
    return plain + extra


SERVED = Model(eos_token_ids=(2, 7), vocab_size=TOP + 1, lora=True)


@pytest.mark.parametrize(("name", "value", "params"), cases(0))
def test_values_that_the_engine_takes_are_sent(name: str, value: Any, params: dict[str, Any]) -> None:
    vllm.validate([1], SamplingParams(**params), model=SERVED)
    sent(SamplingParams(**params), model=SERVED)


@pytest.mark.parametrize(("name", "value", "params"), cases(1))
def test_values_that_the_engine_does_not_survive_are_refused_by_name(
    name: str, value: Any, params: dict[str, Any]
) -> None:
    assert refused(SamplingParams(**params), model=SERVED).field.startswith(name)


def test_every_parameter_of_the_api_and_of_the_wire_is_checked_here() -> None:
    assert VALUES.keys() | {"extra"} == set(SamplingParams.__dataclass_fields__)
    assert EXTRA_VALUES.keys() | {"structured_outputs"} == set(vllm.KNOWN_EXTRA)
    assert len(SAMPLING) == len({field.name for field in SAMPLING})
    assert FROM_EXTRA.keys() <= EXTRA_VALUES.keys()


@pytest.mark.parametrize(
    ("extra", "field", "value"),
    [
        ({"vllm": {"top_kk": 1}}, "extra['vllm']", "top_kk"),
        ({"vllm": {"n": 2}}, "extra['vllm']", "n"),
        ({"vllm": {"_bad_words_token_ids": [[1]]}}, "extra['vllm']", "_bad_words_token_ids"),
        ({"vllm": 5}, "extra['vllm']", 5),
        ([1], "extra", [1]),
    ],
)
def test_extra_fields_that_are_not_the_callers_are_refused(extra: Any, field: str, value: Any) -> None:
    error = refused(SamplingParams(extra=extra))
    assert (error.field, error.value) == (field, value)


@pytest.mark.parametrize(
    ("minimum", "params", "context"), [(6, {"max_tokens": 5}, None), (10, {}, 10), (2, {"max_tokens": 1}, 10)]
)
def test_min_tokens_over_max_tokens_is_refused(minimum: int, params: Any, context: int | None) -> None:
    error = refused(SamplingParams(min_tokens=minimum, **params), context_length=context)
    assert (error.field, error.value) == ("min_tokens", minimum)
    vllm.validate([1], SamplingParams(min_tokens=minimum - 1, **params), context_length=context)


def test_counts_of_logprobs_that_contradict_each_other_are_refused() -> None:
    vllm.validate([1], SamplingParams(logprobs=2, **own(logprob_token_ids=[5, 6])))
    assert refused(SamplingParams(logprobs=3, **own(logprob_token_ids=[5, 6]))).field == "logprobs"


def test_more_logprobs_than_the_engine_was_started_for_are_refused() -> None:
    vllm.validate([1], SamplingParams(logprobs=50), model=Model(max_logprobs=50))
    assert refused(SamplingParams(logprobs=1), model=Model(max_logprobs=0)).field == "logprobs"


def test_adapters_are_refused_unless_the_engine_has_them() -> None:
    error = refused(SamplingParams(**own(lora=["a", 1, "/l/a"])), model=KNOWN)
    assert error.field == "extra['vllm']['lora']"


@pytest.mark.parametrize(
    ("prompt", "value"),
    [([], []), ([1, -1], -1), ([1000], 1000), ([1.0], 1.0), ([True], True), (["1"], "1"), ("12", "12"), (None, None)],
)
def test_prompts_that_the_engine_does_not_survive_are_refused(prompt: Any, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        vllm.validate(prompt, model=KNOWN)
    assert caught.value.field == "prompt_token_ids"
    assert caught.value.value == value


def test_ids_have_31_bits_when_the_vocabulary_is_unknown() -> None:
    vllm.validate([I31], SamplingParams(stop_token_ids=[I31]))
    for prompt, params in [([I31 + 1], None), ([1], SamplingParams(stop_token_ids=[I31 + 1]))]:
        with pytest.raises(InvalidRequest, match=r"0\.\.2147483647"):
            vllm.validate(prompt, params)


def test_a_prompt_must_leave_room_in_the_context() -> None:
    vllm.validate([1] * 9, context_length=10)
    for length in (10, 11):
        with pytest.raises(InvalidRequest, match="context of 10"):
            vllm.validate([1] * length, context_length=10)


def test_parameters_of_another_type_are_refused() -> None:
    assert refused({"temperature": 1.0}).field == "params"


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": 2**31 + 1}, "vocab_size"),
        ({"eos_token_ids": [5], "vocab_size": 5}, "eos_token_ids"),
        ({"eos_token_ids": [-1]}, "eos_token_ids"),
        ({"eos_token_ids": [True]}, "eos_token_ids"),
        ({"eos_token_ids": range(129)}, "eos_token_ids"),
        ({"max_logprobs": -1}, "max_logprobs"),
        ({"structured_backend": "auto"}, "structured_backend"),
    ],
)
def test_facts_about_a_model_that_cannot_be_are_refused(facts: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Model(**facts)
