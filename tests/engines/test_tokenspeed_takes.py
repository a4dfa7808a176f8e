"""Requests as TokenSpeed's own code reads them: decoded, normalised and verified by the engine, field by field."""

from __future__ import annotations

import math
import string
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tokenspeed_driver import Rank

from smg import InvalidRequest, SamplingParams
from smg.protocol import tokenspeed
from smg.protocol.tokenspeed import ADD, Request, encode_add, encode_request

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

RID = "00c0ffee0000002a00000007"
PROMPT = [1, 2, 3]
VOCABULARY = 1000  # the engine's, in these tests
I31 = 2**31 - 1
ALL_TOKENS = 2**30  # the engine's word for no top_k
NOT_SENT = {  # fields of TokenizedGenerateReqInput after those that are sent, and of those what never varies
    "http_worker_ipc": None,
    "input_text": None,
    "top_logprobs_num": 0,
    "token_ids_logprob": None,
    "stream": True,
    "input_embeds": None,
    "session_params": None,
    "custom_logit_processor": None,
    "return_hidden_states": False,
    "created_time": 0.0,
    "bootstrap_host": None,
    "bootstrap_port": None,
    "bootstrap_room": None,
    "input_multi_ids": None,
    "input_extra_infos": None,
    "input_ids_unpadded": None,
    "multimodal_inputs": None,
    "validation_error": None,
    "data_parallel_rank": None,
}


def shown(params: Any) -> str:
    """What of `params` is not the default."""
    default = SamplingParams()
    values = {name: getattr(params, name) for name in SamplingParams.__slots__}
    return ",".join(f"{name}={value}" for name, value in values.items() if value != getattr(default, name))


def sampling_as_meant(params: SamplingParams) -> dict[str, Any]:
    """Every field of the engine's SamplingParams as it should stand once the engine has normalised it."""

    def given(value: Any, otherwise: Any) -> Any:
        return otherwise if value is None else value

    temperature = given(params.temperature, 1.0)
    greedy = temperature < 1e-6
    top_k = 1 if greedy else ALL_TOKENS if params.top_k in (None, -1) else params.top_k
    own = params.extra.get("tokenspeed", {})
    return {
        "max_new_tokens": params.max_tokens,
        "stop": None,
        "stop_token_ids": sorted(set(params.stop_token_ids)) if params.stop_token_ids else None,
        "temperature": 1.0 if greedy else temperature,
        "top_p": given(params.top_p, 1.0),
        "top_k": top_k,
        "min_p": given(params.min_p, 0.0),
        "frequency_penalty": given(params.frequency_penalty, 0.0),
        "presence_penalty": given(params.presence_penalty, 0.0),
        "repetition_penalty": given(params.repetition_penalty, 1.0),
        "min_new_tokens": given(params.min_tokens, 0),
        "json_schema": params.json_schema,
        "regex": params.regex,
        "ebnf": params.ebnf,
        "structural_tag": params.structural_tag,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": own.get("skip_special_tokens", True),
        "spaces_between_special_tokens": own.get("spaces_between_special_tokens", True),
        "no_stop_trim": own.get("no_stop_trim", False),
        "thinking_budget": own.get("thinking_budget"),
        "custom_params": own.get("custom_params"),
        "stream_interval": own.get("stream_interval"),
        "logit_bias": {str(token): bias for token, bias in (params.logit_bias or {}).items()} or None,
        "seed": 0 if top_k == 1 else params.seed,
        "logprobs": None,  # the request's return_logprob asks for it
        "n": 1,
        "stop_strs": [],
        "stop_str_max_len": 0,
        "is_normalized": True,
    }


def check(decoder: Rank, prompt: list[int], params: SamplingParams) -> None:
    seen = decoder.decode(ADD, encode_add(RID, prompt, params))
    assert seen is not None, "the engine dropped the request"
    sampling, fields = sampling_as_meant(params), seen["fields"]
    if sampling["seed"] is None:  # then the router draws one
        assert 0 <= seen["sampling"]["seed"] < 2**32
        sampling["seed"] = seen["sampling"]["seed"]
    assert seen["sampling"] == sampling
    wants_logprob = params.logprobs is not None
    assert fields == NOT_SENT | {
        "rid": RID,
        "input_ids": prompt,
        "return_logprob": wants_logprob,
        "logprob_start_len": len(prompt) - 1 if wants_logprob else -1,  # as the engine resolves -1
    }


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=64, min_tokens=64),
        SamplingParams(temperature=0.0, seed=5),
        SamplingParams(temperature=9e-7, top_k=40, seed=5),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=127, min_p=1.0, seed=2**32 - 1),
        SamplingParams(top_k=1, seed=5),
        SamplingParams(top_k=-1, seed=0),
        SamplingParams(frequency_penalty=-2, presence_penalty=2, repetition_penalty=0),
        SamplingParams(stop_token_ids=[7, 2, 7], ignore_eos=True),
        SamplingParams(stop_token_ids=[], logit_bias={}),
        SamplingParams(logit_bias={0: -100.0, 999: 2.5}, logprobs=0),
        SamplingParams(json_schema='{"type": "object"}'),
        SamplingParams(regex="[äß]+"),
        SamplingParams(ebnf='root ::= "x"'),
        SamplingParams(structural_tag="{}"),
        SamplingParams(extra={"tokenspeed": {"thinking_budget": 5, "stream_interval": 4, "no_stop_trim": True}}),
    ],
    ids=shown,
)
def test_a_request_reads_as_it_was_meant(decoder: Rank, params: SamplingParams) -> None:
    check(decoder, PROMPT, params)


def test_a_long_prompt_with_ids_of_every_width_reads_as_it_was_meant(decoder: Rank) -> None:
    check(decoder, [0, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, *range(70_000)], SamplingParams(max_tokens=9))


def test_a_request_without_max_tokens_gets_what_the_context_leaves(decoder: Rank) -> None:
    seen = decoder.decode(ADD, encode_add(RID, PROMPT, context_length=4096))
    assert seen is not None
    assert seen["sampling"]["max_new_tokens"] == 4096 - len(PROMPT)


def optional(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


def between(low: float, high: float, **options: Any) -> st.SearchStrategy[float]:
    return st.floats(low, high, **options) | st.sampled_from([low, high]).filter(
        lambda value: not (options.get("exclude_min") and value == low)
    )


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
TOKEN = st.integers(0, VOCABULARY - 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)
VALID = {
    "max_tokens": st.integers(1, I31),
    "min_tokens": st.integers(0, I31),
    "temperature": between(0.0, 1e6) | st.floats(0, 2e-6),
    "top_p": between(0.0, 1.0, exclude_min=True),
    "top_k": st.just(-1) | st.integers(1, 127),
    "min_p": between(0.0, 1.0),
    "frequency_penalty": between(-2.0, 2.0),
    "presence_penalty": between(-2.0, 2.0),
    "repetition_penalty": between(0.0, 2.0),
    "seed": st.integers(0, 2**63 - 1),
    "stop_token_ids": st.lists(TOKEN, max_size=6),
    "logprobs": st.just(0),
    "logit_bias": st.dictionaries(TOKEN, st.floats(allow_nan=False, allow_infinity=False), max_size=6),
}
CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag")
EXTRA = st.fixed_dictionaries(
    {},
    optional={
        "skip_special_tokens": st.booleans(),
        "spaces_between_special_tokens": st.booleans(),
        "no_stop_trim": st.booleans(),
        "thinking_budget": st.integers(0, I31),
        "stream_interval": st.integers(1, I31),
        "custom_params": st.dictionaries(TEXT, JSON, max_size=3),
    },
)


@st.composite
def valid_params(draw: st.DrawFn) -> SamplingParams:
    values = draw(st.fixed_dictionaries({}, optional=VALID))
    values["ignore_eos"] = draw(st.booleans())
    constraint = draw(optional(st.sampled_from(CONSTRAINTS)))
    if constraint:
        values[constraint] = draw(TEXT)
    if "max_tokens" in values and "min_tokens" in values:
        values["min_tokens"] = min(values["min_tokens"], values["max_tokens"])
    return SamplingParams(**values, extra={"tokenspeed": draw(EXTRA)})


@settings(max_examples=300)
@given(prompt=st.lists(TOKEN, min_size=1, max_size=20), params=valid_params())
def test_every_valid_request_reads_as_it_was_meant(decoder: Rank, prompt: list[int], params: SamplingParams) -> None:
    check(decoder, prompt, params)


ON_THE_EDGE = [-2.0000001, -2, -1, -1e-9, 0, 1e-9, 1, 1.0000001, 2, 2.0000001, 127, 128, 2**31, 2**63, 2**64]
ANYTHING = (
    st.sampled_from(ON_THE_EDGE)
    | st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.integers(-3, 130)
    | st.floats()
    | st.floats(-3, 3)
    | st.text(string.ascii_letters + "\ud800", max_size=3)
    | st.binary(max_size=3)
    | st.lists(st.integers(-2, VOCABULARY - 1) | st.floats() | st.booleans(), max_size=3)
    | st.dictionaries(st.integers(-2, VOCABULARY - 1) | st.text(max_size=2), st.floats() | st.integers(), max_size=3)
)
NAMES = [*VALID, *CONSTRAINTS, "ignore_eos"]
OWN = list(tokenspeed.FROM_EXTRA)


@settings(max_examples=600)
@given(
    values=st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=1),
    own=st.dictionaries(st.sampled_from(OWN), ANYTHING | st.dictionaries(TEXT, ANYTHING), max_size=1),
    others=valid_params(),
)
def test_whatever_passes_our_validation_the_engine_accepts(
    decoder: Rank, values: dict[str, Any], own: dict[str, Any], others: SamplingParams
) -> None:
    params = replace(others, **values, extra={"tokenspeed": {**others.extra["tokenspeed"], **own}})
    try:
        payload = encode_add(RID, PROMPT, params)
    except InvalidRequest as refusal:
        event(f"refused: {refusal.field}")
        return
    event("passed")
    seen = decoder.decode(ADD, payload)
    assert seen is not None, "the engine dropped the request"
    assert seen["fields"]["validation_error"] is None


REFUSED_BY_BOTH = [  # field of SamplingParams, value, other fields of SamplingParams
    *[("top_p", value) for value in (0.0, -0.1, 1.0000001, math.nan, "1", True, [])],
    *[("top_k", value) for value in (0, -2, 128, 2**30 + 1, 5.0, "5", True)],
    *[("min_p", value) for value in (-0.1, 1.1, math.nan, "0")],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, math.nan, math.inf, "0")],
    *[("presence_penalty", value) for value in (-2.1, 2.1, math.nan, -math.inf, "0")],
    *[("repetition_penalty", value) for value in (-0.1, 2.1, math.nan, "1")],
    *[("temperature", value) for value in ("1", True, [], {})],
    *[("max_tokens", value) for value in (-1, 1.0, "9", True, 2**64 - 2**63 + 1.5)],
    *[("min_tokens", value) for value in (-1, 1.0, "9", True)],
    *[("seed", value) for value in (1.0, "9", True)],
    *[("stop_token_ids", value) for value in (7, "7", ["7"], [7.0], [None])],
    *[("logprobs", value) for value in (1, 5, -1, 0.0, True)],
    *[("logit_bias", value) for value in ([1], {-1: 1.0}, {"x": 1.0}, {7: "1"}, {7: None})],
    *[(constraint, value) for constraint in CONSTRAINTS for value in (1, b"x", ["x"])],
    *[("ignore_eos", value) for value in (1, 0, "yes")],
]
WIRE_NAME = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


def sent_raw(decoder: Rank, **sampling: Any) -> dict[str, Any] | None:
    """What the engine makes of sampling values that went out unchecked."""
    if isinstance(sampling.get("logit_bias"), dict):
        sampling["logit_bias"] = {str(token): bias for token, bias in sampling["logit_bias"].items()}
    named = {WIRE_NAME.get(name, name): value for name, value in sampling.items()}
    return decoder.decode(ADD, encode_request(Request(RID, PROMPT, named, stream=True)))


@pytest.mark.parametrize(("field", "value"), REFUSED_BY_BOTH, ids=repr)
def test_a_value_that_we_refuse_the_engine_refuses_too(decoder: Rank, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        encode_add(RID, PROMPT, SamplingParams(**{field: value}))
    assert refusal.value.field == field
    seen = sent_raw(decoder, **{field: value})
    assert seen is None or seen["fields"]["validation_error"] is not None


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("min_tokens", {"max_tokens": 4, "min_tokens": 5}),
        ("regex", {"json_schema": "{}", "regex": "x"}),
        ("ebnf", {"json_schema": "{}", "ebnf": "x"}),
        ("ebnf", {"regex": "x", "ebnf": "x"}),
    ],
)
def test_values_that_exclude_each_other_are_refused_by_both(decoder: Rank, field: str, values: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        encode_add(RID, PROMPT, SamplingParams(**values))
    assert refusal.value.field == field
    seen = sent_raw(decoder, **values)
    assert seen is not None
    assert seen["fields"]["validation_error"] is not None


@pytest.mark.parametrize(
    ("values", "made_of_it"),
    [
        ({"temperature": -1.0}, {"temperature": 1.0, "top_k": 1, "seed": 0}),  # greedy, without a word
        ({"temperature": math.inf}, {"temperature": math.inf}),
        ({"max_tokens": 0}, {"max_new_tokens": 0}),
        ({"seed": -1}, {"seed": -1}),
        ({"regex": ""}, {"regex": ""}),
        ({"regex": "x", "structural_tag": "{}"}, {"regex": "x", "structural_tag": "{}"}),
    ],
    ids=repr,
)
def test_nonsense_that_the_engine_would_take_is_refused_before_it(
    decoder: Rank, values: dict[str, Any], made_of_it: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest):
        encode_add(RID, PROMPT, SamplingParams(**values))
    seen = sent_raw(decoder, **values)
    assert seen is not None
    assert seen["fields"]["validation_error"] is None
    assert {name: seen["sampling"][name] for name in made_of_it} == made_of_it
