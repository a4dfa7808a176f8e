"""vLLM's wire: requests as its EngineCore takes them.

A request is `[type byte, payload]`. An ADD's payload is the array `EngineCoreRequest`, whose elements shifted as
versions went by: the table below has them in order, each with the version that brought it. The first nine are
the same in all of them, decoding fills in the rest, and so no more than those are sent unless a request needs
more.

An engine that cannot decode a request does not answer: it never hears anything again. And an id that is in use
ends it. So every value is checked before anything is sent, ids are new for ever, and what depends on the version
is refused when the engine did not say its own.

Outputs are in `vllm_outputs`, what of them is decoded on demand in `vllm_cold`, utility calls in
`vllm_utilities`, sampling parameters in `vllm_sampling`.
"""

from __future__ import annotations

import re
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack

from smg._codec import pack_token_ids
from smg.errors import DecodeError, InvalidRequest
from smg.protocol.rules import I63, integer, text
from smg.protocol.vllm_cold import decode_kv_transfer, decode_logprobs, decode_prompt_logprobs
from smg.protocol.vllm_outputs import decode_outputs
from smg.protocol.vllm_sampling import EXTRA, FROM_EXTRA, Model, sampling_map
from smg.protocol.vllm_utilities import UtilityReply, adapter, decode_utility, encode_utility
from smg.sampling import SamplingParams

__all__ = [
    "ABORT",
    "ADD",
    "HAS_PRIORITY",
    "RID_OFFSET",
    "START_DP_WAVE",
    "UTILITY",
    "Model",
    "UtilityReply",
    "decode_kv_transfer",
    "decode_logprobs",
    "decode_outputs",
    "decode_prompt_logprobs",
    "decode_utility",
    "encode_abort",
    "encode_add",
    "encode_utility",
    "encode_wave",
    "validate",
]

ADD = b"\x00"
ABORT = b"\x01"
START_DP_WAVE = b"\x02"
UTILITY = b"\x03"
HAS_PRIORITY = True  # whether a request can carry one

Version = tuple[int, int]


class Element(NamedTuple):
    """One element of a request."""

    name: str
    default: Any = None
    since: Version = (0, 20)


# EngineCoreRequest. Long before, it had eos_token_id as element 5.
REQUEST = (
    Element("request_id"),
    Element("prompt_token_ids"),
    Element("mm_features"),
    Element("sampling_params"),  # the map of vllm_sampling
    Element("pooling_params"),
    Element("arrival_time"),  # seconds since 1970
    Element("lora_request"),
    Element("cache_salt"),
    Element("data_parallel_rank"),
    Element("prompt_embeds"),
    Element("prompt_is_token_ids", since=(0, 21)),
    Element("client_index", 0),
    Element("current_wave", 0),
    Element("priority", 0),
    Element("trace_headers"),
    Element("resumable", False),
    Element("external_req_id"),
    Element("reasoning_ended"),
    Element("reasoning_parser_kwargs", since=(0, 21)),
    Element("abort_immediately", False, (0, 21)),
    Element("session_id", since=(0, 28)),
    Element("kv_hints", since=(0, 31)),
)
PREFIX = 9  # elements that every version has at the same place, and that an engine needs
FIRST_KNOWN = (0, 20)  # older engines register without a word, and are refused


@lru_cache(64)
def layout(version: str) -> tuple[Element, ...] | None:
    """The elements of a request, in order, as a version of vLLM has them ("0.32.0", "0.32.1.dev5+g1a2b3c4").

    None when it cannot be told: a build from source may call itself 0.1, or nothing.
    """
    found = re.match(r"(\d+)\.(\d+)", version, re.ASCII)
    if found is None or (numbers := (int(found[1]), int(found[2]))) < FIRST_KNOWN:
        return None
    return tuple(element for element in REQUEST if element.since <= numbers)


REQUEST_EXTRA = ("lora", "cache_salt")  # fields of extra["vllm"] that are not sampling parameters
KNOWN_EXTRA = (*FROM_EXTRA, "structured_outputs", *REQUEST_EXTRA)

_NIL = b"\xc0"
_STR8 = 0xD9  # ids have this header at any length, so that they begin at the same place
RID_OFFSET = 3  # where in a request's payload the characters of its id begin
_DEFAULTS = SamplingParams()
_UNKNOWN_MODEL = Model()


class _Packer(threading.local):
    """`pack`, with a packer for each thread: making one costs more than packing a short request."""

    def __init__(self) -> None:
        self.pack: Callable[[Any], bytes] = msgpack.Packer().pack


_packer = _Packer()


def encode_add(
    rid: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams | None = None,
    *,
    context_length: int | None = None,
    priority: int = 0,
    version: str = "",
    model: Model = _UNKNOWN_MODEL,
) -> bytes:
    """The payload of an ADD.

    `rid` has up to 255 ASCII characters and may be patched over at RID_OFFSET. `prompt_token_ids` is a list,
    tuple, range, numpy array or any other sequence of ints. `context_length` (tokens, prompt and completion
    together), when known, bounds the prompt, and the completion of a request without max_tokens. `priority`:
    lower goes first, where the engine runs with priorities. `version`: what the engine registered; only what
    lies past the elements that all versions share depends on it. `model`: what the engine does not know itself.
    Raises `InvalidRequest` for every value that would be refused, or end the engine.
    """
    prompt = _packed_prompt(prompt_token_ids, context_length, model)
    sampling, extra = _request_values(params, len(prompt_token_ids), context_length, model)
    more = _packed_priority(priority, version)
    parts = (
        bytes((0x90 + PREFIX + len(more), _STR8, len(rid))),
        rid.encode("ascii"),
        prompt,
        _NIL,
        _packer.pack(sampling),
        _NIL,
        struct.pack(">Bd", 0xCB, time.time()),
        _packer.pack(extra.get("lora")),
        _packer.pack(extra.get("cache_salt")),
        _NIL,
        *more,
    )
    return b"".join(parts)


def validate(
    prompt_token_ids: Sequence[int],
    params: SamplingParams | None = None,
    *,
    context_length: int | None = None,
    priority: int = 0,
    version: str = "",
    model: Model = _UNKNOWN_MODEL,
) -> None:
    """Raise `InvalidRequest` where `encode_add` would."""
    _packed_prompt(prompt_token_ids, context_length, model)
    _request_values(params, len(prompt_token_ids), context_length, model)
    _packed_priority(priority, version)


def encode_abort(rids: Sequence[str]) -> bytes:
    """The payload of an ABORT. The engine does not answer it, and ignores ids that it does not have."""
    return _packer.pack(list(rids))


def encode_wave(wave: int) -> bytes:
    """The payload of a START_DP_WAVE. A rank ignores it when it is past that wave already."""
    return _packer.pack((integer(0, I63)("wave", wave), None))


def _packed_prompt(prompt_token_ids: Sequence[int], context_length: int | None, model: Model) -> bytes:
    packed = pack_token_ids(prompt_token_ids, model.ids_below)
    count = len(prompt_token_ids)
    if not count:
        raise InvalidRequest("prompt_token_ids", prompt_token_ids, "one token at least")
    if context_length is not None and count >= context_length:
        allowed = f"fewer tokens than the context of {context_length}, which has to hold the completion too"
        raise InvalidRequest("prompt_token_ids", count, allowed)
    return packed


def _request_values(
    params: SamplingParams | None, prompt_length: int, context_length: int | None, model: Model
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sampling map, and the fields of REQUEST_EXTRA that are set."""
    if params is None:
        params = _DEFAULTS
    elif not isinstance(params, SamplingParams):
        raise InvalidRequest("params", params, "a SamplingParams or None")
    own = _own_extra(params.extra) if params.extra else {}
    extra: dict[str, Any] = {}
    if own.get("lora") is not None:
        name = f"extra['{EXTRA}']['lora']"
        if not model.lora:
            raise InvalidRequest(name, own["lora"], "None: the group was not told that the engine has adapters")
        extra["lora"] = adapter(name, own["lora"])
    if own.get("cache_salt") is not None:
        extra["cache_salt"] = text(f"extra['{EXTRA}']['cache_salt']", own["cache_salt"])
    return sampling_map(params, own, prompt_length, context_length, model), extra


def _own_extra(extra: Any) -> Mapping[str, Any]:
    if not isinstance(extra, Mapping):
        raise InvalidRequest("extra", extra, "a dict of backend name to a dict of its fields")
    own = extra.get(EXTRA, {})
    if not isinstance(own, Mapping):
        raise InvalidRequest(f"extra['{EXTRA}']", own, "a dict")
    for name in own:
        if name not in KNOWN_EXTRA:
            raise InvalidRequest(f"extra['{EXTRA}']", name, f"one of {', '.join(KNOWN_EXTRA)}")
    return own


def _packed_priority(priority: int, version: str) -> tuple[bytes, ...]:
    """The elements from the ninth to the priority, if there is one."""
    if priority == 0:
        return ()
    priority = integer(-I63, I63)("priority", priority)
    elements = layout(version)
    if elements is None:
        shown = repr(version) if version else "no version"
        raise InvalidRequest("priority", priority, f"0: the engine registered {shown}, so where to put it is unknown")
    names = [element.name for element in elements]
    between = [_packer.pack(element.default) for element in elements[PREFIX : names.index("priority")]]
    return (*between, _packer.pack(priority))


# The engine's side, for simulators and tests


def encode_request(values: Mapping[str, Any], version: str) -> bytes:
    """A whole request with these elements, all others at their defaults, whether or not an engine would take it."""
    elements = layout(version)
    if elements is None:
        raise ValueError(f"version {version!r} has no known layout")
    return _packer.pack([values.get(element.name, element.default) for element in elements])


def decode_request(payload: bytes, version: str) -> dict[str, Any]:
    """An ADD's payload as this version of the engine reads it: every element by its name.

    Raises `DecodeError` where it is no array or too short. Values are not checked.
    """
    try:
        values = msgpack.unpackb(payload, strict_map_key=False)
    except Exception as error:  # msgpack's own kinds, and ValueError and TypeError of Python's
        raise DecodeError(f"request is malformed: {str(error) or type(error).__name__}", "request") from None
    elements = layout(version)
    if elements is None:
        raise ValueError(f"version {version!r} has no known layout")
    if type(values) is not list or len(values) < PREFIX:
        raise DecodeError(f"request must be an array of {PREFIX} elements or more", "request")
    named = {element.name: element.default for element in elements}
    return named | dict(zip(named, values, strict=False))
