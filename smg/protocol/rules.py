"""What an engine takes for a field of a request, as checks that the protocols' tables name.

A check gets the field's name and a value that is not None. It returns the value for the wire or raises
`InvalidRequest`. A bool is never a number, NaN is in no range, and numpy's numbers count as numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from operator import index
from typing import Any

from smg.errors import InvalidRequest

Check = Callable[[str, Any], Any]

U32 = 2**32 - 1
I31 = 2**31 - 1
I63 = 2**63 - 1
FINITE = sys.float_info.max


def integer(low: int, high: int, also: int | None = None) -> Check:
    allowed = f"an integer in {low}..{high}" + (f", or {also}" if also is not None else "")

    def check(name: str, value: Any) -> int:
        result = value if type(value) is int else _plain_int(value)
        if result is None or not (low <= result <= high or result == also):
            raise InvalidRequest(name, value, allowed)
        return result

    return check


def number(low: float, high: float, *, above_low: bool = False) -> Check:
    """From `low` to `high`, with `low` itself left out when `above_low`."""
    allowed = f"a number in {'(' if above_low else '['}{low:g}, {high:g}]"
    if high == FINITE:
        allowed = "a finite number" if low == -FINITE else f"a finite number >= {low:g}"

    def check(name: str, value: Any) -> float:
        result = value if type(value) is float else _plain_float(value)
        if result is None or not low <= result <= high or (above_low and result == low):
            raise InvalidRequest(name, value, allowed)
        return result

    return check


def flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise InvalidRequest(name, value, "True or False")
    return value


def text(name: str, value: Any) -> str:
    if type(value) is not str or not value or not is_unicode(value):
        raise InvalidRequest(name, value, "a non-empty str of valid Unicode")
    return value


_token = integer(0, U32)
_bias = number(-FINITE, FINITE)


def tokens(name: str, value: Any) -> list[int] | None:
    """A list of token ids; None when it is empty."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidRequest(name, value, "a list of token ids")
    return [_token(name, item) for item in value] or None


def biases(name: str, value: Any) -> dict[int, float] | None:
    """A dict of token id to bias; None when it is empty."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(name, value, "a dict of token id to bias")
    return {_token(name, token): _bias(name, bias) for token, bias in value.items()} or None


DEEPEST = 32  # levels of what a request passes through


def passed_through(name: str, value: Any) -> dict[str, Any]:
    """A dict of JSON's types, which every engine's decoder knows: one that meets another drops the request."""
    if type(value) is not dict or not carries(value, DEEPEST):
        raise InvalidRequest(name, value, f"a dict of JSON's types, integers in 64 bits, {DEEPEST} levels deep")
    return value


def carries(value: Any, depth: int) -> bool:
    """Whether a value is of JSON's types and goes at most `depth` levels deep."""
    if value is None or type(value) in (bool, float):
        return True
    if type(value) is int:
        return -(2**63) <= value < 2**64
    if type(value) is str:
        return is_unicode(value)
    if type(value) in (list, tuple):
        return depth > 0 and all(carries(item, depth - 1) for item in value)
    if type(value) is dict:
        return depth > 0 and all(
            type(key) is str and is_unicode(key) and carries(item, depth - 1) for key, item in value.items()
        )
    return False


def _plain_int(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return int(index(value))
    except TypeError:
        return None


def _plain_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
