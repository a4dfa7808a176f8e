"""TokenSpeed's wire, from the engine's side.

Requests are read as the engine's typed decoder reads them: arrays of at least the required length, missing
tail defaulted, further elements skipped, types strict. The tables are written from the engine's structs and
deliberately not shared with `smg.protocol.tokenspeed`, so that a slip in the router's layout shows here.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgpack

from smg.mock.dialect import ADD, DEAD, Taken, Undecodable, spoiled
from smg.mock.fields import Field, anything, ints, is_bool, is_float, is_int, is_list, is_map, is_str, str_or_strs
from smg.mock.lockstep import Member
from smg.mock.model import Batch, Ending, Engine, Request
from smg.mock.settings import Settings
from smg.protocol import handshake

ABORT = b"\x01"
REQUEST_TAG = "TokenizedGenerateReqInput"
OUTPUT_TAG = "BatchTokenIDOutSlim"
REQUEST_LEAST = 6  # elements, tag included

ABORT_MARKER_SECONDS = 300.0  # how long an ABORT for an id that is not here kills a later ADD of that id
FORCED_INTERVAL = 50  # tokens between the rows of a request that does not stream
TOP_K_ALL = 1 << 30
TOP_K_END = 128
GREEDY_BELOW = 1e-6  # temperature


def _biases(value: Any) -> bool:
    return is_map(value) and all(map(is_float, value.values()))


REQUEST = (
    Field("rid", str_or_strs),
    Field("http_worker_ipc", is_str),
    Field("input_text", is_str),
    Field("input_ids", ints),
    Field("sampling_params", is_list, nil=False),
    Field("return_logprob", is_bool, False, nil=False),
    Field("logprob_start_len", is_int, -1, nil=False),
    Field("top_logprobs_num", is_int, 0, nil=False),
    Field("token_ids_logprob", ints),
    Field("stream", is_bool, False, nil=False),
    Field("input_embeds", is_list),
    Field("session_params", is_list),
    Field("custom_logit_processor", is_str),
    Field("return_hidden_states", is_bool, False, nil=False),
    Field("created_time", is_float, 0.0, nil=False),
    Field("bootstrap_host", is_str),
    Field("bootstrap_port", is_int),
    Field("bootstrap_room", is_int),
    Field("input_multi_ids", is_list),
    Field("input_extra_infos", is_list),
    Field("input_ids_unpadded", ints),
    Field("multimodal_inputs", anything),
    Field("validation_error", is_str),
    Field("data_parallel_rank", is_int),
)

SAMPLING = (
    Field("max_new_tokens", is_int),
    Field("stop", str_or_strs),
    Field("stop_token_ids", ints),
    Field("temperature", is_float, 1.0, nil=False),
    Field("top_p", is_float, 1.0, nil=False),
    Field("top_k", is_int, -1, nil=False),
    Field("min_p", is_float, 0.0, nil=False),
    Field("frequency_penalty", is_float, 0.0, nil=False),
    Field("presence_penalty", is_float, 0.0, nil=False),
    Field("repetition_penalty", is_float, 1.0, nil=False),
    Field("min_new_tokens", is_int, 0, nil=False),
    Field("json_schema", is_str),
    Field("regex", is_str),
    Field("ebnf", is_str),
    Field("structural_tag", is_str),
    Field("ignore_eos", is_bool, False, nil=False),
    Field("skip_special_tokens", is_bool, True, nil=False),
    Field("spaces_between_special_tokens", is_bool, True, nil=False),
    Field("no_stop_trim", is_bool, False, nil=False),
    Field("thinking_budget", is_int),
    Field("custom_params", is_map),
    Field("stream_interval", is_int),
    Field("logit_bias", _biases),
    Field("seed", is_int),
    Field("logprobs", is_int),
    Field("n", is_int, 1, nil=False),
    Field("stop_strs", str_or_strs),
    Field("stop_str_max_len", is_int, 0, nil=False),
    Field("is_normalized", is_bool, False, nil=False),
)

# Columns of an output frame after its tag, by attribute of Batch; then engine index and the load.
COLUMNS = {
    "rids": "rids",
    "output_ids": "token_ids",
    "finished_reasons": "finish_reasons",
    "prompt_tokens": "prompt_tokens",
    "completion_tokens": "completion_tokens",
    "cached_tokens": "cached_tokens",
    "output_token_logprobs_val": "logprobs",
    "output_token_logprobs_idx": "logprob_ids",
}


class TokenSpeed:
    """A `Dialect`."""

    # max_req_len is the context - 1, and one more place is kept free.
    ending = Ending(spare=2, limit_first=True)
    hwm = 1000
    member: Member | None = None
    registers_first = False
    reports_every_step = False

    def __init__(self, settings: Settings, engine: Engine, vocab_size: int) -> None:
        self._settings = settings
        self._engine = engine
        self._vocab_size = vocab_size
        self._markers: dict[str, float] = {}  # aborted id -> when, oldest first
        self._packer = msgpack.Packer(autoreset=True, buf_size=1 << 16)

    def hello(self) -> bytes:
        return handshake.encode_status(handshake.HELLO, parallel_config_hash=None)

    def ready(self) -> bytes:
        return handshake.encode_status(handshake.READY, parallel_config_hash=None)

    def registration(self, index: int) -> bytes:
        settings = self._settings
        old = settings.slim_elements == 9  # from before block_size was renamed
        payload = handshake.encode_registration(
            handshake.Registration(
                vllm_version="tokenspeed-0.1.1" if settings.slim_elements == 14 else "tokenspeed-0.1.0",
                max_model_len=settings.max_model_len,
                num_gpu_blocks=settings.kv_pages,
                block_size=settings.page_size,
                world_size=settings.group_size,
                data_parallel_size=settings.group_size,
                data_parallel_rank=index,
                max_num_seqs=settings.max_running,
                max_num_batched_tokens=settings.prefill_chunk,
                instance_id="mock",
                kv_cache_size_tokens=settings.kv_pages * settings.page_size,
            ),
            handshake.TOKENSPEED_REGISTRATION_BEFORE_RENAME if old else handshake.TOKENSPEED_REGISTRATION,
        )
        overrides = settings.registration_overrides
        if not overrides:
            return payload
        values = {**msgpack.unpackb(payload), **overrides}
        packed: bytes = msgpack.packb({k: v for k, v in values.items() if overrides.get(k, 0) is not None})
        return packed

    def take(self, frames: list[bytes], now: float) -> Taken:
        if len(frames) < 2:
            raise Undecodable(f"{len(frames)} frames: a type byte and a payload are needed")
        self._forget_markers(now)
        if frames[0] == ADD:
            return self._add(decode_add(frames[1]), frames[2:], now)
        if frames[0] == ABORT:
            return self._abort(decode_abort(frames[1]), now)
        raise Undecodable(f"request type {frames[0][:8].hex() or 'empty'} is neither 00 (ADD) nor 01 (ABORT)")

    def encode(self, batch: Batch, engine_index: int) -> list[bytes]:
        return [self._packer.pack(self._elements(batch, engine_index))]

    def spoil(self, kind: str, batch: Batch, engine_index: int, column: str) -> list[bytes]:
        elements = self._elements(batch, engine_index)
        if kind == "ragged":
            if column not in COLUMNS:
                raise ValueError(f"column {column!r}: must be one of {', '.join(COLUMNS)}")
            place = 1 + list(COLUMNS).index(column)
            elements[place] = elements[place][:-1]
        elif kind == "tag":
            elements[0] = "BatchTokenIDOut"
        elif kind == "short":
            del elements[8:]
        frame = self._packer.pack({"rids": batch.rids} if kind == "map" else elements)
        return [frame if kind in ("ragged", "tag", "short", "map") else spoiled(frame, kind)]

    def between_steps(self, engine_index: int) -> list[list[bytes]]:
        return []

    def farewell(self, engine_index: int) -> list[list[bytes]]:
        return [[DEAD]]

    def _elements(self, batch: Batch, engine_index: int) -> list[Any]:
        columns = [getattr(batch, name) for name in COLUMNS.values()]
        return [OUTPUT_TAG, *columns, engine_index, *(batch.load or self._engine.load)][: self._settings.slim_elements]

    def _add(self, request: dict[str, Any], aux: Sequence[bytes], now: float) -> Taken:
        rid, prompt, sampling = request["rid"], request["input_ids"], request["sampling_params"]
        if not is_str(rid):
            raise Undecodable("rid is not one str")
        if prompt is None:
            raise Undecodable("input_ids is nil")
        normalize(sampling, rid)
        if aux:
            request["aux_bytes"] = [len(frame) for frame in aux]
        taken = Taken("add", [rid], "queued", request)
        taken.reason = self._refusal(request) or ""
        if taken.reason:
            taken.outcome = "rejected"
            taken.answer = self._terminal_abort(rid, len(prompt))
            self._markers.pop(rid, None)
        elif self._markers.pop(rid, None) is not None:
            taken.outcome = "killed"
        else:
            taken.duplicate = rid in self._engine
            self._engine.add(self._to_request(request), now)
        return taken

    def _abort(self, rids: list[str], now: float) -> Taken:
        for rid in rids:
            if not self._engine.abort(rid):
                self._markers.pop(rid, None)
                self._markers[rid] = now
        return Taken("abort", rids, "aborted")

    def _forget_markers(self, now: float) -> None:
        while self._markers:
            oldest = next(iter(self._markers))
            if now - self._markers[oldest] <= ABORT_MARKER_SECONDS:
                return
            del self._markers[oldest]

    def _refusal(self, request: dict[str, Any]) -> str | None:
        settings, sampling, prompt = self._settings, request["sampling_params"], request["input_ids"]
        if sampling["n"] != 1:
            return f"n={sampling['n']} is not supported"
        if request["validation_error"]:
            return str(request["validation_error"])
        if request["return_logprob"]:
            if not settings.enable_output_logprobs:
                return "logprobs need --enable-output-logprobs"
            if request["top_logprobs_num"]:
                return "top_logprobs_num must be 0"
            if request["token_ids_logprob"]:
                return "token_ids_logprob is not supported"
            start = request["logprob_start_len"]
            if start != -1 and start != len(prompt) - 1:
                return f"logprob_start_len={start} asks for prompt logprobs"
        reason = invalid_sampling(sampling, self._vocab_size)
        if reason:
            return reason
        if request["session_params"] and request["session_params"][0] is not None:
            return "the session does not exist"
        constraints = ("json_schema", "regex", "ebnf", "structural_tag")
        if not settings.grammar_backend and any(sampling[name] is not None for name in constraints):
            return "constrained output needs --grammar-backend"
        if not self._engine.holds(len(prompt)):
            return f"{len(prompt)} prompt tokens do not fit the KV cache"
        return None

    def _to_request(self, request: dict[str, Any]) -> Request:
        sampling = request["sampling_params"]
        interval, phase = FORCED_INTERVAL, 0
        if request["stream"]:
            interval, phase = sampling["stream_interval"] or 1, 1
        return Request(
            rid=request["rid"],
            prompt_tokens=len(request["input_ids"]),
            seed=sampling["seed"],
            max_tokens=sampling["max_new_tokens"],
            min_tokens=sampling["min_new_tokens"],
            ignore_eos=sampling["ignore_eos"],
            stop_token_ids=frozenset(sampling["stop_token_ids"] or ()),
            interval=interval,
            phase=phase,
            return_logprob=request["return_logprob"],
        )

    def _terminal_abort(self, rid: str, prompt_tokens: int) -> Batch:
        return Batch([rid], [[]], ["abort"], [prompt_tokens], [0], [0], [[]], [[]], self._engine.load)


def decode_add(payload: bytes) -> dict[str, Any]:
    """An ADD's payload by field name, `sampling_params` as a dict too. Raises Undecodable."""
    array = _unpack(payload)
    if type(array) is not list or len(array) < REQUEST_LEAST:
        raise Undecodable(f"the payload is not an array of {REQUEST_LEAST} or more")
    if array[0] != REQUEST_TAG:
        raise Undecodable(f"the tag is {array[0]!r:.80}, not {REQUEST_TAG}")
    request = _by_name(REQUEST, array[1:], "")
    request["sampling_params"] = _by_name(SAMPLING, request["sampling_params"], "sampling_params.")
    return request


def decode_abort(payload: bytes) -> list[str]:
    """An ABORT's payload: request ids. Raises Undecodable."""
    rids = _unpack(payload)
    if type(rids) is not list or not all(map(is_str, rids)):
        raise Undecodable("the payload is not an array of str")
    return rids


def normalize(sampling: dict[str, Any], rid: str) -> None:
    """Derive what the engine derives right after decoding, in place."""
    if not sampling["is_normalized"]:
        sampling["stop_strs"] = sampling["stop"]
        sampling["stop_token_ids"] = sampling["stop_token_ids"] or None
        if sampling["temperature"] < GREEDY_BELOW:
            sampling["temperature"], sampling["top_k"] = 1.0, 1
        if sampling["top_k"] == 1:
            sampling["seed"] = 0
        if sampling["top_k"] == -1:
            sampling["top_k"] = TOP_K_ALL
    if sampling["seed"] is None:
        sampling["seed"] = zlib.crc32(rid.encode())


def invalid_sampling(sampling: dict[str, Any], vocab_size: int) -> str | None:
    """Why the engine refuses these (normalized) parameters; None when it does not."""
    checks = (
        ("temperature", not sampling["temperature"] < 0),
        ("top_p", 0 < sampling["top_p"] <= 1),
        ("min_p", 0 <= sampling["min_p"] <= 1),
        ("top_k", sampling["top_k"] in (-1, TOP_K_ALL) or 1 <= sampling["top_k"] < TOP_K_END),
        ("frequency_penalty", -2 <= sampling["frequency_penalty"] <= 2),
        ("presence_penalty", -2 <= sampling["presence_penalty"] <= 2),
        ("repetition_penalty", 0 <= sampling["repetition_penalty"] <= 2),
        ("min_new_tokens", sampling["min_new_tokens"] >= 0),
        ("logprobs", sampling["logprobs"] in (None, 0)),
    )
    for name, valid in checks:
        if not valid:
            return f"{name}={sampling[name]} is out of range"
    limit = sampling["max_new_tokens"]
    if limit is not None and not 0 <= sampling["min_new_tokens"] <= limit:
        return f"max_new_tokens={limit} is negative or below min_new_tokens={sampling['min_new_tokens']}"
    for token in sampling["logit_bias"] or ():
        if not token.lstrip("+-").isdecimal() or not 0 <= int(token) < vocab_size:
            return f"logit_bias names the token {token!r:.80}"
    if sum(sampling[name] is not None for name in ("json_schema", "regex", "ebnf")) > 1:
        return "json_schema, regex and ebnf exclude each other"
    return None


def _unpack(payload: bytes) -> Any:
    try:
        return msgpack.unpackb(payload, strict_map_key=False)
    except (ValueError, TypeError) as error:
        raise Undecodable(f"not msgpack: {error or type(error).__name__}") from None


def _by_name(fields: Sequence[Field], array: list[Any], prefix: str) -> dict[str, Any]:
    values = {}
    for place, field in enumerate(fields):
        values[field.name] = value = array[place] if place < len(array) else field.default
        if place < len(array) and (fault := field.fault(value)):
            raise Undecodable(f"{prefix}{fault}")
    return values
