"""vLLM's requests: its own encoders' bytes in every layout, and every parameter under its name."""

from __future__ import annotations

import time
from typing import Any

import msgpack
import pytest
from vectors import Vector, of_kind

from smg.errors import DecodeError, InvalidRequest
from smg.protocol import vllm
from smg.protocol.vllm import PREFIX, REQUEST, Model, layout
from smg.sampling import SamplingParams

WIRE_ID = "00c0ffee0000002a00000007"
REQUESTS = [v for v in of_kind("vllm", "request_add") if layout(v.version)]
KNOWN = Model(eos_token_ids=(2, 7), vocab_size=1000)

# ---------------------------------------------------------- layouts


def names(version: str) -> list[str]:
    elements = layout(version)
    assert elements is not None
    return [element.name for element in elements]


def elements_of(payload: bytes) -> list[bytes]:
    """A request's elements as they are packed; the sampling map without its header.

    msgspec gives a map that leaves out defaults a 16-bit header, whatever its size.
    """
    unpacker = msgpack.Unpacker()
    unpacker.feed(payload)
    packed = []
    for name in [element.name for element in REQUEST[: unpacker.read_array_header()]]:
        start = unpacker.tell()
        if name == "sampling_params" and payload[start] != 0xC0:
            entries = unpacker.read_map_header()
            start = unpacker.tell()
            for _ in range(2 * entries):
                unpacker.skip()
        else:
            unpacker.skip()
        packed.append(payload[start : unpacker.tell()])
    return packed


@pytest.mark.parametrize("vector", REQUESTS, ids=str)
def test_requests_encode_to_the_engines_own_bytes(vector: Vector) -> None:
    values = dict(zip(names(vector.version), vector.decoded, strict=False))
    encoded = elements_of(vllm.encode_request(values, vector.version))
    assert encoded[: len(vector.decoded)] == elements_of(vector.frame)
    assert len(encoded) == len(names(vector.version))


@pytest.mark.parametrize("vector", REQUESTS, ids=str)
def test_requests_decode_to_what_the_vectors_say(vector: Vector) -> None:
    defaults = {element.name: element.default for element in layout(vector.version) or ()}
    said = dict(zip(names(vector.version), vector.decoded, strict=False))
    assert vllm.decode_request(vector.frame, vector.version) == defaults | said


def test_the_vectors_have_two_layouts_and_the_versions_between_have_their_own() -> None:
    assert {v.version for v in REQUESTS} == {"0.26.0", "0.32.0"}
    assert [len(names(v)) for v in ("0.20.0", "0.21.0", "0.26.0", "0.28.0", "0.30.1", "0.31.0")] == [
        17, 20, 20, 21, 21, 22,
    ]  # fmt: skip
    assert names("0.32.0") == [element.name for element in REQUEST]


@pytest.mark.parametrize("version", ["0.20.2", "0.26.0", "0.32.0"])
def test_the_elements_before_the_ninth_are_the_same_in_every_layout(version: str) -> None:
    assert names(version)[:PREFIX] == [element.name for element in REQUEST[:PREFIX]]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.0rc1", "0.32.1.dev5+g1a2b3c4", "1.0.0", "10.2"])
def test_versions_of_every_spelling_are_told(version: str) -> None:
    assert layout(version) == REQUEST


@pytest.mark.parametrize("version", ["", "dev", "0.1.dev1+g1a2b3c4", "0.19.1", "v0.32", "٠.٣٢"])
def test_versions_that_say_nothing_have_no_layout(version: str) -> None:
    assert layout(version) is None
    with pytest.raises(ValueError, match="no known layout"):
        vllm.encode_request({}, version)


def test_a_request_is_the_prefix_that_every_version_reads() -> None:
    before = time.time()
    elements = msgpack.unpackb(vllm.encode_add(WIRE_ID, [1, 2, 3], version="0.32.0"))
    assert len(elements) == PREFIX
    assert (elements[0], elements[1], elements[2], elements[4]) == (WIRE_ID, [1, 2, 3], None, None)
    assert before <= elements[5] <= time.time()
    assert elements[6:] == [None, None, None]


def test_a_request_says_what_the_vector_of_the_shortest_one_says() -> None:
    (vector,) = [v for v in REQUESTS if v.name == "0.32.0.add_minimum_prefix"]
    params = SamplingParams(max_tokens=8, temperature=0)
    elements = msgpack.unpackb(vllm.encode_add("min", [1, 2, 3], params, model=Model(eos_token_ids=[2])))
    elements[5] = vector.decoded[5]
    assert elements == vector.decoded


def test_a_request_says_what_the_vector_with_every_knob_says() -> None:
    (vector,) = [v for v in REQUESTS if v.name == "0.32.0.add_full_knobs"]
    params = SamplingParams(
        presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.05, temperature=0.6, top_p=0.95, top_k=20,
        min_p=0.05, seed=42, max_tokens=512, min_tokens=2, logprobs=5, stop_token_ids=[151643],
        logit_bias={5: -100, 151645: 1.5}, extra={"vllm": {"cache_salt": "tenant-a"}},
    )  # fmt: skip
    payload = vllm.encode_add(
        "knobs", vector.decoded[1], params, priority=-5, version="0.32.0", model=Model(eos_token_ids=[151645])
    )
    got, said = vllm.decode_request(payload, "0.32.0"), vllm.decode_request(vector.frame, "0.32.0")
    for name in ("arrival_time", "data_parallel_rank", "current_wave", "trace_headers", "external_req_id"):
        got.pop(name), said.pop(name)
    for name in ("stop", "bad_words", "skip_reading_prefix_cache"):  # what the engine's own structs add
        said["sampling_params"].pop(name)
    assert got == said


@pytest.mark.parametrize("version", ["0.20.2", "0.26.0", "0.32.0", "0.32.0+cpu"])
def test_a_priority_goes_to_its_place_and_nothing_after_it(version: str) -> None:
    payload = vllm.encode_add(WIRE_ID, [1], priority=-7, version=version)
    request = vllm.decode_request(payload, version)
    elements = layout(version) or ()
    defaults = {element.name: element.default for element in elements[PREFIX:]}
    assert {name: request[name] for name in defaults} == defaults | {"priority": -7}
    assert len(msgpack.unpackb(payload)) == names(version).index("priority") + 1


@pytest.mark.parametrize("version", ["", "0.1.dev1"])
def test_a_priority_is_refused_where_its_place_is_unknown(version: str) -> None:
    vllm.validate([1], version=version)
    with pytest.raises(InvalidRequest, match="where to put it is unknown") as caught:
        vllm.validate([1], priority=1, version=version)
    assert caught.value.field == "priority"


@pytest.mark.parametrize("priority", [1.0, True, "1", None, 2**63, -(2**63)])
def test_a_priority_is_an_integer(priority: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        vllm.validate([1], priority=priority, version="0.32.0")
    assert caught.value.field == "priority"


@pytest.mark.parametrize("suffix", ["", "-x", "-" + "n" * 6, "-" + "n" * 7, "-" + "n" * 32])
@pytest.mark.parametrize("priority", [0, 5])
def test_an_id_of_any_length_is_patched_at_one_offset(suffix: str, priority: int) -> None:
    payload = bytearray(vllm.encode_add("0" * 24 + suffix, [1, 2, 3], priority=priority, version="0.32.0"))
    payload[vllm.RID_OFFSET : vllm.RID_OFFSET + 24] = WIRE_ID.encode()
    assert vllm.decode_request(bytes(payload), "0.32.0")["request_id"] == WIRE_ID + suffix


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgpack.packb({}), msgpack.packb([1] * 8), b"\x99"])
def test_requests_that_no_engine_can_read_do_not_decode(payload: bytes) -> None:
    with pytest.raises(DecodeError) as caught:
        vllm.decode_request(payload, "0.32.0")
    assert caught.value.column == "request"


# ---------------------------------------------------------- other messages


@pytest.mark.parametrize("vector", of_kind("vllm", "request_abort"), ids=str)
def test_aborts_encode_to_the_engines_own_bytes(vector: Vector) -> None:
    assert vllm.encode_abort(vector.decoded) == vector.frame


def test_waves_are_started_for_every_rank() -> None:
    vectors = [v for v in of_kind("vllm", "request_start_dp_wave") if v.decoded[1] is None]
    assert vectors
    for vector in vectors:
        assert vllm.encode_wave(vector.decoded[0]) == vector.frame
    for wave in (-1, 2**63, 1.0, True):
        with pytest.raises(InvalidRequest):
            vllm.encode_wave(wave)  # type: ignore[arg-type]


def test_message_types_are_the_engines() -> None:
    assert (vllm.ADD, vllm.ABORT, vllm.START_DP_WAVE, vllm.UTILITY) == (b"\0", b"\1", b"\2", b"\3")
    assert vllm.HAS_PRIORITY


# ---------------------------------------------------------- sampling parameters


def sent(params: SamplingParams | None = None, prompt: Any = (1, 2, 3), **more: Any) -> dict[str, Any]:
    """The sampling map of an encoded request."""
    payload = vllm.encode_add(WIRE_ID, prompt, params, **more)
    sampling: dict[str, Any] = vllm.decode_request(payload, "0.32.0")["sampling_params"]
    return sampling


def test_a_request_without_parameters_says_how_long_it_may_be_and_where_to_stop() -> None:
    expected = {"max_tokens": 7, "_eos_token_id": 2, "stop_token_ids": [7], "_all_stop_token_ids": [2, 7]}
    assert sent(context_length=10, model=KNOWN) == expected
    assert sent(context_length=10) == {"max_tokens": 7}


def test_the_length_is_always_said_since_the_engines_default_is_16() -> None:
    assert sent(SamplingParams(max_tokens=16)) == {"max_tokens": 16}
    assert sent(SamplingParams(max_tokens=99), context_length=10) == {"max_tokens": 99}
    assert sent()["max_tokens"] == 2**31 - 1  # to the end of the context, wherever that is


def test_every_parameter_arrives_under_its_wire_name() -> None:
    params = SamplingParams(
        max_tokens=100, min_tokens=2, temperature=0, top_p=0.9, top_k=40, min_p=0.05, frequency_penalty=-2,
        presence_penalty=2, repetition_penalty=1.5, seed=7, stop_token_ids=[2, 3, 3], ignore_eos=True, logprobs=3,
        logit_bias={5: -100, 128000: 2.5}, regex="a+",
        extra={
            "vllm": {
                "prompt_logprobs": 1,
                "logprob_token_ids": [4, 5, 6],
                "allowed_token_ids": [9],
                "bad_words_token_ids": [[1, 2], (3,)],
                "skip_reading_prefix_cache": False,
                "thinking_token_budget": 10,
                "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
                "extra_args": {"kv_transfer_params": {"do_remote_decode": True}},
                "cache_salt": None,
            },
            "tokenspeed": {"not": "ours"},
        },
    )  # fmt: skip
    got = sent(params)
    assert got == {
        "max_tokens": 100, "min_tokens": 2, "temperature": 0.0, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
        "frequency_penalty": -2.0, "presence_penalty": 2.0, "repetition_penalty": 1.5, "seed": 7,
        "stop_token_ids": [2, 3], "_all_stop_token_ids": [2, 3], "logprobs": 3,
        "logit_bias": {5: -100.0, 128000: 2.5}, "structured_outputs": {"regex": "a+", "_backend": "xgrammar"},
        "prompt_logprobs": 1, "logprob_token_ids": [4, 5, 6], "allowed_token_ids": [9],
        "_bad_words_token_ids": [[1, 2], [3]], "skip_reading_prefix_cache": False, "thinking_token_budget": 10,
        "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
        "extra_args": {"kv_transfer_params": {"do_remote_decode": True}},
    }  # fmt: skip
    assert type(got["temperature"]) is type(got["logit_bias"][5]) is float
    assert type(got["top_k"]) is int


def test_values_equal_to_the_engines_defaults_are_left_out() -> None:
    defaults: dict[str, Any] = {
        "temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0, "frequency_penalty": 0, "presence_penalty": -0.0,
        "repetition_penalty": 1, "min_tokens": 0, "stop_token_ids": [], "logit_bias": {}, "ignore_eos": False,
    }  # fmt: skip
    extra: dict[str, Any] = {"vllm": {"bad_words_token_ids": [], "extra_args": {}, "logprob_token_ids": []}}
    assert sent(SamplingParams(**defaults, max_tokens=5, extra=extra)) == {"max_tokens": 5}


@pytest.mark.parametrize(
    ("given", "ignore", "expected"),
    [
        (None, False, {"_eos_token_id": 2, "stop_token_ids": [7], "_all_stop_token_ids": [2, 7]}),
        (None, True, {"_all_stop_token_ids": [2, 7]}),
        ([9], False, {"_eos_token_id": 2, "stop_token_ids": [9, 7], "_all_stop_token_ids": [2, 7, 9]}),
        ([9], True, {"stop_token_ids": [9], "_all_stop_token_ids": [2, 7, 9]}),
        ([7, 2], False, {"_eos_token_id": 2, "stop_token_ids": [7, 2], "_all_stop_token_ids": [2, 7]}),
    ],
)
def test_the_router_owns_the_end_of_sequence(given: Any, ignore: bool, expected: Any) -> None:
    got = sent(SamplingParams(max_tokens=5, stop_token_ids=given, ignore_eos=ignore), model=KNOWN)
    assert got == {"max_tokens": 5} | expected


def test_a_request_without_a_seed_is_sent_without_one() -> None:
    assert "seed" not in sent()
    assert sent(SamplingParams(seed=0))["seed"] == 0


def test_lora_and_cache_salt_have_elements_of_their_own() -> None:
    extra = {"vllm": {"lora": ["name", 1, "/path"], "cache_salt": "salt"}}
    request = vllm.decode_request(
        vllm.encode_add(WIRE_ID, [1], SamplingParams(extra=extra), model=Model(lora=True)), "0.32.0"
    )
    assert (request["lora_request"], request["cache_salt"]) == (["name", 1, "/path"], "salt")
