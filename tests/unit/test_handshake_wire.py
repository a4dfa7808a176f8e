"""The handshake's messages against bytes of TokenSpeed's own encoders, and against engines that differ."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vectors import Vector, of_kind

from smg.errors import HandshakeError
from smg.protocol import handshake
from smg.protocol.handshake import Init, Registration, Status

STATUSES = of_kind("tokenspeed", "handshake_hello", "handshake_ready")
INITS = of_kind("tokenspeed", "handshake_init")
REGISTRATIONS = of_kind("tokenspeed", "ready_response")


# ---------------------------------------------------------- identities


@pytest.mark.parametrize(
    ("index", "identity"),
    [(0, b"\x00\x00"), (1, b"\x01\x00"), (256, b"\x00\x01"), (258, b"\x02\x01"), (65535, b"\xff\xff")],
)
def test_an_identity_is_the_index_in_two_little_endian_bytes(index: int, identity: bytes) -> None:
    assert handshake.identity(index) == identity
    assert handshake.index(identity) == index


@pytest.mark.parametrize("index", [-1, 65536])
def test_an_index_out_of_range_has_no_identity(index: int) -> None:
    with pytest.raises(ValueError, match="65535"):
        handshake.identity(index)


@pytest.mark.parametrize("identity", [b"", b"\x00", b"\x00\x00\x00", b"\x00\x6b\x8b\x45\x67"])
def test_an_identity_of_another_length_has_no_index(identity: bytes) -> None:
    assert handshake.index(identity) is None


# ---------------------------------------------------------- HELLO and READY


@pytest.mark.parametrize("vector", STATUSES, ids=str)
def test_hello_and_ready_go_both_ways(vector: Vector) -> None:
    assert handshake.decode_status(vector.frame) == Status(**vector.decoded)
    assert handshake.encode_status(**vector.decoded) == vector.frame


def test_hello_of_vllm_has_no_hash_and_is_not_local() -> None:
    frame = handshake.encode_status(handshake.HELLO, local=False)
    assert msgpack.unpackb(frame) == {"status": "HELLO", "local": False, "headless": True}
    assert handshake.decode_status(frame) == Status("HELLO", headless=True)


def test_status_needs_nothing_but_a_status_and_ignores_what_it_does_not_know() -> None:
    assert handshake.decode_status(msgpack.packb({"status": "READY"})) == Status("READY")
    frame = msgpack.packb({"status": "READY", "num_gpu_blocks": 7, 5: None, "local": None})
    assert handshake.decode_status(frame) == Status("READY")
    assert handshake.decode_status(msgpack.packb({"status": "GOODBYE"})).status == "GOODBYE"


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({}, "no status"),
        ({"status": None}, "no status"),
        ({"status": 5}, "status must be text, is 5"),
        ({"status": b"HELLO"}, "status must be text"),
        ({"status": "HELLO", "local": 1}, "local must be true or false, is 1"),
        ({"status": "HELLO", "headless": "yes"}, "headless must be true or false"),
        ({"status": "HELLO", "parallel_config_hash": 3}, "parallel_config_hash must be text"),
    ],
)
def test_a_bad_status_names_its_key(message: dict[str, Any], named: str) -> None:
    with pytest.raises(HandshakeError, match=named):
        handshake.decode_status(msgpack.packb(message))


# ---------------------------------------------------------- INIT


@pytest.mark.parametrize("vector", INITS, ids=str)
def test_init_is_read_as_the_engine_reads_it(vector: Vector) -> None:
    addresses = vector.decoded["addresses"]
    expected = Init(addresses["inputs"], addresses["outputs"], vector.decoded["parallel_config"])
    assert handshake.decode_init(vector.frame) == expected


def test_init_encodes_to_the_same_bytes() -> None:
    whole = [v for v in INITS if "coordinator_input" in v.decoded["addresses"]]
    assert whole
    for vector in whole:
        addresses = vector.decoded["addresses"]
        assert handshake.encode_init(addresses["inputs"], addresses["outputs"]) == vector.frame


def test_init_carries_a_parallel_config() -> None:
    frame = handshake.encode_init(["tcp://h:1"], ["tcp://h:2"], {"data_parallel_size": 2})
    assert handshake.decode_init(frame) == Init(["tcp://h:1"], ["tcp://h:2"], {"data_parallel_size": 2})


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({}, "no inputs"),
        ({"addresses": {"inputs": ["a"], "outputs": []}}, "no outputs"),
        ({"addresses": ["a"]}, "addresses must be a map"),
        ({"addresses": {"inputs": "a", "outputs": ["b"]}}, "inputs must be an array of text"),
        ({"addresses": {"inputs": ["a"], "outputs": [5]}}, "outputs must be an array of text"),
    ],
)
def test_a_bad_init_names_its_key(message: dict[str, Any], named: str) -> None:
    with pytest.raises(HandshakeError, match=named):
        handshake.decode_init(msgpack.packb(message))


# ---------------------------------------------------------- registration


def fields(decoded: dict[str, Any]) -> dict[str, Any]:
    """A registration's map by field."""
    return {"block_size" if key == "prefix_granularity" else key: value for key, value in decoded.items()}


@pytest.mark.parametrize("vector", REGISTRATIONS, ids=str)
def test_registrations_go_both_ways(vector: Vector) -> None:
    registration = handshake.decode_registration(vector.frame)
    assert registration == Registration(**fields(vector.decoded))
    keys = (
        handshake.TOKENSPEED_REGISTRATION
        if "prefix_granularity" in vector.decoded
        else handshake.TOKENSPEED_REGISTRATION_BEFORE_RENAME
    )
    assert handshake.encode_registration(registration, keys) == vector.frame


def test_the_registration_vectors_have_both_names_of_the_block_size() -> None:
    names = {key for v in REGISTRATIONS for key in v.decoded if key in ("block_size", "prefix_granularity")}
    assert names == {"block_size", "prefix_granularity"}


@pytest.mark.parametrize(
    ("version", "family", "bare"),
    [
        ("tokenspeed-0.1.1", "tokenspeed", "0.1.1"),
        ("sglang-0.5.23", "sglang", "0.5.23"),
        ("0.32.0", "vllm", "0.32.0"),
        ("0.32.1.dev3+g12", "vllm", "0.32.1.dev3+g12"),
        ("", None, ""),
    ],
)
def test_the_family_is_told_by_the_version(version: str, family: str | None, bare: str) -> None:
    registration = handshake.decode_registration(msgpack.packb({"vllm_version": version}))
    assert (registration.family, registration.version) == (family, bare)


def test_a_registration_may_lack_anything_and_have_more() -> None:
    assert handshake.decode_registration(msgpack.packb({})) == Registration()
    more = {"weather": [1, {"a": None}], 7: 8, "max_model_len": 4096, "instance_id": None}
    assert handshake.decode_registration(msgpack.packb(more)) == Registration(max_model_len=4096)


def test_a_negative_token_budget_of_older_tokenspeed_is_read() -> None:
    frame = msgpack.packb({"max_num_batched_tokens": -1})
    assert handshake.decode_registration(frame).max_num_batched_tokens == -1


def test_sglang_registers_its_layouts() -> None:
    layouts = {"SamplingParams": ["max_new_tokens", "stop"], "EncoderDispatchErrorReq": ["rid"]}
    sent = Registration(vllm_version="sglang-0.5.23", block_size=64, positional_layouts=layouts)
    frame = handshake.encode_registration(sent, handshake.SGLANG_REGISTRATION)
    assert "prefix_granularity" not in msgpack.unpackb(frame)
    assert handshake.decode_registration(frame) == sent


def test_an_empty_registration_says_which_engine_sends_that() -> None:
    with pytest.raises(HandshakeError, match=r"older than about 0\.20"):
        handshake.decode_registration(b"")


WRONG: dict[str, list[Any]] = {
    "an integer of 0 or more": [-1, 1.0, True, "5", [5]],
    "an integer": [1.0, False, "5"],
    "a number": [True, "1.5", []],
    "text": [5, b"x", True, ["x"]],
    "a map": [5, "x", []],
    "a map of arrays of text": [[], {"a": "b"}, {"a": [1]}, {1: ["a"]}],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key, kind in handshake.REGISTRATION_KEYS.items() for value in WRONG[kind.text]],
)
def test_a_registration_with_a_value_of_a_wrong_type_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(HandshakeError, match=f"registration: {key} must be"):
        handshake.decode_registration(msgpack.packb({key: value}))


def test_every_key_of_a_registration_has_its_field() -> None:
    names = {field.name for field in dataclasses.fields(Registration)}
    assert {handshake.ALIASES.get(key, key) for key in handshake.REGISTRATION_KEYS} == names


# ---------------------------------------------------------- garbage

decoders = pytest.mark.parametrize(
    "decode", [handshake.decode_status, handshake.decode_init, handshake.decode_registration]
)


@decoders
@pytest.mark.parametrize(
    "frame",
    [
        b"\xc1",
        b"GET / HTTP/1.1",
        msgpack.packb([1]),
        msgpack.packb("HELLO"),
        msgpack.packb({"status": "HELLO"})[:-1],
        msgpack.packb({"status": "HELLO"}) + b"\x00",
        b"\x81\x91\x01\x02",
        b"\x81\xa1\xff\x01",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 10_000,
        b"\xdd\x00\x00\xff\xff" * 13_000,
        bytes(handshake.LONGEST_MESSAGE + 1),
    ],
    ids=[
        "reserved",
        "http",
        "array",
        "text",
        "cut",
        "trailing",
        "key",
        "utf8",
        "huge",
        "deep",
        "wide",
        "long",
    ],
)
def test_garbage_is_refused(decode: Callable[[bytes], object], frame: bytes) -> None:
    with pytest.raises(HandshakeError):
        decode(frame)


keys = st.sampled_from([*handshake.STATUS_KEYS, *handshake.INIT_KEYS, *handshake.REGISTRATION_KEYS]) | st.text()
items = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
maps = st.dictionaries(keys, items | st.lists(items) | st.dictionaries(keys, st.lists(items)), max_size=4)


@decoders
@given(st.binary(max_size=80) | maps.map(msgpack.packb))
def test_any_bytes_are_read_or_refused_and_nothing_else(decode: Callable[[bytes], object], frame: bytes) -> None:
    with contextlib.suppress(HandshakeError):
        assert decode(frame) is not None
