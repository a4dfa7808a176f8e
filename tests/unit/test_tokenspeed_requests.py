"""TokenSpeed's requests: its own encoders' bytes, every parameter, and every value that it would refuse."""

from __future__ import annotations

import math
from array import array
from typing import Any

import msgpack
import numpy as np
import pytest
from vectors import Vector, of_kind

from smg.errors import DecodeError, InvalidRequest
from smg.protocol import tokenspeed
from smg.protocol.tokenspeed import SAMPLING, Request
from smg.sampling import SamplingParams

REQUESTS = of_kind("tokenspeed", "request_add")
WIRE_ID = "00c0ffee0000002a00000007"


def pack(*elements: Any, tag: str = "TokenizedGenerateReqInput") -> bytes:
    packed: bytes = msgpack.packb([tag, *elements])
    return packed


def prefix_of_11(frame: bytes) -> bytes:
    """A request's first 11 elements as an array of their own."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(frame)
    assert unpacker.read_array_header() >= 11
    start = unpacker.tell()
    for _ in range(11):
        unpacker.skip()
    return b"\x9b" + frame[start : unpacker.tell()]


WHOLE = [v for v in REQUESTS if len(v.decoded) >= 11 and len(v.decoded[5]) == len(SAMPLING)]


def record(decoded: list[Any]) -> Request:
    names = [field.name for field in SAMPLING]
    return Request(decoded[1], decoded[4], dict(zip(names, decoded[5], strict=False)), *decoded[6:11])


@pytest.mark.parametrize("vector", WHOLE, ids=str)
def test_requests_encode_to_the_engines_own_first_11_elements(vector: Vector) -> None:
    assert tokenspeed.encode_request(record(vector.decoded)) == prefix_of_11(vector.frame)


def test_the_request_vectors_have_both_forms_of_normalisation() -> None:
    assert {v.decoded[5][-1] for v in WHOLE} == {False, True}


@pytest.mark.parametrize("vector", REQUESTS, ids=str)
def test_requests_decode_as_the_engine_reads_them(vector: Vector) -> None:
    request = tokenspeed.decode_request(vector.frame)
    given_values = dict(zip([field.name for field in SAMPLING], vector.decoded[5], strict=False))
    assert (request.rid, request.input_ids) == (vector.decoded[1], vector.decoded[4])
    assert request.sampling == {field.name: field.default for field in SAMPLING} | given_values
    optional = (request.return_logprob, request.logprob_start_len, request.top_logprobs_num)
    assert [*optional, request.token_ids_logprob, request.stream] == [
        *vector.decoded[6:11],
        *[False, -1, 0, None, False][max(0, len(vector.decoded) - 6) :],
    ]


@pytest.mark.parametrize("vector", of_kind("tokenspeed", "request_abort"), ids=str)
def test_aborts_encode_and_decode(vector: Vector) -> None:
    assert tokenspeed.encode_abort(vector.decoded) == vector.frame
    assert tokenspeed.decode_abort(vector.frame) == vector.decoded


@pytest.mark.parametrize(
    ("payload", "column"),
    [
        (b"", "request"),
        (b"\xc1", "request"),
        (msgpack.packb({}), "request"),
        (pack("r", None, None, [1]), "request"),
        (pack("r", None, None, [1], [], tag="TokenizedEmbeddingReqInput"), "request"),
        (pack(5, None, None, [1], []), "rid"),
        (pack("r", None, None, [-1], []), "input_ids"),
        (pack("r", None, None, [1], None), "sampling_params"),
    ],
)
def test_requests_that_the_engine_drops_do_not_decode(payload: bytes, column: str) -> None:
    with pytest.raises(DecodeError) as caught:
        tokenspeed.decode_request(payload)
    assert caught.value.column == column


@pytest.mark.parametrize("payload", [b"", msgpack.packb("r"), msgpack.packb(["r", 1])])
def test_aborts_that_the_engine_drops_do_not_decode(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        tokenspeed.decode_abort(payload)


def sent(params: SamplingParams | None = None, prompt: Any = (1, 2, 3), **more: Any) -> Request:
    """What the engine reads of an encoded request."""
    return tokenspeed.decode_request(tokenspeed.encode_add(WIRE_ID, prompt, params, **more))


def test_a_request_without_parameters_has_the_engines_defaults_and_a_seed() -> None:
    request = sent()
    seed = request.sampling.pop("seed")
    assert 0 <= seed < 2**32
    assert request.sampling == {field.name: field.default for field in SAMPLING if field.name != "seed"}
    assert request.sampling["is_normalized"] is False
    assert (request.rid, request.input_ids, request.stream) == (WIRE_ID, [1, 2, 3], True)
    assert (request.return_logprob, request.logprob_start_len, request.top_logprobs_num) == (False, -1, 0)


def test_a_request_is_11_elements_with_29_in_its_sampling_array() -> None:
    elements = msgpack.unpackb(tokenspeed.encode_add(WIRE_ID, [1]))
    assert len(elements) == 11
    assert len(elements[5]) == 29
    assert (elements[2], elements[3], elements[9]) == (None, None, None)


def test_seeds_that_nobody_chose_differ() -> None:
    assert len({sent().sampling["seed"] for _ in range(8)}) > 1


def test_every_parameter_arrives_raw_under_its_wire_name() -> None:
    params = SamplingParams(
        max_tokens=100,
        min_tokens=2,
        temperature=0,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        frequency_penalty=-2,
        presence_penalty=2,
        repetition_penalty=1.5,
        seed=7,
        stop_token_ids=[2, 3],
        ignore_eos=True,
        logprobs=0,
        logit_bias={5: -100, 128000: 2.5},
        regex="a+",
        extra={
            "tokenspeed": {
                "thinking_budget": 10,
                "custom_params": {"k": [1]},
                "stream_interval": 4,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
                "no_stop_trim": True,
            },
            "vllm": {"not": "ours"},
        },
    )
    request = sent(params)
    assert request.return_logprob is True
    expected = {
        "max_new_tokens": 100,
        "min_new_tokens": 2,
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "frequency_penalty": -2.0,
        "presence_penalty": 2.0,
        "repetition_penalty": 1.5,
        "seed": 7,
        "stop_token_ids": [2, 3],
        "ignore_eos": True,
        "logit_bias": {"5": -100.0, "128000": 2.5},
        "regex": "a+",
        "thinking_budget": 10,
        "custom_params": {"k": [1]},
        "stream_interval": 4,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    assert request.sampling == {field.name: field.default for field in SAMPLING} | expected
    assert type(request.sampling["temperature"]) is float


@pytest.mark.parametrize("name", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_each_constraint_arrives(name: str) -> None:
    assert sent(SamplingParams(**{name: "x"})).sampling[name] == "x"


def test_max_tokens_fills_the_context_only_when_nobody_said() -> None:
    assert sent(context_length=10).sampling["max_new_tokens"] == 7
    assert sent(SamplingParams(max_tokens=99), context_length=10).sampling["max_new_tokens"] == 99
    assert sent(SamplingParams(max_tokens=99)).sampling["max_new_tokens"] == 99
    assert sent().sampling["max_new_tokens"] is None


@pytest.mark.parametrize("suffix", ["", "-x", "-" + "n" * 6, "-" + "n" * 7, "-" + "n" * 32])
def test_an_id_of_any_length_is_patched_at_one_offset(suffix: str) -> None:
    payload = bytearray(tokenspeed.encode_add("0" * 24 + suffix, [1, 2, 3]))
    payload[tokenspeed.RID_OFFSET : tokenspeed.RID_OFFSET + 24] = WIRE_ID.encode()
    assert tokenspeed.decode_request(bytes(payload)).rid == WIRE_ID + suffix


IDS = [0, 1, 127, 128, 255, 256, 65535, 65536, 151935, 2**31 - 1]


@pytest.mark.parametrize(
    "prompt",
    [
        IDS,
        tuple(IDS),
        np.array(IDS, dtype=np.int64),
        np.array(IDS, dtype=np.uint32),
        np.array(IDS, dtype=">i4"),
        np.array([IDS, IDS], dtype=np.int32).T[:, 0],
        array("q", IDS),
        [np.int64(i) for i in IDS],
    ],
    ids=["list", "tuple", "int64", "uint32", "big-endian", "strided", "array", "numpy scalars"],
)
def test_a_prompt_may_be_any_sequence_of_ints(prompt: Any) -> None:
    assert sent(prompt=prompt).input_ids == IDS


@pytest.mark.parametrize("length", [1, 15, 16, 65535, 65536])
def test_prompts_of_every_header_width_are_packed_as_msgpack_packs_them(length: int) -> None:
    prompt = range(length)
    assert sent(prompt=prompt).input_ids == list(prompt)
    assert msgpack.packb(list(prompt)) in tokenspeed.encode_add(WIRE_ID, prompt)


NAN, INF = math.nan, math.inf
I31 = 2**31 - 1

# field -> values that the engine takes, values that it refuses
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "max_tokens": ([1, I31, np.int64(5)], [0, -1, I31 + 1, 2**64, 1.0, True, "1", NAN]),
    "min_tokens": ([0, 1, I31], [-1, I31 + 1, 1.0, False, "1"]),
    "temperature": ([0, 0.0, 1, 2.5, 100.0, np.float32(0.5)], [-0.1, NAN, INF, -INF, True, "1", 10**400, 1j]),
    "top_p": ([1e-9, 0.5, 1, 1.0], [0, 0.0, -0.5, 1.0000001, 2, NAN, INF, True, "1"]),
    "top_k": ([-1, 1, 127], [0, -2, 128, 2**30, 1.0, True, "1", NAN]),
    "min_p": ([0, 0.5, 1], [-0.01, 1.01, NAN, INF, False]),
    "frequency_penalty": ([-2, 0, 2.0], [-2.01, 2.01, NAN, -INF, True]),
    "presence_penalty": ([-2, 0, 2.0], [-2.01, 2.01, NAN, INF, False]),
    "repetition_penalty": ([0, 1, 2.0], [-0.01, 2.01, NAN, INF, True]),
    "seed": ([0, 1, 2**32 - 1, 2**63 - 1], [-1, 2**63, 1.0, True, "1"]),
    "stop_token_ids": (
        [[], [0], (1, 2), [2**32 - 1], {7}],
        [[-1], [2**32], [1.0], [True], ["1"], [None], 5, "12"],
    ),
    "ignore_eos": ([True, False], [0, 1, "yes", 1.0]),
    "logprobs": ([0], [1, 5, -1, 0.0, False, "0"]),
    "logit_bias": (
        [{}, {0: 1}, {2**32 - 1: -100.5}],
        [
            {-1: 0.0},
            {2**32: 0.0},
            {"5": 0.0},
            {True: 0.0},
            {1: NAN},
            {1: INF},
            {1: "x"},
            {1: True},
            {1: None},
            [(1, 2.0)],
            "x",
        ],
    ),
    "json_schema": (["{}"], ["", 5, {}, b"{}", "\ud800"]),
    "regex": (["a"], ["", 5, b"a", "\udcff"]),
    "ebnf": (["root ::= 'a'"], ["", True]),
    "structural_tag": (["{}"], ["", []]),
}

EXTRA_VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "thinking_budget": ([0, 5, None], [-1, 1.0, True, 2**31]),
    "stream_interval": ([1, 50, None], [0, -1, 2.0, True]),
    "custom_params": (
        [{}, {"a": {"b": [1, None, "x"]}}, None],
        [5, [1], {1: 2}, {"a": object()}, {"a": 2**65}, {"a": [msgpack.ExtType(5, b"x")]}, {"a": msgpack.Timestamp(1)}],
    ),
    "skip_special_tokens": ([True, False, None], [0, "no"]),
    "spaces_between_special_tokens": ([True, False], [1, 0.0]),
    "no_stop_trim": ([True, False], [1, "x"]),
}


def cases(at: int) -> list[Any]:
    plain = [pytest.param(name, v, {name: v}, id=f"{name}={v!r:.20}") for name in VALUES for v in VALUES[name][at]]
    extra = [
        pytest.param(f"extra['tokenspeed']['{name}']", v, {"extra": {"tokenspeed": {name: v}}}, id=f"{name}={v!r:.20}")
        for name in EXTRA_VALUES
        for v in EXTRA_VALUES[name][at]
    ]
    return plain + extra


@pytest.mark.parametrize(("name", "value", "params"), cases(0))
def test_values_that_the_engine_takes_are_sent(name: str, value: Any, params: dict[str, Any]) -> None:
    tokenspeed.validate([1], SamplingParams(**params))
    sent(SamplingParams(**params))


@pytest.mark.parametrize(("name", "value", "params"), cases(1))
def test_values_that_the_engine_refuses_are_refused_by_name(name: str, value: Any, params: dict[str, Any]) -> None:
    for check in (tokenspeed.validate, lambda prompt, given: tokenspeed.encode_add(WIRE_ID, prompt, given)):
        with pytest.raises(InvalidRequest) as caught:
            check([1], SamplingParams(**params))
        assert caught.value.field == name
        assert caught.value.allowed


def test_every_parameter_of_the_api_is_checked_here() -> None:
    assert VALUES.keys() | {"extra"} == set(SamplingParams.__dataclass_fields__)
    assert EXTRA_VALUES.keys() == tokenspeed.FROM_EXTRA.keys()


@pytest.mark.parametrize(
    ("extra", "field", "value"),
    [
        ({"tokenspeed": {"top_kk": 1}}, "extra['tokenspeed']", "top_kk"),
        ({"tokenspeed": {"is_normalized": True}}, "extra['tokenspeed']", "is_normalized"),
        ({"tokenspeed": 5}, "extra['tokenspeed']", 5),
        ([1], "extra", [1]),
    ],
)
def test_extra_fields_that_the_engine_does_not_have_are_refused(extra: Any, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenspeed.validate([1], SamplingParams(extra=extra))
    assert (caught.value.field, caught.value.value) == (field, value)


def test_two_constraints_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="json_schema is set") as caught:
        tokenspeed.validate([1], SamplingParams(json_schema="{}", structural_tag="{}"))
    assert caught.value.field == "structural_tag"


@pytest.mark.parametrize(
    ("minimum", "params", "context"), [(6, {"max_tokens": 5}, None), (8, {}, 10), (2, {"max_tokens": 1}, 10)]
)
def test_min_tokens_over_max_tokens_is_refused(minimum: int, params: dict[str, Any], context: int | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenspeed.validate([1, 2, 3], SamplingParams(min_tokens=minimum, **params), context_length=context)
    assert (caught.value.field, caught.value.value) == ("min_tokens", minimum)
    tokenspeed.validate([1, 2, 3], SamplingParams(min_tokens=minimum - 1, **params), context_length=context)


@pytest.mark.parametrize(
    ("prompt", "value"),
    [
        ([], []),
        ((), ()),
        ([1, -1], -1),
        ([2**32], 2**32),
        ([1.0], 1.0),
        ([True], True),
        ([None], None),
        (["1"], "1"),
        ([2**70], 2**70),
        ([[1]], [1]),
        (np.array([1.5]), 1.5),
        (np.array([True]), True),
        ("12", "12"),
        (b"12", b"12"),
        (None, None),
        (5, 5),
        ({1: 2}, {1: 2}),
        ({1}, {1}),
    ],
)
def test_prompts_that_the_engine_cannot_take_are_refused(prompt: Any, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenspeed.validate(prompt)
    assert caught.value.field == "prompt_token_ids"
    assert caught.value.value == value


def test_a_bad_token_is_named_by_its_place() -> None:
    with pytest.raises(InvalidRequest, match="element 2 is not"):
        tokenspeed.validate([1, 2, -3, 4])


def test_a_prompt_must_leave_room_in_the_context() -> None:
    tokenspeed.validate([1] * 9, context_length=10)
    for length in (10, 11):
        with pytest.raises(InvalidRequest, match="context of 10"):
            tokenspeed.validate([1] * length, context_length=10)


def test_parameters_of_another_type_are_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenspeed.validate([1], {"temperature": 1.0})  # type: ignore[arg-type]
    assert caught.value.field == "params"
