"""Output messages of vLLM in the making: sound ones, with anything in them exchanged by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np
import pytest
from vectors import Vector, of_kind

from smg._codec import decode_vllm
from smg._decoded import DecodedOutputs
from smg.protocol import vllm
from smg.protocol.vllm_outputs import ENVELOPE, OUTPUT

MESSAGES = of_kind("vllm", "outputs", "utility_output", "dp_control")
WIRE_ID = "00c0ffee0000002a00000007"
HUGE = b"\xff\xff\xff\xff"

Decoder = Callable[[Sequence[bytes]], DecodedOutputs]
both_decoders = pytest.mark.parametrize("decode", [decode_vllm, vllm.decode_outputs])


def pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def parts_of(vector: Vector) -> list[bytes]:
    return [vector.frame, *vector.aux]


def array(code: str, numbers: Any, *, dtype: str | None = None, part: int | None = None) -> list[Any]:
    """[dtype, shape, data] of a nested list, its data inline or said to be in a part."""
    values = np.array(numbers, dtype=code)
    data = msgpack.ExtType(3, values.tobytes()) if part is None else part
    return [dtype or values.dtype.str, list(values.shape), data]


def logprobs(ids: Any = ((5, 6), (7, 8)), values: Any = ((-0.5, -1.0), (-2.0, -3.0)), ranks: Any = (1, 2)) -> Any:
    return [array("<i4", ids), array("<f4", values), array("<i8", ranks), None]


def row(**changed: Any) -> list[Any]:
    """The elements of a sound output of 0.32, some of them exchanged by name."""
    elements = dict.fromkeys(OUTPUT) | {"request_id": WIRE_ID, "new_token_ids": [300], "num_nans_in_logits": 0}
    assert changed.keys() <= elements.keys()
    return list({**elements, **changed}.values())


STATS = {"num_running_reqs": 2, "num_waiting_reqs": 3, "num_skipped_waiting_reqs": 4, "kv_cache_usage": 0.25}


def message(*rows: Any, **changed: Any) -> bytes:
    """A sound frame with these outputs, some of its other elements exchanged by name."""
    elements = dict.fromkeys(ENVELOPE) | {"engine_index": 1, "outputs": list(rows), "timestamp": 12.5}
    assert changed.keys() <= elements.keys()
    return pack(list({**elements, **changed}.values()))
