"""Engine arguments that are passed through: finding a value in them, and taking out what the launcher sets itself."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from smg.serve.errors import ServeError

_NEGATIVE_NUMBER = re.compile(r"-\d+(\.\d*)?|-\.\d+")


def split_owned(arguments: Sequence[str], owned: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """The arguments without the owned flags, and what was taken out, as it was written.

    `owned` maps a flag to whether it takes a value. Each is found as `--flag value`, `--flag=value` and `--flag`,
    and with underscores for dashes, as the engines' own parsers take it. The order of the others stays.
    """
    kept: list[str] = []
    taken: list[str] = []
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        takes_value = owned.get(_name(argument))
        width = 1
        if takes_value is None:
            kept.append(argument)
        else:
            if takes_value and "=" not in argument and _is_value(arguments, position + 1):
                width = 2
            taken.append(" ".join(arguments[position : position + width]))
        position += width
    return kept, taken


def has_flag(arguments: Sequence[str], flag: str) -> bool:
    return any(_name(argument) in (flag, f"--no-{flag[2:]}") for argument in arguments)


def value_of(arguments: Sequence[str], names: Collection[str]) -> str | None:
    """The value that a parser would end up with for a flag with these names: the last one given."""
    value = None
    for position, argument in enumerate(arguments):
        if _name(argument) in names:
            if "=" in argument:
                value = argument.partition("=")[2]
            elif _is_value(arguments, position + 1):
                value = arguments[position + 1]
    return value


def size_of(arguments: Sequence[str], names: Sequence[str]) -> int | None:
    """The value of a flag that counts something. Raises ServeError for what is no number above 0."""
    value = value_of(arguments, names)
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]{1,6}", value) or int(value) < 1:
        raise ServeError(f"engine argument {names[0]} {value}: must be a whole number of at least 1")
    return int(value)


def _name(argument: str) -> str:
    """The flag's name with dashes; "" for what is no flag."""
    return argument.partition("=")[0].replace("_", "-") if argument.startswith("-") else ""


def _is_value(arguments: Sequence[str], position: int) -> bool:
    if position >= len(arguments):
        return False
    return not arguments[position].startswith("-") or bool(_NEGATIVE_NUMBER.fullmatch(arguments[position]))
