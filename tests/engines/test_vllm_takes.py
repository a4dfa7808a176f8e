"""Whatever passes the router's checks is taken by vLLM's own decoder, and by the checks of its own frontend."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from vllm_values import CONTEXT_LENGTH, VOCAB_SIZE, Call, anything, good_calls, many

from smg import InvalidRequest, SamplingParams
from smg.protocol import vllm

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

VERSION = "0.32.0"
RID = "0123456789abcdef01234567"
PROMPT = [1, 2, 3]


class Engine:
    """The code that an engine's input thread runs, and what vLLM's frontend would have checked before it."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of its own imports
            from vllm.v1.engine import EngineCoreRequest
            from vllm.v1.request import Request
            from vllm.v1.serial_utils import MsgpackDecoder
        self.decode: Callable[[bytes], Any] = MsgpackDecoder(EngineCoreRequest).decode
        self.preprocess: Callable[..., Any] = Request.from_engine_core_request

    def take(self, payload: bytes) -> Any:
        """The request as the scheduler gets it. Whatever raises here leaves the engine deaf, or ends the request."""
        return self.preprocess(self.decode(payload), None)


def assert_the_frontend_agrees(params: Any, max_logprobs: int) -> None:
    """What vLLM's own frontend asks of sampling parameters before it sends them."""
    model = SimpleNamespace(
        max_logprobs=max_logprobs,
        get_vocab_size=lambda: VOCAB_SIZE,
        logits_processors=None,
        is_diffusion=False,
    )
    params._verify_args()
    params._validate_logprobs(model)
    params._validate_logit_bias(model)
    params._validate_stop_token_ids(model)
    params._validate_allowed_token_ids(model)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


def sent(call: Call) -> bytes:
    return vllm.encode_add(
        RID,
        call.prompt,
        call.params,
        context_length=CONTEXT_LENGTH,
        priority=call.priority,
        version=VERSION,
        model=call.model,
    )


@settings(max_examples=300)
@given(call=good_calls())
def test_sound_requests_arrive_as_they_were_meant(engine: Engine, call: Call) -> None:
    taken = engine.take(sent(call))
    got, params = taken.sampling_params, call.params
    assert (taken.request_id, list(taken.prompt_token_ids), taken.priority) == (RID, call.prompt, call.priority)
    assert taken.max_tokens == (params.max_tokens or CONTEXT_LENGTH - len(call.prompt))
    top_k = 0 if params.temperature == 0 else max(0, params.top_k or 0)  # vLLM lets it go where it has no use
    assert (got.min_tokens, got.seed, got.top_k) == (params.min_tokens or 0, params.seed, top_k)
    assert (got.logit_bias or {}) == (params.logit_bias or {})
    eos = list(call.model.eos_token_ids)
    assert got.eos_token_id == (eos[0] if eos and not params.ignore_eos else None)
    assert got.all_stop_token_ids == {*eos, *(params.stop_token_ids or ())}
    assert taken.use_structured_output is (
        "structured_outputs" in params.extra.get("vllm", {})
        or any((params.json_schema, params.regex, params.ebnf, params.structural_tag))
    )


FIELDS = [name for name in SamplingParams.__dataclass_fields__ if name != "extra"]
ODD = anything | many


@settings(max_examples=600)
@given(
    call=good_calls(),
    values=st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=1),
    own=st.dictionaries(st.sampled_from(vllm.KNOWN_EXTRA), ODD, max_size=1),
)
def test_whatever_passes_our_validation_the_engine_takes(
    engine: Engine, call: Call, values: dict[str, Any], own: dict[str, Any]
) -> None:
    extra = {"vllm": {**call.params.extra.get("vllm", {}), **own}}
    try:
        payload = sent(replace(call, params=replace(call.params, **values, extra=extra)))
    except InvalidRequest as refusal:
        event(f"refused: {refusal.field.partition('[')[0]}")
        return
    event("passed")
    taken = engine.take(payload)
    assert_the_frontend_agrees(taken.sampling_params, call.model.max_logprobs)


DEAFENING = [  # field of SamplingParams, value, others; each ends the engine's input thread
    *[("temperature", value) for value in (-0.1, 2.5, float("nan"), float("inf"), "1")],
    *[("top_p", value) for value in (0.0, 1.1, "1")],
    *[("top_k", value) for value in (-2, 5.0, "5")],
    *[("min_p", value) for value in (-0.1, 1.1)],
    *[("frequency_penalty", value) for value in (-2.1, 2.1)],
    *[("presence_penalty", value) for value in (-2.1, 2.1)],
    *[("repetition_penalty", value) for value in (-0.1, 0.0)],
    *[("max_tokens", value) for value in (0, -1, 1.0, "9")],
    *[("min_tokens", value) for value in (-1, 1.0, 17)],  # max_tokens is 16
    *[("seed", value) for value in (1.5, "9")],
    *[("logprobs", value) for value in (-2, 1.5)],
    *[("stop_token_ids", value) for value in ([1.5], ["7"], 7)],
    *[("logit_bias", value) for value in ({"7": 1.0}, {7: "x"}, [1])],
]


@pytest.mark.parametrize(("field", "value"), DEAFENING, ids=repr)
def test_what_would_deafen_the_engine_is_refused_by_name(engine: Engine, field: str, value: Any) -> None:
    values = {"request_id": RID, "prompt_token_ids": PROMPT, "arrival_time": 1.0, "sampling_params": {field: value}}
    with pytest.raises(Exception):  # noqa: B017  (of several libraries, and all the same to the thread that it ends)
        engine.decode(vllm.encode_request(values, VERSION))
    params = SamplingParams(**{"max_tokens": 16, field: value})
    with pytest.raises(InvalidRequest) as refusal:
        vllm.encode_add(RID, PROMPT, params, version=VERSION)
    assert refusal.value.field == field


def test_constraints_that_exclude_each_other_would_deafen_it_and_are_refused(engine: Engine) -> None:
    both = {"json": "{}", "regex": "x", "_backend": "xgrammar"}
    values = {"request_id": RID, "prompt_token_ids": PROMPT, "arrival_time": 1.0}
    with pytest.raises(Exception):  # noqa: B017
        engine.decode(vllm.encode_request({**values, "sampling_params": {"structured_outputs": both}}, VERSION))
    with pytest.raises(InvalidRequest) as refusal:
        vllm.encode_add(RID, PROMPT, SamplingParams(json_schema="{}", regex="x"), version=VERSION)
    assert refusal.value.field == "regex"


def test_calls_arrive_with_their_arguments(engine: Engine) -> None:
    from vllm.v1.serial_utils import MsgpackDecoder

    decode = MsgpackDecoder().decode
    assert decode(vllm.encode_utility(7, "sleep", [1, "abort"])) == [0, 7, "sleep", [1, "abort"]]
    assert tuple(decode(vllm.encode_wave(3))) == (3, None)
    assert decode(vllm.encode_abort([RID])) == [RID]
