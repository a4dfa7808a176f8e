"""vLLM's output messages: the reference decoder.

A message is a frame, `EngineCoreOutputs`, and the parts that hold its larger arrays. The tables below are its
structs in wire order; `_vllm.pxd` has the compiled decoder, which accepts and refuses the same messages and
names the same column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgpack

from smg._decoded import MAX_FRAME, DecodedOutput, DecodedOutputs, Load, parse_wire_id
from smg.errors import DecodeError
from smg.protocol.reader import Reader
from smg.protocol.rules import I63, U32, is_unicode
from smg.protocol.vllm_cold import KV_TRANSFER, LOGPROBS, PROMPT_LOGPROBS

# EngineCoreOutputs. weight_version came with 0.32.
ENVELOPE = (
    "engine_index",
    "outputs",
    "scheduler_stats",
    "timestamp",
    "utility_output",
    "finished_requests",
    "wave_complete",
    "start_wave",
    "weight_version",
)
# EngineCoreOutput. 0.26 and 0.27 end with num_nans_in_logits; 0.28, 0.29 and 0.31 appended to it.
OUTPUT = (
    "request_id",
    "new_token_ids",
    "new_logprobs",
    "new_prompt_logprobs_tensors",
    "pooling_output",
    "finish_reason",
    "stop_reason",
    "events",
    "kv_transfer_params",
    "ec_transfer_params",
    "trace_headers",
    "prefill_stats",
    "routed_experts",
    "num_nans_in_logits",
    "mm_cache_miss_hashes",
    "new_sampling_mask",
    "spec_decode_metrics",
    "prompt_token_id_logprobs",
)
# 0.20 to 0.25: told by its length, since arrays always come whole
OUTPUT_BEFORE_EC = tuple(name for name in OUTPUT[:14] if name != "ec_transfer_params")
ROW_REQUIRED = 2  # elements
ROW_BYTES = 3  # the least that an output takes: its header and two elements

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
UNKNOWN_FINISH = "error"  # any reason ends a request

RAW_BYTES = 3  # the ext code of an array's data
INTEGERS = {
    **{f"{sign}{width}": width for sign in "iu" for width in (1, 2, 4, 8)},
    **{f"{sign}int{8 * width}": width for sign in ("", "u") for width in (1, 2, 4, 8)},
}
FLOATS = {"f2": 2, "f4": 4, "f8": 8, "float16": 2, "float32": 4, "float64": 8}
WIDTHS = {**INTEGERS, **FLOATS, "b1": 1, "bool": 1, "bfloat16": 2}  # bytes per number


# The reference decoder


def decode_outputs(parts: Sequence[bytes]) -> DecodedOutputs:
    """One message, decoded the plain way. Raises `DecodeError`."""
    for number, part in enumerate(parts):
        if len(part) > MAX_FRAME:
            raise DecodeError(f"part[{number}] has {len(part)} bytes, more than {MAX_FRAME}", "part")
    reader = Reader(parts)
    elements = reader.array("frame")
    envelope: dict[str, Any] = {}
    for name in ENVELOPE[:elements]:
        envelope[name] = _ENVELOPE_READERS[name](reader, name)
        if name == "start_wave" and envelope[name] is not None and envelope["wave_complete"] is not None:
            raise DecodeError("start_wave must be nil beside wave_complete", name)
    for _ in range(elements - len(ENVELOPE)):
        reader.skip("extra")
    if reader.at != len(reader.frame):
        raise DecodeError(f"frame has {len(reader.frame) - reader.at} bytes after its end", "frame")
    stats, finished = envelope.get("scheduler_stats"), envelope.get("finished_requests")
    utility = envelope.get("utility_output")
    waves = {"complete": envelope.get("wave_complete"), "start": envelope.get("start_wave")}
    wave = [(kind, number) for kind, number in waves.items() if number is not None]
    rows = envelope.get("outputs", [])
    step = bool(rows) or stats is not None or finished is not None
    if step + (utility is not None) + len(wave) != 1:
        raise DecodeError("frame is neither a step's outputs nor a utility reply nor a wave notice", "frame")
    return DecodedOutputs(
        rows,
        envelope.get("engine_index"),
        _load(stats or {}),
        [(rid, parse_wire_id(rid)) for rid in finished or ()],
        utility,
        wave[0] if wave else None,
        envelope.get("weight_version") or None,
    )


def _load(stats: dict[str, Any]) -> Load | None:
    """The two queues' lengths are needed; other keys may be missing or new."""
    if "num_running_reqs" not in stats or "num_waiting_reqs" not in stats:
        return None
    waiting = stats["num_waiting_reqs"] + stats.get("num_skipped_waiting_reqs", 0)
    usage = stats.get("kv_cache_usage", 0.0)
    return Load(stats["num_running_reqs"], waiting, min(1.0, usage) if usage >= 0 else 0.0)


def _read_outputs(reader: Reader, name: str) -> list[DecodedOutput]:
    count = reader.array(name)
    if count > reader.left // ROW_BYTES:
        raise DecodeError(f"{name} has {count} entries, which do not fit in the frame", name)
    reader.end -= ROW_BYTES * count
    rows = []
    for _ in range(count):
        reader.end += ROW_BYTES  # none takes what those after it need
        rows.append(_read_row(reader))
    return rows


def _read_row(reader: Reader) -> DecodedOutput:
    elements = reader.array("outputs")
    if elements < ROW_REQUIRED:
        raise DecodeError(f"outputs has an entry of {elements} elements, needs {ROW_REQUIRED}", "outputs")
    names = OUTPUT_BEFORE_EC if elements == len(OUTPUT_BEFORE_EC) else OUTPUT
    row: dict[str, Any] = {}
    for at in range(elements):
        name = names[at] if at < len(names) else "extra"
        # A fault in what is skipped is named by its place in the newest layout.
        said = OUTPUT[at] if at < len(OUTPUT) else "extra"
        if at >= ROW_REQUIRED and reader.nil():
            continue
        read = _ROW_READERS.get(name)
        if read is None:
            reader.skip(said)
        else:
            row[name] = read(reader, name)
    prefill = row.get("prefill_stats", {})
    counts = (prefill.get("num_prompt_tokens"), prefill.get("num_cached_tokens", 0))
    return DecodedOutput(
        row["request_id"],
        parse_wire_id(row["request_id"]),
        row["new_token_ids"],
        row.get("finish_reason", ""),
        row.get("stop_reason"),
        None if counts[0] is None else counts,
        [cold for cold in map(row.get, ("new_logprobs", "new_prompt_logprobs_tensors", "kv_transfer_params")) if cold],
    )


def _read_text(reader: Reader, name: str) -> str:
    value = reader.value(name)
    if type(value) is not str or not is_unicode(value):
        raise DecodeError(f"{name} must be text in UTF-8", name)
    return value


def _read_count(reader: Reader, name: str) -> int:
    value = reader.value(name)
    if type(value) is not int or value < 0:
        raise DecodeError(f"{name} must be an integer of 0 or more", name)
    return value


def _read_tokens(reader: Reader, name: str) -> list[int]:
    value = reader.value(name)
    if type(value) is not list or not all(type(token) is int and 0 <= token <= U32 for token in value):
        raise DecodeError(f"{name} must be an array of integers in 0..4294967295", name)
    return value


def _read_finish(reader: Reader, name: str) -> str:
    value = reader.value(name)
    if type(value) is not int:
        raise DecodeError(f"{name} must be an integer or nil", name)
    return FINISH_REASONS[value] if 0 <= value < len(FINISH_REASONS) else UNKNOWN_FINISH


def _read_stop(reader: Reader, name: str) -> int | str:
    value = reader.value(name)
    if not (type(value) is str and is_unicode(value)) and not (type(value) is int and value <= I63):
        raise DecodeError(f"{name} must be an integer, text or nil", name)
    return value


def _read_texts(reader: Reader, name: str) -> list[str]:
    value = reader.value(name)
    if type(value) is not list or not all(type(text) is str and is_unicode(text) for text in value):
        raise DecodeError(f"{name} must be an array of text or nil", name)
    return value


def _read_numbers(*floats: str, integers: Sequence[str]) -> Callable[[Reader, str], dict[str, Any]]:
    """A reader of maps that takes these keys and skips all others, of whatever type."""

    def read(reader: Reader, name: str) -> dict[str, Any]:
        numbers: dict[str, Any] = {}
        for _ in range(reader.map(name)):
            key = ""
            if reader.next_is_text():
                key = reader.value(name)
            else:
                reader.skip(name)
            if key in integers:
                value = reader.value(name)
                if type(value) is not int or not 0 <= value <= U32:
                    raise DecodeError(f"{name} must have an integer in 0..4294967295 as {key}", name)
                numbers[key] = value
            elif key in floats:
                value = reader.value(name)
                if type(value) not in (int, float):
                    raise DecodeError(f"{name} must have a number as {key}", name)
                numbers[key] = float(value)
            else:
                reader.skip(name)
        return numbers

    return read


def _read_utility(reader: Reader, name: str) -> tuple[int, bytes]:
    start = reader.at
    elements = reader.array(name)
    call_id = reader.value(name) if elements else None
    if type(call_id) is not int or call_id > I63:
        raise DecodeError(f"{name} must have an integer as call_id", name)
    if elements > 1 and not reader.nil():
        _read_text(reader, name)
    for _ in range(elements - 2):
        reader.skip(name)
    return call_id, reader.frame[start : reader.at]


def _read_kv_transfer(reader: Reader, name: str) -> bytes:
    if not reader.next_is_map():
        raise DecodeError(f"{name} must be a map or nil", name)
    start = reader.at
    reader.skip(name)
    return bytes((KV_TRANSFER,)) + reader.frame[start : reader.at]


def _read_logprobs(kind: int) -> Callable[[Reader, str], bytes]:
    """A reader of token ids and logprobs of shape [n, k], ranks of shape [n], and what is skipped."""

    def read(reader: Reader, name: str) -> bytes:
        start = reader.at
        elements = reader.array(name)
        if elements < 3:
            raise DecodeError(f"{name} has {elements} elements, needs 3", name)
        ids, values, ranks = (_read_tensor(reader, name) for _ in range(3))
        if ids.dtype not in INTEGERS or values.dtype not in FLOATS or ranks.dtype not in INTEGERS:
            raise DecodeError(f"{name} must be arrays of integers, floats and integers", name)
        shapes_fit = ids.shape == values.shape and ids.shape[:1] == ranks.shape
        if len(ids.shape) != 2 or not ids.shape[1] or not shapes_fit:
            raise DecodeError(f"{name} must be arrays of shapes [n, k], [n, k] and [n]", name)
        if kind == LOGPROBS and elements > 3 and not reader.nil():
            raise DecodeError(f"{name} must have nil as cu_num_generated_tokens", name)
        for _ in range(elements - (4 if kind == LOGPROBS else 3)):
            reader.skip(name)
        parts = [reader.parts[array.part] for array in (ids, values, ranks) if array.part]
        bins = [b"\xc6" + len(part).to_bytes(4, "big") + part for part in parts]
        return b"".join((bytes((kind,)), reader.frame[start : reader.at], *bins))

    return read


class _Tensor(NamedTuple):
    """An array's description."""

    dtype: str  # without the sign of a byte order
    shape: list[int]
    part: int  # that holds its data, 0 = inline


def _read_tensor(reader: Reader, name: str) -> _Tensor:
    """[dtype, shape, data], data being ext 3 or the number of a part."""
    if reader.array(name) != 3:
        raise DecodeError(f"{name} must hold arrays as [dtype, shape, data]", name)
    dtype, shape, data = (reader.value(name) for _ in range(3))
    if type(dtype) is not str:
        raise DecodeError(f"{name} must name its dtype", name)
    if type(shape) is not list or not all(type(length) is int and 0 <= length <= U32 for length in shape):
        raise DecodeError(f"{name} must have a shape of lengths", name)
    count = 1
    for length in shape:
        count *= length
        if count > U32:
            raise DecodeError(f"{name} has a shape of more numbers than a message can hold", name)
    if len(dtype) == 3 and dtype[0] in "<>=|":
        dtype = dtype[1:]
    part = 0
    if type(data) is msgpack.ExtType and data.code == RAW_BYTES:
        size = len(data.data)
    elif type(data) is int and 0 < data < len(reader.parts):
        part, size = data, len(reader.parts[data])
        if size > reader.aux_left:
            raise DecodeError(f"{name} has its data in a part that something else has used", name)
        reader.aux_left -= size
    else:
        raise DecodeError(f"{name} must have data as bytes or as a part's number", name)
    if dtype in WIDTHS and size != count * WIDTHS[dtype]:
        raise DecodeError(f"{name} has {size} bytes of data, its shape {count * WIDTHS[dtype]}", name)
    return _Tensor(dtype, shape, part)


def _optional(read: Callable[[Reader, str], Any]) -> Callable[[Reader, str], Any]:
    return lambda reader, name: None if reader.nil() else read(reader, name)


_ENVELOPE_READERS: dict[str, Callable[[Reader, str], Any]] = {
    "engine_index": _read_count,
    "outputs": _read_outputs,
    "scheduler_stats": _optional(
        _read_numbers("kv_cache_usage", integers=("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs"))
    ),
    "timestamp": Reader.skip,
    "utility_output": _optional(_read_utility),
    "finished_requests": _optional(_read_texts),
    "wave_complete": _optional(_read_count),
    "start_wave": _optional(_read_count),
    "weight_version": _optional(_read_text),
}
# What has no reader is of no use to a router, and skipped.
_ROW_READERS: dict[str, Callable[[Reader, str], Any]] = {
    "request_id": _read_text,
    "new_token_ids": _read_tokens,
    "new_logprobs": _read_logprobs(LOGPROBS),
    "new_prompt_logprobs_tensors": _read_logprobs(PROMPT_LOGPROBS),
    "pooling_output": _read_tensor,
    "finish_reason": _read_finish,
    "stop_reason": _read_stop,
    "kv_transfer_params": _read_kv_transfer,
    "prefill_stats": _read_numbers(integers=("num_prompt_tokens", "num_cached_tokens")),
}
