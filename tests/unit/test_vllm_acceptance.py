"""Whatever passes the router's checks is taken by the engine, of every version."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import vllm_structs
from hypothesis import given
from vllm_values import CONTEXT_LENGTH, VOCAB_SIZE, Call, calls, good_calls

from smg.errors import InvalidRequest
from smg.protocol import vllm

RID = "0123456789abcdef01234567"


def sent(call: Call, version: str) -> bytes:
    return vllm.encode_add(
        RID,
        call.prompt,
        call.params,
        context_length=CONTEXT_LENGTH,
        priority=call.priority,
        version=version,
        model=call.model,
    )


def taken(call: Call, version: str) -> Any:
    """What the engine makes of a request that passed the router's checks."""
    request = vllm_structs.read(sent(call, version), version)
    vllm_structs.admit(request, VOCAB_SIZE, CONTEXT_LENGTH, call.model.max_logprobs)
    return request


@given(call=good_calls())
def test_sound_requests_pass_and_arrive_as_they_were_meant(call: Call) -> None:
    for version in vllm_structs.VERSIONS:
        arrived_as_meant(taken(call, version), call)


def arrived_as_meant(request: Any, call: Call) -> None:
    assert (request.request_id, request.prompt_token_ids) == (RID, call.prompt)
    assert request.priority == call.priority
    got, params = request.sampling_params, call.params
    for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        value = getattr(params, name)
        assert getattr(got, name) == (getattr(vllm_structs.Sampling(), name) if value is None else value)
        assert type(getattr(got, name)) is float
    assert got.top_k == max(0, params.top_k or 0)
    assert got.max_tokens == (params.max_tokens or CONTEXT_LENGTH - len(call.prompt))
    assert (got.min_tokens, got.seed, got.logprobs) == (params.min_tokens or 0, params.seed, params.logprobs)
    eos = list(call.model.eos_token_ids)
    wanted = set(params.stop_token_ids or ())
    assert got.all_stop_token_ids == wanted | set(eos)
    assert got.eos_token_id == (eos[0] if eos and not params.ignore_eos else None)
    assert set(got.stop_token_ids or ()) == wanted | set([] if params.ignore_eos else eos[1:])
    assert (got.logit_bias or {}) == (params.logit_bias or {})
    extra = params.extra.get("vllm", {})
    assert (got.allowed_token_ids, request.cache_salt) == (extra.get("allowed_token_ids"), extra.get("cache_salt"))
    assert (got.structured_outputs is not None) is (
        "structured_outputs" in extra or any((params.json_schema, params.regex, params.ebnf, params.structural_tag))
    )


@given(call=calls())
def test_whatever_passes_is_taken_by_every_version(call: Call) -> None:
    try:
        payload = sent(call, "0.32.0")
    except InvalidRequest:
        return
    assert type(msgpack.unpackb(payload, strict_map_key=False)) is list
    for version in vllm_structs.VERSIONS:
        taken(call, version)


FATAL: dict[str, Any] = {
    "temperature": 3.0,
    "top_p": 0.0,
    "max_tokens": 0,
    "min_tokens": 17,
    "presence_penalty": -2.5,
    "frequency_penalty": 2.5,
    "repetition_penalty": 0.0,
    "logprobs": -2,
    "n": 0,
    "logit_bias": {"5": 1.0},
    "seed": 1.5,
    "structured_outputs": {},
    "stop_token_ids": [1.0],
    "extra_args": {"a": msgpack.ExtType(1, b"pickle")},
}


@pytest.mark.parametrize("version", vllm_structs.VERSIONS)
@pytest.mark.parametrize("name", FATAL)
def test_the_structs_refuse_what_makes_an_engine_deaf(name: str, version: str) -> None:
    payload = vllm.encode_request(
        {"request_id": "r", "prompt_token_ids": [1], "arrival_time": 1.0, "sampling_params": {name: FATAL[name]}},
        version,
    )
    with pytest.raises(vllm_structs.Refused):
        vllm_structs.read(payload, version)


@pytest.mark.parametrize("version", vllm_structs.VERSIONS)
def test_the_structs_refuse_the_elements_of_another_layout(version: str) -> None:
    element_of_0_11: list[Any] = [RID, [1], None, {}, None, 151645, 1.5, None, None, None]
    with pytest.raises(vllm_structs.Refused):
        vllm_structs.read(msgpack.packb(element_of_0_11), version)
