"""Bodies to typed requests, and what they ask of an engine."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg.http.errors import ApiError, describe
from smg.http.requests import (
    REFUSED,
    ChatRequest,
    CompletionRequest,
    Decoder,
    GenerateRequest,
    Limits,
    NativeSampling,
    constraint,
    sampling_params,
    stop_strings,
    token_lists,
)

CHAT = {"messages": [{"role": "user", "content": "x"}]}
BACKEND = "tokenspeed"


def decode(kind, body, unknown=None):
    return Decoder(kind, Limits(), Counter() if unknown is None else unknown, BACKEND)(msgspec.json.encode(body))


def params(request, **more):
    options = {"max_tokens": None, "min_tokens": None, "logprobs": None, "stop_token_ids": [], "extra": {}}
    options["limits"] = Limits()
    return sampling_params(request, **(options | more))


def test_nothing_given_leaves_everything_to_the_engine():
    made = params(decode(ChatRequest, CHAT))
    assert made == type(made)()


def test_the_native_seed_wins_over_the_other_one():
    assert params(NativeSampling(seed=1, sampling_seed=2)).seed == 2
    assert params(NativeSampling(seed=1)).seed == 1


def test_logit_bias_has_integer_keys():
    request = decode(ChatRequest, CHAT | {"logit_bias": {"50256": -100, "7": 0.5}})
    assert params(request).logit_bias == {50256: -100.0, 7: 0.5}


@pytest.mark.parametrize("stop", [None, [], "a", ["a", "b", "c", "d"]])
def test_stop_may_be_left_out_a_string_or_a_list(stop):
    assert stop_strings(NativeSampling(stop=stop), Limits()) == ([] if stop is None else [*stop])


def test_a_schema_goes_on_as_it_was_written():
    schema = b'{"b": 1,  "a": [1.0, 1e5]}'
    body = b'{"messages":[{}],"response_format":{"type":"json_schema","json_schema":{"schema":%b}}}' % schema
    request = Decoder(ChatRequest, Limits(), Counter(), BACKEND)(body)
    assert constraint(request) == {"json_schema": schema.decode()}


def test_response_format_text_is_no_constraint():
    assert constraint(decode(ChatRequest, CHAT | {"response_format": {"type": "text"}})) == {}


def test_a_structural_tag_may_come_as_response_format():
    tag = {"type": "structural_tag", "structures": [{"begin": "<a>"}], "triggers": ["<a"]}
    found = constraint(decode(ChatRequest, CHAT | {"response_format": tag}))
    assert msgspec.json.decode(found["structural_tag"]) == tag


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, GenerateRequest])
def test_refused_fields_may_ask_for_nothing(kind):
    nothing = {"chat_template": "", "bad_words": [], "allowed_token_ids": []}
    base = {ChatRequest: CHAT, CompletionRequest: {"prompt": "x"}, GenerateRequest: {"text": "x"}}[kind]
    for name in REFUSED.keys() & set(kind.__struct_fields__):
        assert decode(kind, base | {name: None})
        assert decode(kind, base | {name: nothing.get(name, False)})


def test_unknown_fields_are_counted_up_to_a_bound():
    unknown = Counter()
    for i in range(200):
        decode(ChatRequest, CHAT | {f"x{i}": 1}, unknown)
    assert sum(unknown.values()) == 200
    assert len(unknown) <= 101


known = st.sampled_from(sorted({*ChatRequest.__struct_fields__, *GenerateRequest.__struct_fields__}))
simple = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


def refusal(kind, body):
    """The error for a body, None when it is taken."""
    try:
        Decoder(kind, Limits(), Counter(), BACKEND)(body)
    except Exception as exc:
        return describe(exc)
    return None


@given(st.dictionaries(known | st.text(), simple | st.lists(simple) | st.dictionaries(st.text(), simple)))
def test_any_object_is_taken_or_refused_cleanly(body):
    for kind in (ChatRequest, CompletionRequest, GenerateRequest):
        error = refusal(kind, msgspec.json.encode(body))
        assert error is None or error.status == 400


@given(st.binary())
def test_any_bytes_are_refused_cleanly(body):
    error = refusal(ChatRequest, body)
    assert error is not None
    assert error.status == 400


def test_depth_is_bounded_inside_values_too():
    deep = None
    for _ in range(70):
        deep = [deep]
    with pytest.raises(ApiError) as caught:
        decode(ChatRequest, CHAT | {"chat_template_kwargs": {"a": deep}})
    assert caught.value.code == "json_too_deep"
    # Many brackets are not many levels.
    decode(ChatRequest, CHAT | {"chat_template_kwargs": {"a": [[]] * 500}})


def test_token_lists_are_one_or_several():
    assert token_lists([1, 2], "prompt", 10) == [[1, 2]]
    assert token_lists([[1], [2, 3]], "prompt", 10) == [[1], [2, 3]]
    for bad in ([], [[]], [10], [-1], [True], [1.5], ["a"], [[1], 2], [[1], ["a"]], [None]):
        with pytest.raises((ApiError, msgspec.ValidationError)):
            token_lists(bad, "prompt", 10)


def test_a_missing_field_is_named():
    with pytest.raises(msgspec.ValidationError) as caught:
        decode(ChatRequest, {})
    assert describe(caught.value).param == "messages"


def test_a_wrong_key_is_named():
    with pytest.raises(msgspec.ValidationError) as caught:
        decode(ChatRequest, CHAT | {"logit_bias": {"x": 1}})
    assert describe(caught.value).param == "logit_bias"
