"""TokenSpeed's wire: requests as it takes them, output frames as it sends them.

A request is `[type byte, payload]`, an output a single frame. Payloads are msgpack arrays whose element 0 is
the struct's name; the tables below are those structs in wire order. A request goes out as the struct's first
11 elements with `is_normalized` false, and the engine fills in and derives the rest.

The engine answers a value that it dislikes with a bare "abort", and an undecodable request with nothing at
all. So every value is checked here, before anything is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import getrandbits
from typing import Any, NamedTuple

import msgpack

from smg._codec import pack_token_ids
from smg._decoded import MAX_DEPTH, MAX_FRAME, DecodedBatch, DecodedRow, Load, parse_wire_id
from smg.errors import DecodeError, InvalidRequest
from smg.protocol.rules import (
    FINITE,
    I31,
    I63,
    U32,
    Check,
    biases,
    flag,
    integer,
    is_unicode,
    number,
    passed_through,
    text,
    tokens,
)
from smg.sampling import SamplingParams

ADD = b"\x00"
ABORT = b"\x01"
HAS_PRIORITY = False  # whether a request can carry one


# Requests


def logit_bias(name: str, value: Any) -> dict[str, float] | None:
    """The engine's map has str keys."""
    return {str(token): bias for token, bias in (biases(name, value) or {}).items()} or None


def sampled_logprob(name: str, value: Any) -> None:
    """The engine knows the sampled token's logprob and no others; `return_logprob` asks for it."""
    if type(value) is not int or value != 0:
        raise InvalidRequest(name, value, "None or 0: this engine has no logprobs of other tokens")


class Field(NamedTuple):
    """One element of a struct."""

    name: str
    default: Any
    check: Check | None = None  # None: the default is all that is ever sent
    param: str | None = None  # field of SamplingParams that sets it; None: one of extra["tokenspeed"]


# SamplingParams, untagged
SAMPLING = (
    Field("max_new_tokens", None, integer(1, I31), "max_tokens"),
    Field("stop", None),  # stop strings are matched by the router
    Field("stop_token_ids", None, tokens, "stop_token_ids"),
    Field("temperature", 1.0, number(0, FINITE), "temperature"),
    Field("top_p", 1.0, number(0, 1, above_low=True), "top_p"),
    Field("top_k", -1, integer(1, 127, also=-1), "top_k"),
    Field("min_p", 0.0, number(0, 1), "min_p"),
    Field("frequency_penalty", 0.0, number(-2, 2), "frequency_penalty"),
    Field("presence_penalty", 0.0, number(-2, 2), "presence_penalty"),
    Field("repetition_penalty", 1.0, number(0, 2), "repetition_penalty"),
    Field("min_new_tokens", 0, integer(0, I31), "min_tokens"),
    Field("json_schema", None, text, "json_schema"),
    Field("regex", None, text, "regex"),
    Field("ebnf", None, text, "ebnf"),
    Field("structural_tag", None, text, "structural_tag"),
    Field("ignore_eos", False, flag, "ignore_eos"),
    Field("skip_special_tokens", True, flag),
    Field("spaces_between_special_tokens", True, flag),
    Field("no_stop_trim", False, flag),
    Field("thinking_budget", None, integer(0, I31)),
    Field("custom_params", None, passed_through),
    Field("stream_interval", None, integer(1, I31)),
    Field("logit_bias", None, logit_bias, "logit_bias"),
    Field("seed", None, integer(0, I63), "seed"),
    Field("logprobs", None, sampled_logprob, "logprobs"),
    Field("n", 1),  # several completions are several requests
    Field("stop_strs", None),
    Field("stop_str_max_len", 0),
    Field("is_normalized", False),
)

# TokenizedGenerateReqInput as far as it is sent
REQUEST_TAG = "TokenizedGenerateReqInput"
REQUEST = (
    Field("rid", None),
    Field("http_worker_ipc", None),
    Field("input_text", None),
    Field("input_ids", None),
    Field("sampling_params", None),
    Field("return_logprob", False),
    Field("logprob_start_len", -1),  # the output has no place for a prompt's logprobs
    Field("top_logprobs_num", 0),
    Field("token_ids_logprob", None),
    Field("stream", True),
)

AT = {f.name: i for i, f in enumerate(SAMPLING)}
DEFAULTS = [f.default for f in SAMPLING]
FROM_PARAMS = tuple((i, f.param, f.check) for i, f in enumerate(SAMPLING) if f.check and f.param)
FROM_EXTRA = {f.name: (i, f.check) for i, f in enumerate(SAMPLING) if f.check and not f.param}
CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag")


class _Packer(threading.local):
    """`pack`, with a packer for each thread: making one costs more than packing a short request."""

    def __init__(self) -> None:
        self.pack: Callable[[Any], bytes] = msgpack.Packer().pack


_packer = _Packer()

# A request is packed in pieces; these are the constant ones.
_HEAD = bytes([0x90 | (1 + len(REQUEST))]) + msgpack.packb(REQUEST_TAG)
_STR8 = 0xD9  # ids have this header at any length, so that they begin at the same place
_BETWEEN = b"".join(msgpack.packb(f.default) for f in REQUEST[1:3])
_TAIL = {
    want: b"".join(msgpack.packb(want if f.name == "return_logprob" else f.default) for f in REQUEST[5:])
    for want in (False, True)
}


RID_OFFSET = len(_HEAD) + 2  # where in a request's payload the characters of its id begin


def encode_add(
    rid: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams | None = None,
    *,
    context_length: int | None = None,
) -> bytes:
    """The payload of an ADD.

    `rid` has up to 255 ASCII characters and may be patched over at RID_OFFSET. `prompt_token_ids` is a list,
    tuple, range, numpy array or any other sequence of ints. `context_length` (tokens, prompt and
    completion together), when known, bounds the prompt, and the completion of a request without max_tokens.
    Raises `InvalidRequest` for every value that the engine would refuse.
    """
    prompt = _packed_prompt(prompt_token_ids, context_length)
    sampling, want_logprob = _sampling_values(params, len(prompt_token_ids), context_length)
    id_header = bytes((_STR8, len(rid)))
    head = (_HEAD, id_header, rid.encode("ascii"), _BETWEEN)
    return b"".join((*head, prompt, _packer.pack(sampling), _TAIL[want_logprob]))


def validate(
    prompt_token_ids: Sequence[int],
    params: SamplingParams | None = None,
    *,
    context_length: int | None = None,
) -> None:
    """Raise `InvalidRequest` where `encode_add` would."""
    _packed_prompt(prompt_token_ids, context_length)
    _sampling_values(params, len(prompt_token_ids), context_length)


def encode_abort(rids: Sequence[str]) -> bytes:
    """The payload of an ABORT. The engine does not answer it, and kills a later request of the same id."""
    return _packer.pack(list(rids))


def _packed_prompt(prompt_token_ids: Sequence[int], context_length: int | None) -> bytes:
    packed = pack_token_ids(prompt_token_ids)
    count = len(prompt_token_ids)
    if not count:
        raise InvalidRequest("prompt_token_ids", prompt_token_ids, "one token at least")
    if context_length is not None and count >= context_length:
        allowed = f"fewer tokens than the context of {context_length}, which has to hold the completion too"
        raise InvalidRequest("prompt_token_ids", count, allowed)
    return packed


def _sampling_values(
    params: SamplingParams | None, prompt_length: int, context_length: int | None
) -> tuple[list[Any], bool]:
    """The elements of the sampling array, and whether the sampled token's logprob is wanted."""
    values = DEFAULTS.copy()
    want_logprob = False
    if params is not None:
        if not isinstance(params, SamplingParams):
            raise InvalidRequest("params", params, "a SamplingParams or None")
        for at, name, check in FROM_PARAMS:
            value = getattr(params, name)
            if value is not None:
                values[at] = check(name, value)
        if params.extra:
            _set_extra(values, params.extra)
        _check_constraints(values)
        want_logprob = params.logprobs is not None
    if values[AT["max_new_tokens"]] is None and context_length is not None:
        values[AT["max_new_tokens"]] = context_length - prompt_length
    longest, shortest = values[AT["max_new_tokens"]], values[AT["min_new_tokens"]]
    if longest is not None and shortest > longest:
        raise InvalidRequest("min_tokens", shortest, f"at most max_tokens, {longest}")
    if values[AT["seed"]] is None:
        values[AT["seed"]] = getrandbits(32)  # the engine would take a nil seed from the id
    return values, want_logprob


def _set_extra(values: list[Any], extra: Any) -> None:
    if not isinstance(extra, Mapping):
        raise InvalidRequest("extra", extra, "a dict of backend name to a dict of its fields")
    own = extra.get("tokenspeed", {})
    if not isinstance(own, Mapping):
        raise InvalidRequest("extra['tokenspeed']", own, "a dict")
    for name, value in own.items():
        if name not in FROM_EXTRA:
            raise InvalidRequest("extra['tokenspeed']", name, f"one of {', '.join(FROM_EXTRA)}")
        at, check = FROM_EXTRA[name]
        if value is not None:
            values[at] = check(f"extra['tokenspeed']['{name}']", value)


def _check_constraints(values: list[Any]) -> None:
    given = [name for name in CONSTRAINTS if values[AT[name]] is not None]
    if len(given) > 1:
        raise InvalidRequest(given[1], values[AT[given[1]]], f"None, since {given[0]} is set and only one can be")


# Outputs


class Column(NamedTuple):
    """One column of an output frame: parallel to `rids`, an entry for each request."""

    name: str
    entry: Callable[[Any], bool]
    wanted: str


def _is_text(value: Any) -> bool:
    return type(value) is str and is_unicode(value)


def _is_u32(value: Any) -> bool:
    return type(value) is int and 0 <= value <= U32


def _is_u32s(value: Any) -> bool:
    return type(value) is list and all(map(_is_u32, value))


def _is_floats(value: Any) -> bool:
    return type(value) is list and all(type(item) in (float, int) for item in value)


_U32 = "an integer in 0..4294967295"

# BatchTokenIDOutSlim
OUTPUT_TAG = "BatchTokenIDOutSlim"
COLUMNS = (
    Column("rids", _is_text, "text in UTF-8"),
    Column("output_ids", _is_u32s, f"an array of {_U32} each"),  # new ones
    Column("finished_reasons", _is_text, "text in UTF-8"),  # "" while running, "stop", "length", "abort"
    Column("prompt_tokens", _is_u32, _U32),
    Column("completion_tokens", _is_u32, _U32),  # cumulative
    Column("cached_tokens", _is_u32, _U32),
    Column("output_token_logprobs_val", _is_floats, "an array of floats"),  # [] when off
    Column("output_token_logprobs_idx", _is_u32s, f"an array of {_U32} each"),
)
# Optional integers after the columns: the first since August 2026, the others since 0.1.1. A report of load
# needs all of them and pages to speak of.
TAIL = ("engine_index", "num_running", "num_waiting", "kv_active_pages", "kv_total_pages")


def decode_outputs(frame: bytes) -> DecodedBatch:
    """One output frame, decoded the plain way. Raises `DecodeError`.

    The compiled decoder accepts and refuses the same frames, and names the same column.
    """
    if len(frame) > MAX_FRAME:
        raise DecodeError(f"frame has {len(frame)} bytes, more than {MAX_FRAME}", "frame")
    reader = _Reader(frame)
    elements = reader.read("frame", reader.unpacker.read_array_header)
    left = len(frame) - reader.unpacker.tell()
    if elements > left:
        raise DecodeError(f"frame has {elements} elements in {left} bytes", "frame")
    if elements <= len(COLUMNS):
        raise DecodeError(f"frame has {elements} elements, needs {1 + len(COLUMNS)}", "frame")
    if reader.read("tag") != OUTPUT_TAG:
        raise DecodeError(f"tag is not {OUTPUT_TAG}", "tag")
    columns: list[list[Any]] = []
    for column in COLUMNS:
        values = reader.read(column.name)
        if type(values) is not list:
            raise DecodeError(f"{column.name} must be an array, is {type(values).__name__}", column.name)
        if columns and len(values) != len(columns[0]):
            found = f"has {len(values)} entries, rids has {len(columns[0])}"
            raise DecodeError(f"{column.name} {found}", column.name)
        for row, value in enumerate(values):
            if not column.entry(value):
                raise DecodeError(f"{column.name}[{row}] must be {column.wanted}", column.name)
        columns.append(values)
    for row, (logprobs, ids) in enumerate(zip(columns[6], columns[7], strict=True)):
        if len(logprobs) != len(ids):
            name = COLUMNS[7].name
            raise DecodeError(f"{name}[{row}] has {len(ids)} entries, {COLUMNS[6].name} {len(logprobs)}", name)
    tail = []
    for name in TAIL[: elements - 1 - len(COLUMNS)]:
        value = reader.read(name)
        if type(value) is not int or value < 0:
            raise DecodeError(f"{name} must be an integer of 0 or more", name)
        tail.append(value)
    for _ in range(elements - 1 - len(COLUMNS) - len(TAIL)):
        reader.read("extra", reader.skip)
    if reader.unpacker.tell() != len(frame):
        raise DecodeError(f"frame has {len(frame) - reader.unpacker.tell()} bytes after its end", "frame")
    return DecodedBatch(
        [_row(*entries) for entries in zip(*columns, strict=True)],
        tail[0] if tail else None,
        Load(tail[1], tail[2], min(1.0, float(tail[3]) / float(tail[4]))) if any(tail[4:]) else None,
    )


def _row(rid: str, ids: list[int], reason: str, *rest: Any) -> DecodedRow:
    prompt, completion, cached, values, logprob_ids = rest
    floats = list(map(float, values))
    return DecodedRow(rid, parse_wire_id(rid), ids, reason, prompt, completion, cached, floats, logprob_ids)


def decode_logprobs(spans: bytes, top: int | None = None) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """The logprob entries of one or more outputs of a request, as (token id, logprob, likeliest others).

    `spans`: its entry in output_token_logprobs_val, then in output_token_logprobs_idx, for each output in
    turn, as they are in the frames. This engine sends no likeliest others, whatever `top` says.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(spans)))
    unpacker.feed(spans)
    columns = iter(unpacker)
    return [
        (token, float(value), [])
        for values, tokens in zip(columns, columns, strict=True)
        for value, token in zip(values, tokens, strict=True)
    ]


class _Reader:
    """A frame read value by value, each under the name of its column."""

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        # Text that is not UTF-8 comes with surrogates in it, to be refused where text is meant.
        self.unpacker = msgpack.Unpacker(
            unicode_errors="surrogateescape", strict_map_key=False, max_buffer_size=max(1, len(frame))
        )
        self.unpacker.feed(frame)

    def read(self, column: str, how: Callable[[], Any] | None = None) -> Any:
        try:
            return (how or self.unpacker.unpack)()
        except DecodeError:
            raise
        except Exception as error:  # msgpack's own kinds, and ValueError and TypeError of Python's
            raise DecodeError(f"{column} is malformed: {str(error) or type(error).__name__}", column) from None

    def skip(self) -> None:
        """Past one well-formed value."""
        pending = [1]  # values still to come at each level
        while pending:
            lead = self.frame[self.unpacker.tell()]
            pending[-1] -= 1
            children = 0
            if 0x90 <= lead <= 0x9F or lead in (0xDC, 0xDD):
                children = self.unpacker.read_array_header()
            elif 0x80 <= lead <= 0x8F or lead in (0xDE, 0xDF):
                children = 2 * self.unpacker.read_map_header()
            else:
                self.unpacker.skip()
            if children:
                if len(pending) > MAX_DEPTH:
                    raise DecodeError(f"extra is nested deeper than {MAX_DEPTH} levels", "extra")
                pending.append(children)
            while pending and pending[-1] == 0:
                pending.pop()


# The engine's side, for simulators and tests


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it is on the wire, whatever its values. What `sampling` lacks has SAMPLING's default."""

    rid: str
    input_ids: list[int]
    sampling: dict[str, Any]
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    stream: bool = False


def encode_request(request: Request) -> bytes:
    """The first 11 elements of any request, also of one that the engine would refuse."""
    sampling = [request.sampling.get(f.name, f.default) for f in SAMPLING]
    head = (REQUEST_TAG, request.rid, None, None, request.input_ids, sampling, request.return_logprob)
    tail = (request.logprob_start_len, request.top_logprobs_num, request.token_ids_logprob, request.stream)
    return _packer.pack((*head, *tail))


def decode_request(payload: bytes) -> Request:
    """An ADD's payload as the engine reads it: from 6 elements on, its sampling array cut short or not.

    Raises `DecodeError` where the engine drops the request without an answer.
    """
    fields = _unpacked(payload, "request")
    if type(fields) is not list or len(fields) < 6 or fields[0] != REQUEST_TAG:
        raise DecodeError(f"request must be an array of 6 elements or more with the tag {REQUEST_TAG}", "request")
    rid, input_ids, sampling = fields[1], fields[4], fields[5]
    if not _is_text(rid):
        raise DecodeError("rid must be text in UTF-8", "rid")
    if not _is_u32s(input_ids):
        raise DecodeError("input_ids must be an array of token ids", "input_ids")
    if type(sampling) is not list:
        raise DecodeError("sampling_params must be an array", "sampling_params")
    named = dict(zip(AT, sampling[: len(SAMPLING)] + DEFAULTS[len(sampling) :], strict=True))
    return Request(rid, input_ids, named, *fields[6:11])


def decode_abort(payload: bytes) -> list[str]:
    """The ids of an ABORT. Raises `DecodeError`."""
    rids = _unpacked(payload, "abort")
    if type(rids) is not list or not all(map(_is_text, rids)):
        raise DecodeError("abort must be an array of text", "abort")
    return rids


def encode_outputs(
    rids: Sequence[str],
    output_ids: Sequence[Sequence[int]],
    finished_reasons: Sequence[str],
    prompt_tokens: Sequence[int],
    completion_tokens: Sequence[int],
    cached_tokens: Sequence[int],
    logprob_values: Sequence[Sequence[float]] | None = None,
    logprob_ids: Sequence[Sequence[int]] | None = None,
    *,
    tail: Sequence[int] = (),
) -> bytes:
    """An output frame of 9 elements and those of `tail`, which are TAIL's. Columns are lists or tuples."""
    empty: list[Any] = [()] * len(rids)
    columns = (rids, output_ids, finished_reasons, prompt_tokens, completion_tokens, cached_tokens)
    return _packer.pack((OUTPUT_TAG, *columns, logprob_values or empty, logprob_ids or empty, *tail))


def _unpacked(payload: bytes, what: str) -> Any:
    try:
        return msgpack.unpackb(payload, unicode_errors="surrogateescape", strict_map_key=False)
    except Exception as error:  # msgpack's own kinds, and ValueError and TypeError of Python's
        raise DecodeError(f"{what} is malformed: {str(error) or type(error).__name__}", what) from None
