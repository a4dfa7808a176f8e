"""vLLM's utility calls: methods of the engine that a router may call, and what they answer.

The engine takes any attribute's name and unpacks the message unguarded, so that a malformed call, or one to its
fault handling without arguments, leaves it deaf. Hence a table of methods with their arguments, checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from smg.errors import DecodeError, InvalidRequest
from smg.protocol.rules import I31, I63, Check, flag, integer, text

CLIENT_INDEX = 0  # which of the addresses in INIT is answered; a router has one


def pause_mode(name: str, value: Any) -> str:
    """What becomes of requests in flight."""
    if value not in ("abort", "wait", "keep"):
        raise InvalidRequest(name, value, "abort, wait or keep")
    mode: str = value
    return mode


def texts(name: str, value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequest(name, value, "a list of str")
    return [text(name, item) for item in value]


def adapter(name: str, value: Any) -> list[Any]:
    """A LoRA adapter as [name, id, path]: what every version's longer array begins with."""
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise InvalidRequest(name, value, "an adapter's [name, id, path]")
    return [text(name, value[0]), adapter_id(name, value[1]), text(name, value[2])]


adapter_id = integer(1, I31)


class Argument(NamedTuple):
    """One positional argument."""

    name: str
    check: Check
    required: bool = False


# Arguments that are not given have the engine's defaults. `sleep` and `pause_scheduler` answer when they are
# done, perhaps much later; the others between two steps.
UTILITIES: dict[str, tuple[Argument, ...]] = {
    "get_supported_tasks": (),
    "is_sleeping": (),  # a bool; asked to see whether a silent engine still hears and steps
    "is_scheduler_paused": (),
    "sleep": (Argument("level", integer(0, 2)), Argument("mode", pause_mode)),
    "wake_up": (Argument("tags", texts),),
    "pause_scheduler": (Argument("mode", pause_mode), Argument("clear_cache", flag)),
    "resume_scheduler": (),
    "reset_prefix_cache": (Argument("reset_running_requests", flag), Argument("reset_connector", flag)),
    "reset_mm_cache": (),
    "reset_encoder_cache": (),
    "add_lora": (Argument("lora_request", adapter, required=True),),
    "remove_lora": (Argument("lora_id", adapter_id, required=True),),
    "pin_lora": (Argument("lora_id", adapter_id, required=True),),
    "list_loras": (),  # an array of ids
    "profile": (Argument("is_start", flag), Argument("profile_prefix", text)),
}


def encode_utility(call_id: int, method: str, args: Sequence[Any] = ()) -> bytes:
    """The payload of a UTILITY.

    `call_id`: 0..2**63-1, which the reply repeats; the engine's own notices have negative ones. `method`: one of
    UTILITIES, with its arguments in their order, fewer than all or None for the default. Raises `InvalidRequest`.
    """
    if method not in UTILITIES:
        raise InvalidRequest("method", method, f"one of {', '.join(UTILITIES)}")
    known = UTILITIES[method]
    if len(args) > len(known):
        raise InvalidRequest("args", args, f"{len(known)} arguments of {method} at most")
    values = [
        None if value is None else argument.check(argument.name, value)
        for argument, value in zip(known, args, strict=False)
    ]
    for argument, value in zip(known, [*values, *[None] * len(known)], strict=False):
        if argument.required and value is None:
            raise InvalidRequest(argument.name, None, f"given to {method}")
    while values and values[-1] is None:
        values.pop()
    if None in values:
        name = known[values.index(None)].name
        raise InvalidRequest(name, None, f"given to {method}, since an argument after it is")
    packed: bytes = msgpack.packb([CLIENT_INDEX, integer(0, I63)("call_id", call_id), method, values])
    return packed


class UtilityReply(NamedTuple):
    """What an engine answered to a utility call."""

    call_id: int
    failure: str | None  # why the call failed, in the engine's words
    result: Any


def decode_utility(reply: bytes) -> UtilityReply:
    """A reply as the decoders cut it out of its message: [call_id, failure, [type, result]].

    `type` is nil unless the engine runs with insecure serialization; whatever it says, the result is taken as
    plain msgpack. Raises `DecodeError`.
    """
    try:
        value: list[Any] = msgpack.unpackb(reply, strict_map_key=False, ext_hook=_refuse_extension)
    except Exception as error:  # msgpack's own kinds, and ValueError and TypeError of Python's
        raise DecodeError(f"utility_output is malformed: {str(error) or type(error).__name__}") from None
    call_id, failure, wrapped = [*value, None, None][:3]
    if wrapped is not None and (type(wrapped) is not list or len(wrapped) != 2):
        raise DecodeError("utility_output must have its result as [type, result]", "utility_output")
    return UtilityReply(call_id, failure, wrapped[1] if wrapped else None)


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension {code} of {len(data)} bytes, which may be a pickle, is refused")
