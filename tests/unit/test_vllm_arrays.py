"""Arrays in vLLM's output messages, what is decoded of them on demand, and what decoding takes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from vectors import Vector
from vllm_messages import (
    HUGE,
    MESSAGES,
    Decoder,
    array,
    both_decoders,
    logprobs,
    message,
    pack,
    parts_of,
    row,
)

from smg._codec import decode_vllm, measure_vllm
from smg.errors import DecodeError
from smg.protocol import vllm


def dtypes(code: str) -> list[tuple[str, str]]:
    """Names that a dtype goes by, with what numpy makes of its bytes."""
    names = [(f"{order}{code}", f"{order}{code}") for order in "<>="]
    return [*names, (code, f"={code}"), (np.dtype(code).name, f"={code}")]


@both_decoders
@pytest.mark.parametrize("value", [pair for code in ("f4", "f8", "f2") for pair in dtypes(code)])
@pytest.mark.parametrize("token", [pair for code in ("i4", "i8", "u4") for pair in dtypes(code)] + [("|i1", "i1")])
def test_logprobs_of_any_width_and_byte_order(token: Any, value: Any, decode: Decoder) -> None:
    found = [
        array(token[1], [[5, 6], [7, 8]], dtype=token[0]),
        array(value[1], [[-0.5, -1], [-2, -np.inf]], dtype=value[0]),
        array("<i4", [1, 2]),
    ]
    (output,) = decode([message(row(new_token_ids=[5, 7], new_logprobs=found))]).rows
    expected = [(5, -0.5, [(6, -1.0)]), (7, -2.0, [(8, -math.inf)])]
    assert vllm.decode_logprobs(b"".join(output.colds)) == expected


@both_decoders
def test_arrays_may_lie_in_parts_of_their_own_in_any_mixture(decode: Decoder) -> None:
    parts = [np.array(v, c).tobytes() for v, c in (([[9]], "<i4"), ([[-4.0]], "<f4"), ([3], "<i8"))]
    inline = logprobs([[5]], [[-1.0]], [1])
    apart = [array("<i4", [[0]], part=1), array("<f4", [[0]], part=2), array("<i8", [0], part=3), None]
    mixed = [array("<i4", [[8]]), array("<f4", [[0]], part=2), array("<i8", [7]), None]
    for found, others, expected in [
        (inline, [], [(5, -1.0, [])]),
        (apart, parts, [(9, -4.0, [])]),
        (mixed, parts, [(8, -4.0, [])]),
    ]:
        output, other = decode([message(row(new_logprobs=found), row()), *others]).rows
        assert vllm.decode_logprobs(b"".join(output.colds)) == expected
        assert other.colds == []


@both_decoders
def test_parts_that_nothing_refers_to_are_let_be(decode: Decoder) -> None:
    assert decode([message(row()), b"", b"routed experts"]) == decode([message(row())])


@both_decoders
def test_a_part_that_two_arrays_refer_to_is_refused_since_copies_would_add_up(decode: Decoder) -> None:
    twice = [["<i4", [1, 1], 1], ["<f4", [1, 1], 1], ["<i4", [1], 1], None]
    with pytest.raises(DecodeError, match="in a part that something else has used") as caught:
        decode([message(row(new_logprobs=twice)), bytes(4)])
    assert caught.value.column == "new_logprobs"


def test_logprobs_of_several_outputs_come_in_one_list_and_no_more_than_were_asked_for() -> None:
    rows = [
        row(new_logprobs=logprobs(), kv_transfer_params={"a": 1}),
        row(new_prompt_logprobs_tensors=logprobs(), new_logprobs=logprobs([[1, 2]], [[-7.0, -8.0]], [1])),
    ]
    spans = b"".join(cold for output in decode_vllm([message(*rows)]).rows for cold in output.colds)
    tops = [(5, -0.5, [(6, -1.0)]), (7, -2.0, [(8, -3.0)]), (1, -7.0, [(2, -8.0)])]
    assert vllm.decode_logprobs(spans) == tops
    assert vllm.decode_logprobs(spans, 1) == tops
    assert vllm.decode_logprobs(spans, 0) == [(token, logprob, []) for token, logprob, _ in tops]
    assert vllm.decode_prompt_logprobs(spans, 1) == [None, *tops[:2]]
    assert vllm.decode_kv_transfer(spans) == {"a": 1}


def test_what_was_not_sent_is_none() -> None:
    assert vllm.decode_logprobs(b"") is None
    assert vllm.decode_prompt_logprobs(b"") is None
    assert vllm.decode_kv_transfer(b"") is None
    only_kv = b"".join(decode_vllm([message(row(kv_transfer_params={}))]).rows[0].colds)
    assert (vllm.decode_logprobs(only_kv), vllm.decode_kv_transfer(only_kv)) == (None, {})


# ---------------------------------------------------------- memory


@pytest.mark.parametrize("vector", MESSAGES, ids=str)
def test_scratch_is_at_most_16_times_the_message(vector: Vector) -> None:
    assert measure_vllm(parts_of(vector)) <= 16 * sum(map(len, parts_of(vector))) + 1024


@pytest.mark.parametrize("count", [0, 1, 2, 100, 5000])
@pytest.mark.parametrize(
    "output",
    [["", []], ["", [0] * 9], ["", [0], None, None, None, 0, 0], ["", [], None, None, None, 0, "", 0, {}]],
    ids=["shortest", "tokens", "stop reasons", "kv params"],
)
def test_scratch_is_at_most_16_times_the_densest_messages(count: int, output: list[Any]) -> None:
    frame = message(*[output] * count, finished_requests=[""] * count)
    assert len(decode_vllm([frame]).rows) == count
    assert measure_vllm([frame]) <= 16 * len(frame) + 1024


def test_a_message_that_claims_more_outputs_than_it_has_takes_no_memory_for_them() -> None:
    assert measure_vllm([b"\x92\x01\xdd" + HUGE + bytes(1000)]) == 0
    assert measure_vllm([pack([1, [[]] * 1000])]) == 0


@both_decoders
@pytest.mark.parametrize(
    "output", [b"\x92\xa0\x91\x07", b"\x92\xa1x\x90", b"\x93\xa0\x90\xc0"], ids=["token", "id", "nil"]
)
def test_an_output_is_refused_that_takes_what_the_outputs_after_it_need(output: bytes, decode: Decoder) -> None:
    outputs = b"\x92\x01\xdc\x00\x78" + output * 90  # 360 bytes, which would do for 120 of the shortest
    with pytest.raises(DecodeError):
        decode([outputs])
    decode([outputs + b"\x92\xa0\x90" * 30])
    assert measure_vllm([outputs]) <= 16 * len(outputs) + 1024


@both_decoders
@pytest.mark.parametrize("part", [0, 1])
def test_a_part_over_4_gib_is_refused_unread(part: int, decode: Decoder) -> None:
    parts: list[Any] = [message(row()), b""]
    parts[part] = np.zeros(2**32, dtype=np.uint8).data  # never touched, so never there
    with pytest.raises(DecodeError, match="4294967296 bytes") as caught:
        decode(parts)
    assert caught.value.column == "part"


def test_a_message_without_parts_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="one part"):
        decode_vllm([])
