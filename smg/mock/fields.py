"""Typed fields as an engine's decoder has them: kinds of values, strict as msgspec is, with their defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Kind = Callable[[Any], bool]


def is_int(value: Any) -> bool:
    return type(value) is int


def is_float(value: Any) -> bool:
    return type(value) in (float, int)


def is_bool(value: Any) -> bool:
    return type(value) is bool


def is_str(value: Any) -> bool:
    return type(value) is str


def is_map(value: Any) -> bool:
    return type(value) is dict and all(map(is_str, value))


def is_list(value: Any) -> bool:
    return type(value) is list


def ints(value: Any) -> bool:
    return type(value) is list and set(map(type, value)) <= {int}


def strs(value: Any) -> bool:
    return type(value) is list and all(map(is_str, value))


def str_or_strs(value: Any) -> bool:
    return is_str(value) or strs(value)


def anything(value: Any) -> bool:
    return True


class Field(NamedTuple):
    name: str
    accepts: Kind
    default: Any = None
    nil: bool = True  # whether nil is accepted too

    def fault(self, value: Any) -> str | None:
        """What is wrong with a value that was sent; None when it is accepted."""
        if value is None:
            return None if self.nil else f"{self.name} is nil"
        if not self.accepts(value):
            return f"{self.name} has a {type(value).__name__} or a wrong one in it"
        return None
