"""Output frames as TokenSpeed's engine makes them, by msgspec, and the typed decoder that is the rival in decoding."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Slim(msgspec.Struct, array_like=True, tag="BatchTokenIDOutSlim"):
    """The 10-element layout: one row per request, columns side by side."""

    rids: list[str]
    output_ids: list[list[int]]
    finished_reasons: list[str]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    output_token_logprobs_val: list[list[float]]
    output_token_logprobs_idx: list[list[int]]
    engine_index: int = 0


def encode(rids: Sequence[str], token_ids: Sequence[int], *, prompt: int = 100, completion: int = 500) -> bytes:
    """One engine step: a token for each request."""
    n = len(rids)
    return msgspec.msgpack.encode(
        Slim(
            list(rids), [[token] for token in token_ids], [""] * n, [prompt] * n, [completion] * n, [0] * n,
            [[] for _ in range(n)], [[] for _ in range(n)],
        )
    )  # fmt: skip


def reencode(frame: bytes) -> bytes:
    """What msgspec makes of what a frame holds."""
    return msgspec.msgpack.encode(decoder().decode(frame))


def decoder() -> msgspec.msgpack.Decoder[Slim]:
    return msgspec.msgpack.Decoder(Slim)
