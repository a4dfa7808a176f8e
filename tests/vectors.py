"""The golden vectors in tests/vectors: bytes that the engines' own encoders made, and what they mean."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgpack


@dataclass(frozen=True)
class Vector:
    """One message. `expect` is "accept", "reject" or None, which means accept.

    `frame` is its payload, `aux` the parts after it, `version` the engine's.
    """

    name: str
    kind: str
    version: str
    frame: bytes
    aux: tuple[bytes, ...]
    decoded: Any
    expect: str | None

    def __str__(self) -> str:  # pytest's test ids
        return self.name


@cache
def load(engine: str) -> tuple[Vector, ...]:
    """All vectors of an engine."""
    entries = json.loads((Path(__file__).parent / "vectors" / f"{engine}.json").read_text())
    return tuple(
        Vector(
            name=entry["name"].removeprefix(f"{engine}."),
            kind=entry["kind"],
            version=entry["version"],
            frame=bytes.fromhex(entry["hex"]),
            aux=tuple(map(bytes.fromhex, entry.get("aux_hex", ()))),
            decoded=_unescaped(entry["decoded"]),
            expect=entry.get("expect"),
        )
        for entry in entries
    )


def of_kind(engine: str, *prefixes: str, reject: bool = False) -> list[Vector]:
    """The vectors whose kind starts with one of the prefixes: the good ones, or those to be refused."""
    found = [v for v in load(engine) if v.kind.startswith(prefixes) and (v.expect == "reject") is reject]
    assert found, f"no vectors of {engine} for {prefixes}"
    return found


def _unescaped(value: Any) -> Any:
    if isinstance(value, list):
        return [_unescaped(item) for item in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("__float__", text)]:
            return float(text)
        case [("__raw__" | "__bytes__", digits)]:
            return bytes.fromhex(digits)
        case [("__ext__", [code, digits])]:
            return msgpack.ExtType(code, bytes.fromhex(digits))
        case [("__map__", pairs)]:
            return {_unescaped(key): _unescaped(item) for key, item in pairs}
    return {key: _unescaped(item) for key, item in value.items()}
