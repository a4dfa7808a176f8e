"""What of vLLM's outputs is decoded on demand.

A request's cold entries are msgpack values one after the other, of all its outputs since the last time: the
kind, the value as it was in its frame, and the data of those of its arrays that came in message parts of their
own (`write_cold` in _batch.pxd).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack

LOGPROBS, PROMPT_LOGPROBS, KV_TRANSFER = range(3)  # ColdKind in _frame.pxd
_BIN32 = 0xC6  # the header of an array's data

Logprob = tuple[int, float, list[tuple[int, float]]]


def decode_logprobs(spans: bytes, top: int | None = None) -> list[Logprob] | None:
    """The logprobs of the new tokens of one or more outputs of a request; None when it has none.

    Each is (token id, logprob, likeliest tokens), those being `top` pairs of (token id, logprob) at most,
    the likeliest first. The engine makes them for all requests of a step together, and sends as many as the
    greediest of them asked for; hence `top`. A logprob may be -inf.
    """
    return _logprobs(spans, LOGPROBS, top)


def decode_prompt_logprobs(spans: bytes, top: int | None = None) -> list[Logprob | None] | None:
    """As `decode_logprobs`, for the prompt's tokens, of which the first has no logprob: None in its place."""
    found = _logprobs(spans, PROMPT_LOGPROBS, top)
    return None if found is None else [None, *found]


def decode_kv_transfer(spans: bytes) -> dict[str, Any] | None:
    """The engine's `kv_transfer_params` for the one that takes the request over; None when it sent none."""
    for value, _ in _entries(spans, KV_TRANSFER):
        params: dict[str, Any] = value
        return params
    return None


def _logprobs(spans: bytes, kind: int, top: int | None) -> list[Logprob] | None:
    found: list[Logprob] | None = None
    for (ids, values, *_), bins in _entries(spans, kind):
        found = [] if found is None else found
        for tokens, logprobs in zip(_numbers(ids, bins), _numbers(values, bins), strict=True):
            pairs = list(zip(tokens, logprobs, strict=True))
            found.append((*pairs[0], pairs[1:] if top is None else pairs[1 : 1 + top]))
    return found


def _entries(spans: bytes, kind: int) -> Iterator[tuple[Any, Iterator[bytes]]]:
    """The values of a kind, each with the arrays' data that came in parts of its own."""
    unpacker = msgpack.Unpacker(unicode_errors="replace", strict_map_key=False, max_buffer_size=max(1, len(spans)))
    unpacker.feed(spans)
    while unpacker.tell() < len(spans):
        found = unpacker.unpack()
        if found == kind:
            yield unpacker.unpack(), unpacker
        else:
            unpacker.skip()
        # What is left of the entry's data, in either case
        while unpacker.tell() < len(spans) and spans[unpacker.tell()] == _BIN32:
            unpacker.skip()


def _numbers(array: list[Any], bins: Iterator[bytes]) -> list[list[Any]]:
    import numpy as np  # here, since a server that is never asked for logprobs need not hold its 10 MB

    dtype, shape, data = array
    content = data.data if isinstance(data, msgpack.ExtType) else next(bins)
    rows: list[list[Any]] = np.frombuffer(content, np.dtype(dtype)).reshape(shape).tolist()
    return rows
