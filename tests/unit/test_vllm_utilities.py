"""vLLM's utility calls: its own encoders' bytes, and calls that would leave an engine deaf."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from vectors import Vector, of_kind

from smg._codec import decode_vllm
from smg.errors import DecodeError, InvalidRequest
from smg.protocol.vllm import UtilityReply, decode_utility, encode_utility
from smg.protocol.vllm_utilities import UTILITIES

CALLS = [v for v in of_kind("vllm", "request_utility") if v.decoded[0] == 0 and v.decoded[2] in UTILITIES]
REPLIES = of_kind("vllm", "utility_output")


@pytest.mark.parametrize("vector", [v for v in CALLS if v.decoded[2] != "add_lora"], ids=str)
def test_calls_encode_to_the_engines_own_bytes(vector: Vector) -> None:
    _, call_id, method, args = vector.decoded
    assert encode_utility(call_id, method, args) == vector.frame


def test_an_adapter_is_sent_as_what_every_version_reads() -> None:
    assert msgpack.unpackb(encode_utility(7, "add_lora", [("a", 1, "/l/a")])) == [0, 7, "add_lora", [["a", 1, "/l/a"]]]


@pytest.mark.parametrize(
    ("method", "args", "sent"),
    [
        ("is_sleeping", (), []),
        ("sleep", (), []),
        ("sleep", (2,), [2]),
        ("sleep", (1, "wait"), [1, "wait"]),
        ("sleep", (1, None), [1]),
        ("wake_up", (None,), []),
        ("wake_up", (["weights", "kv_cache"],), [["weights", "kv_cache"]]),
        ("pause_scheduler", ("keep", False), ["keep", False]),
        ("reset_prefix_cache", (True,), [True]),
        ("remove_lora", (5,), [5]),
        ("profile", (True, "run"), [True, "run"]),
    ],
)
def test_arguments_that_are_not_given_are_the_engines_to_choose(method: str, args: Any, sent: Any) -> None:
    assert msgpack.unpackb(encode_utility(1, method, args)) == [0, 1, method, sent]


@pytest.mark.parametrize(
    ("call_id", "method", "args", "field"),
    [
        (1, "handle_fault_tolerance", (), "method"),
        (1, "collective_rpc", ("x",), "method"),
        (1, "__class__", (), "method"),
        (1, "shutdown", (), "method"),
        (-1, "is_sleeping", (), "call_id"),
        (2**63, "is_sleeping", (), "call_id"),
        (1.0, "is_sleeping", (), "call_id"),
        (1, "is_sleeping", (1,), "args"),
        (1, "sleep", (3,), "level"),
        (1, "sleep", (1, "now"), "mode"),
        (1, "sleep", (None, "wait"), "level"),
        (1, "wake_up", ("weights",), "tags"),
        (1, "wake_up", ([5],), "tags"),
        (1, "reset_prefix_cache", (1,), "reset_running_requests"),
        (1, "add_lora", (), "lora_request"),
        (1, "add_lora", (None,), "lora_request"),
        (1, "add_lora", (["a", 1],), "lora_request"),
        (1, "remove_lora", (0,), "lora_id"),
        (1, "pin_lora", ("1",), "lora_id"),
        (1, "profile", (True, ""), "profile_prefix"),
    ],
)
def test_calls_that_an_engine_cannot_take_are_refused(call_id: Any, method: str, args: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        encode_utility(call_id, method, args)
    assert caught.value.field == field


@pytest.mark.parametrize("vector", REPLIES, ids=str)
def test_replies_decode_to_what_the_vectors_say(vector: Vector) -> None:
    call_id, failure, wrapped = vector.decoded[4]
    found = decode_vllm([vector.frame]).utility
    assert found is not None
    assert found[0] == call_id
    assert decode_utility(found[1]) == UtilityReply(call_id, failure, wrapped[1] if wrapped else None)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ([5], UtilityReply(5, None, None)),
        ([5, "why"], UtilityReply(5, "why", None)),
        ([-2, None, [None, {"a": [1]}]], UtilityReply(-2, None, {"a": [1]})),
        ([5, None, [["builtins", "bool"], True], "more"], UtilityReply(5, None, True)),
    ],
)
def test_replies_of_every_length_decode(reply: Any, expected: UtilityReply) -> None:
    assert decode_utility(msgpack.packb(reply)) == expected


@pytest.mark.parametrize(
    "reply", [[5, None, True], [5, None, []], [5, None, [None, msgpack.ExtType(1, b"a pickle")]], [5, None, [None] * 3]]
)
def test_replies_with_pickles_or_odd_results_are_refused(reply: Any) -> None:
    with pytest.raises(DecodeError):
        decode_utility(msgpack.packb(reply))
