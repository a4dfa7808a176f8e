"""What a decoded output message is, in Python: the value that compiled and reference decoders both give.

The running router never builds these; tests, tools and fuzzing compare them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from smg.errors import DecodeError

MAX_FRAME = 2**32 - 1  # bytes; offsets in a frame are 32 bits wide
MAX_DEPTH = 64  # non-empty containers inside each other in a part that is skipped

_WIRE_ID = re.compile(r"([0-9a-f]{8})([0-9a-f]{8})([0-9a-f]{8})(-[A-Za-z0-9._-]{1,32})?", re.ASCII)


class WireId(NamedTuple):
    """The router's own request id: `<epoch:08x><slot:08x><generation:08x>`, perhaps with `-` and a name."""

    epoch: int
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Load:
    """A rank's load report."""

    running: int  # requests
    waiting: int  # requests
    kv_usage: float  # 0..1


@dataclass(frozen=True, slots=True)
class DecodedRow:
    """One request's part of an output frame."""

    rid: str
    wire_id: WireId | None  # None when the id is not of the router's shape
    token_ids: list[int]  # new ones
    finish_reason: str  # "" while running
    prompt_tokens: int
    completion_tokens: int  # cumulative
    cached_tokens: int
    logprob_values: list[float]  # parallel to logprob_ids, empty when off
    logprob_ids: list[int]


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """One output frame."""

    rows: list[DecodedRow]
    engine_index: int | None  # None when the frame does not say
    load: Load | None  # None when the frame brings no report


@dataclass(frozen=True, slots=True)
class DecodedOutput:
    """One request's part of a vLLM output message."""

    rid: str
    wire_id: WireId | None  # None when the id is not of the router's shape
    token_ids: list[int]  # new ones
    finish_reason: str  # "" while running
    stop_reason: int | str | None
    counts: tuple[int, int] | None  # prompt tokens and those of them that were cached; None = not said here
    colds: list[bytes]  # each as `write_cold` in _batch.pxd writes it


@dataclass(frozen=True, slots=True)
class DecodedOutputs:
    """One vLLM output message."""

    rows: list[DecodedOutput]
    engine_index: int | None  # None when the message does not say
    load: Load | None  # None when the message brings no report
    finished: list[tuple[str, WireId | None]]  # ids that the engine is done with
    utility: tuple[int, bytes] | None  # call id, and the whole reply as msgpack
    wave: tuple[str, int] | None  # "complete" or "start", and which
    weight_version: str | None


def parse_wire_id(rid: str) -> WireId | None:
    """The parts of a request id of the router's shape; None for any other id."""
    match = _WIRE_ID.fullmatch(rid)
    return None if match is None else WireId(*(int(digits, 16) for digits in match.groups()[:3]))


def fault_error(column: str, what: str, row: int, found: int, expected: int, offset: int) -> DecodeError:
    """The error for a compiled decoder's fault (`Fault` in _frame.pxd).

    `what` is a format with {found}, {expected} and {kind}, the type whose lead byte is `found`.
    """
    where = column if row < 0 else f"{column}[{row}]"
    text = what.format(found=found, expected=expected, kind=type_name(found & 0xFF))
    return DecodeError(f"{where} {text} (at byte {offset})", column)


def type_name(lead: int) -> str:
    """The msgpack type that a lead byte announces."""
    if lead < 0x80 or lead >= 0xE0 or 0xCC <= lead <= 0xD3:
        return "an integer"
    if lead < 0x90 or lead in (0xDE, 0xDF):
        return "a map"
    if lead < 0xA0 or lead in (0xDC, 0xDD):
        return "an array"
    if lead < 0xC0 or lead in (0xD9, 0xDA, 0xDB):
        return "text"
    if 0xC4 <= lead <= 0xC6:
        return "bytes"
    return _SINGLE_TYPES.get(lead, "an extension")


_SINGLE_TYPES = {
    0xC0: "nil",
    0xC1: "the reserved byte c1",
    0xC2: "false",
    0xC3: "true",
    0xCA: "a float",
    0xCB: "a float",
}
