"""vLLM's wire, from the engine's side: an EngineCore of 0.20 to 0.32, dense or one of a lockstep group.

What a request is to the engine is in `vllm_request`, utility calls are in `vllm_calls`. Output goes out as the
engine's structs do: arrays of full length, new tokens only, the larger arrays in parts of their own.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from smg.mock.dialect import ADD, Deadly, Deafening, Taken, spoiled
from smg.mock.lockstep import Member
from smg.mock.model import Batch, Ending, Engine, Load, Request
from smg.mock.settings import Settings
from smg.mock.vllm_calls import Calls
from smg.mock.vllm_request import RAW_BYTES, Version, check_survivable, read_add, unpreparable, version_of
from smg.protocol import handshake
from smg.protocol.vllm import layout
from smg.protocol.vllm_outputs import ENVELOPE, FINISH_REASONS, OUTPUT, OUTPUT_BEFORE_EC

ABORT, START_DP_WAVE, UTILITY, EXECUTOR_FAILED, WAKEUP = b"\x01", b"\x02", b"\x03", b"\x04", b"\x05"

GREEDY_BELOW = 1e-5  # temperature
INLINE_BELOW = 256  # bytes; larger arrays go into parts of their own
CONFIG_HASH = "5f1d" * 16  # of the parallel config, the same for all ranks of a group
FAULT_TOLERANCE = "handle_fault_tolerance"  # a utility that the input thread handles itself
QUEUED, SCHEDULED = 1, 2  # events

# Elements by the version that brought them, where it is not the first one.
OUTPUT_SINCE: dict[str, Version] = {"ec_transfer_params": (0, 26), **dict.fromkeys(OUTPUT[14:], (0, 28))}
ENVELOPE_SINCE: dict[str, Version] = {"weight_version": (0, 32)}

# EngineCoreReadyResponse: key, and the version that brought it.
REGISTRATION: dict[str, Version] = {
    "max_model_len": (0, 0),
    "num_gpu_blocks": (0, 0),
    "block_size": (0, 0),
    "dp_stats_address": (0, 0),
    "dtype": (0, 0),
    "vllm_version": (0, 0),
    "world_size": (0, 0),
    "data_parallel_size": (0, 0),
    "tensor_parallel_size": (0, 27),
    "pipeline_parallel_size": (0, 27),
    "decode_context_parallel_size": (0, 27),
    "data_parallel_rank": (0, 27),
    "max_num_seqs": (0, 27),
    "max_num_batched_tokens": (0, 27),
    "instance_id": (0, 27),
    "supports_lora": (0, 27),
    "max_loras": (0, 27),
    "mamba_block_size": (0, 27),
    "kv_cache_size_tokens": (0, 0),
    "kv_cache_max_concurrency": (0, 0),
    "kv_events_config": (0, 27),
    "weight_transfer_backend": (0, 27),
    "enable_sleep_mode": (0, 27),
    "supports_draft_weight_updates": (0, 27),
    "effective_attention_block_size": (0, 27),
}


@dataclass(slots=True)
class Asked:
    """What a request in flight wants to have in its outputs."""

    arrived: float
    eos: int | None
    logprobs: int | None  # how many tokens beside the sampled one; -1 = all
    chosen: list[int]  # or which
    prompt_logprobs: int | None  # how many
    prompt: list[int]  # kept for its logprobs only
    head: bytes  # of an output: what comes before the tokens
    begun: bool = False  # its first output is out


class VLLM:
    """A `Dialect`."""

    ending = Ending()
    hwm = 0
    registers_first = True
    reports_every_step = True

    def __init__(self, settings: Settings, engine: Engine, vocab_size: int) -> None:
        elements = layout(settings.vllm_version)
        if elements is None:
            raise ValueError(f"--vllm-version {settings.vllm_version}: must be 0.20 or later")
        version = version_of(settings.vllm_version)
        names = OUTPUT_BEFORE_EC if version < OUTPUT_SINCE["ec_transfer_params"] else OUTPUT
        self._output = [name for name in names if OUTPUT_SINCE.get(name, version) <= version]
        self._envelope = [name for name in ENVELOPE if ENVELOPE_SINCE.get(name, version) <= version]
        self._registration = [key for key, since in REGISTRATION.items() if since <= version]
        self._prompt_logprobs_elements = 5 if version >= (0, 32) else 4
        self._at = {name: place for place, name in enumerate(self._output)}
        self._rest: list[Any] = [0 if name == "num_nans_in_logits" else None for name in self._output[2:]]
        self._settings = settings
        self._engine = engine
        self._vocab_size = vocab_size
        # The engine shortens its context to what the cache holds.
        self._context = min(settings.max_model_len, settings.kv_pages * settings.page_size - settings.tokens_per_step)
        self._eos = engine.eos
        self._asked: dict[str, Asked] = {}  # by request id
        self._unsaid: list[tuple[dict[str, Any], list[bytes]]] = []  # messages for which there was no time yet
        self.member = Member() if settings.lockstep else None
        self._calls = Calls(engine, settings, self.member, self._abort_all)
        self._packer = msgpack.Packer(autoreset=True, buf_size=1 << 16)
        self._tail = b"".join(map(self._pack, self._rest))  # of an output that is tokens and nothing else

    # Handshake

    def hello(self) -> bytes:
        return handshake.encode_status(handshake.HELLO, local=False)

    def ready(self) -> bytes:
        more: dict[str, Any] = {"parallel_config_hash": CONFIG_HASH} if self._settings.lockstep else {}
        return handshake.encode_status(handshake.READY, local=False, **more)

    def registration(self, index: int) -> bytes:
        settings = self._settings
        tokens = settings.kv_pages * settings.page_size
        values = {
            "max_model_len": self._context,
            "num_gpu_blocks": settings.kv_pages,
            "block_size": settings.page_size,
            "dtype": "bfloat16",
            "vllm_version": settings.vllm_version,
            "world_size": 1,
            # Ranks of a dense model make themselves independent.
            "data_parallel_size": settings.group_size if settings.lockstep else 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "data_parallel_rank": index,
            "max_num_seqs": settings.max_running,
            "max_num_batched_tokens": settings.prefill_chunk,
            "instance_id": "mock",
            "supports_lora": settings.max_loras > 0,
            "max_loras": settings.max_loras,
            "kv_cache_size_tokens": tokens,
            "kv_cache_max_concurrency": tokens / self._context,
            "enable_sleep_mode": True,
            "supports_draft_weight_updates": False,
        }
        registered = {key: values.get(key) for key in self._registration}
        overrides = settings.registration_overrides
        registered.update(overrides)
        return self._pack({k: v for k, v in registered.items() if overrides.get(k, 0) is not None})

    # Input

    def take(self, frames: list[bytes], now: float) -> Taken:
        kind, payloads = frames[0], frames[1:]
        if kind not in (ADD, ABORT, START_DP_WAVE, UTILITY, EXECUTOR_FAILED, WAKEUP):
            raise Deafening(f"request type {kind[:8].hex() or 'empty'} is unknown")
        if not payloads:
            raise Deafening("there is no payload")
        if kind == ADD:
            return self._add(read_add(payloads[0], self._settings.vllm_version), payloads[1:], now)
        value = _unpack(payloads[0])
        if kind == UTILITY:
            return self._utility(value)
        if kind == ABORT:
            return self._abort(value)
        if kind == START_DP_WAVE and self._settings.lockstep:
            return _wave(value)
        if kind == EXECUTOR_FAILED:
            raise Deadly("a message said that the executor has failed")
        return Taken("ignored", [], "taken")

    def _add(self, request: dict[str, Any], aux: Sequence[bytes], now: float) -> Taken:
        rid, sampling = request["request_id"], request["sampling_params"]
        if aux:
            request["aux_bytes"] = [len(frame) for frame in aux]
        if request["client_index"]:
            raise Deadly(f"client_index={request['client_index']}, but there is one client", said=False)
        taken = Taken("add", [rid], "queued", request)
        taken.reason = unpreparable(request) or ""
        if taken.reason:
            taken.outcome = "rejected"
            taken.answer = Batch([rid], [[]], ["error"], [0], [0], [0], [[]], [[]], load=None)
            return taken
        if rid in self._engine:
            raise Deadly(f"request id {rid} is in use")
        check_survivable(request, self._settings, self._context, self._vocab_size)
        prompt = request["prompt_token_ids"]
        self._engine.add(self._to_request(request), now)
        wanted = sampling["prompt_logprobs"]
        self._asked[rid] = Asked(
            arrived=now,
            eos=sampling["_eos_token_id"],
            logprobs=sampling["logprobs"],
            chosen=sampling["logprob_token_ids"] or [],
            prompt_logprobs=wanted,
            prompt=prompt if wanted is not None else [],
            head=self._packer.pack_array_header(len(self._output)) + self._pack(rid),
        )
        if request.get("abort_immediately"):
            self._forget([rid])
        return taken

    def _to_request(self, request: dict[str, Any]) -> Request:
        """A reply's natural end is the token that the model ends with, which the request may or may not know."""
        rid, sampling = request["request_id"], request["sampling_params"]
        if sampling["temperature"] < GREEDY_BELOW:
            sampling["seed"] = 0
        elif sampling["seed"] in (None, -1):
            sampling["seed"] = zlib.crc32(rid.encode())
        stops = frozenset(sampling["stop_token_ids"])
        if sampling["_eos_token_id"] is not None:
            stops |= {sampling["_eos_token_id"]}
        return Request(
            rid=rid,
            prompt_tokens=len(request["prompt_token_ids"]),
            seed=sampling["seed"],
            max_tokens=sampling["max_tokens"],
            min_tokens=sampling["min_tokens"],
            knows_eos=self._eos in stops,
            stop_token_ids=stops,
            return_logprob=sampling["logprobs"] is not None or bool(sampling["logprob_token_ids"]),
        )

    def _abort(self, rids: Any) -> Taken:
        if type(rids) is str:
            rids = [rids]
        if type(rids) not in (list, dict):
            raise Deadly("the ids of an ABORT are no array")
        rids = [rid for rid in rids if type(rid) is str]
        self._forget(rids)
        return Taken("abort", rids, "aborted")

    def _forget(self, rids: list[str]) -> None:
        for rid in rids:
            self._engine.abort(rid)
            self._asked.pop(rid, None)

    def _utility(self, value: Any) -> Taken:
        if type(value) is not list or len(value) != 4:
            raise Deafening("a UTILITY is not [client_index, call_id, method, args]")
        client, call_id, method, args = value
        if method == FAULT_TOLERANCE:
            if type(args) is not list or not args:
                raise Deafening(f"{method} has no arguments")
            return Taken("ignored", [], "taken")
        if client != 0:
            raise Deadly(f"client_index={client!r:.80}, but there is one client", said=False)
        self._calls.put(call_id, method, args)
        return Taken("utility", [], "taken", method=str(method))

    # Output

    def between_steps(self, engine_index: int) -> list[list[bytes]]:
        if self.member is not None:
            self._unsaid += [({"wave_complete": wave}, []) for wave in self.member.completed]
            self.member.completed.clear()
        self._calls.run(lambda reply: self._unsaid.append(({"utility_output": reply}, [])))
        unsaid, self._unsaid = self._unsaid, []
        return [[self._frame(engine_index, elements, rows)] for elements, rows in unsaid]

    def farewell(self, engine_index: int) -> list[list[bytes]]:
        self._abort_all()
        return self.between_steps(engine_index)

    def encode(self, batch: Batch, engine_index: int) -> list[bytes]:
        parts: list[bytes] = []
        rows = [self._row(batch, place, parts) for place in range(len(batch.rids))]
        if batch.load is None:
            elements: dict[str, Any] = {"finished_requests": batch.rids}
        else:
            # As it is after the step, whereas a batch has its load from before.
            version = self._calls.get_weight_version()
            elements = {"scheduler_stats": _stats(self._engine.load), "weight_version": version}
        return [self._frame(engine_index, elements, rows), *parts]

    def spoil(self, kind: str, batch: Batch, engine_index: int, column: str) -> list[bytes]:
        rows = [[rid, tokens, *self._rest] for rid, tokens in zip(batch.rids, batch.token_ids, strict=True)]
        first = True if kind == "tag" else engine_index
        if kind == "ragged":
            if column not in SPOILABLE:
                raise ValueError(f"column {column!r}: must be one of {', '.join(SPOILABLE)}")
            rows[-1][self._at[column]] = True
        elif kind == "short":
            del rows[-1][1:]
        if kind == "map":
            return [self._pack({"outputs": rows})]
        frame = self._frame(first, {}, list(map(self._pack, rows)))
        return [frame if kind in ("ragged", "tag", "short") else spoiled(frame, kind)]

    def _row(self, batch: Batch, place: int, parts: list[bytes]) -> bytes:
        """One EngineCoreOutput. Arrays too large for it are put on `parts`."""
        rid, tokens, reason = batch.rids[place], batch.token_ids[place], batch.finish_reasons[place]
        at, asked = self._at, self._asked.get(rid)
        if asked is not None and asked.begun and not reason and not batch.logprobs[place]:
            return asked.head + self._pack(tokens) + self._tail
        row = [rid, tokens, *self._rest]
        if asked is None or not asked.begun:
            if batch.load is not None:
                row[at["prefill_stats"]] = _prefill(batch.prompt_tokens[place], batch.cached_tokens[place])
            if asked is not None:
                asked.begun = True
                row[at["events"]] = [
                    {"type": kind, "timestamp": asked.arrived} for kind in (QUEUED, SCHEDULED)
                ]  # fmt: skip
                if asked.prompt_logprobs is not None:
                    row[at["new_prompt_logprobs_tensors"]] = self._prompt_logprobs(asked, parts)
        if asked is not None and batch.logprobs[place]:
            row[at["new_logprobs"]] = self._logprobs(tokens, batch.logprobs[place], asked, parts)
        if reason:
            row[at["finish_reason"]] = FINISH_REASONS.index(reason)
            if reason == "stop" and asked is not None and tokens[-1] != asked.eos:
                row[at["stop_reason"]] = tokens[-1]
            self._asked.pop(rid, None)
        return self._pack(row)

    def _logprobs(self, tokens: list[int], values: list[float], asked: Asked, parts: list[bytes]) -> list[Any]:
        """LogprobsLists: in each row the sampled token, then the likeliest ones, of which it is the first."""
        ids, logprobs = self._tops(tokens, values, asked.logprobs or 0, asked.chosen)
        shape = [len(tokens), len(ids) // len(tokens)]
        arrays = (
            ("<i4", shape, array("i", ids)),
            ("<f4", shape, array("f", logprobs)),
            ("<i8", shape[:1], array("q", [1] * len(tokens))),
        )
        return [*(_tensor(dtype, shape, data, parts) for dtype, shape, data in arrays), None]

    def _prompt_logprobs(self, asked: Asked, parts: list[bytes]) -> list[Any]:
        """LogprobsTensors: the same for each token of the prompt but the first."""
        tokens = asked.prompt[1:]
        values = [-((token * 2654435761 + place) % 4096) / 1024 for place, token in enumerate(tokens)]
        ids, logprobs = self._tops(tokens, values, asked.prompt_logprobs or 0)
        shape = [len(tokens), len(ids) // len(tokens) if tokens else 1]
        arrays = (
            ("int32", shape, array("i", ids)),
            ("float32", shape, array("f", logprobs)),
            ("int32", shape[:1], array("i", [1] * len(tokens))),
        )
        tensors = [_tensor(dtype, shape, data, parts) for dtype, shape, data in arrays]
        return tensors + [None] * (self._prompt_logprobs_elements - len(tensors))

    def _tops(
        self, tokens: list[int], values: list[float], count: int, chosen: Sequence[int] = ()
    ) -> tuple[list[int], list[float]]:
        """For each token itself and the chosen or `count` likeliest ones: made up, each less likely than the last."""
        more = len(chosen) or (self._vocab_size if count == -1 else count)
        ids: list[int] = []
        logprobs: list[float] = []
        for token, value in zip(tokens, values, strict=True):
            ids.append(token)
            ids += chosen or [(token + step) % self._vocab_size for step in range(more)]
            logprobs.append(value)
            logprobs += [value - step for step in range(more)]
        return ids, logprobs

    def _abort_all(self) -> None:
        rids = list(self._asked)
        self._forget(rids)
        if rids:
            finish = FINISH_REASONS.index("abort")
            rows = [[rid, [], *self._rest] for rid in rids]
            for row in rows:
                row[self._at["finish_reason"]] = finish
            self._unsaid.append(({"finished_requests": rids}, list(map(self._pack, rows))))

    def _frame(self, engine_index: Any, elements: dict[str, Any], rows: list[bytes]) -> bytes:
        """EngineCoreOutputs with these outputs and other elements."""
        whole = {"timestamp": time.monotonic(), **elements}
        header = self._packer.pack_array_header
        rest = [self._pack(whole.get(name)) for name in self._envelope[2:]]
        return b"".join((header(len(self._envelope)), self._pack(engine_index), header(len(rows)), *rows, *rest))

    def _pack(self, value: Any) -> bytes:
        packed: bytes = self._packer.pack(value)
        return packed


# What a decoder has to look at, and must not find a bool in.
SPOILABLE = (
    "request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors", "finish_reason", "stop_reason",
    "kv_transfer_params", "prefill_stats",
)  # fmt: skip


def _wave(value: Any) -> Taken:
    if type(value) is not list or len(value) != 2 or type(value[0]) not in (int, float, bool):
        raise Deadly("a START_DP_WAVE is not [wave, exclude_index]")
    return Taken("wave", [], "taken", wave=value[0], exclude=value[1])


def _unpack(payload: bytes) -> Any:
    try:
        return msgpack.unpackb(payload, strict_map_key=False)
    except Exception as error:  # msgpack's own kinds, and ValueError and TypeError of Python's
        raise Deafening(f"not msgpack: {error or type(error).__name__}") from None


def _prefill(prompt: int, cached: int) -> dict[str, int]:
    return {
        "num_prompt_tokens": prompt,
        "num_computed_tokens": prompt - cached,
        "num_cached_tokens": cached,
        "num_local_cached_tokens": cached,
        "num_external_cached_tokens": 0,
        "num_cache_creation_tokens": prompt - cached,
    }


def _stats(load: Load) -> dict[str, Any]:
    """SchedulerStats."""
    return {
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_skipped_waiting_reqs": 0,
        "num_kv_fetch_reqs_by_stage": {},
        "step_counter": 0,
        "current_wave": 0,
        "kv_cache_usage": load.kv_active_pages / load.kv_total_pages,
        "iteration_details": None,
        "prefix_cache_stats": {
            "reset": False,
            "requests": 0,
            "queries": 0,
            "hits": 0,
            "preempted_requests": 0,
            "preempted_queries": 0,
            "preempted_hits": 0,
            "hits_by_source": {},
        },
        "connector_prefix_cache_stats": None,
        "kv_cache_eviction_events": [],
        "spec_decoding_stats": None,
        "kv_connector_stats": None,
        "ec_connector_stats": None,
        "waiting_lora_adapters": {},
        "running_lora_adapters": {},
        "cudagraph_stats": None,
        "perf_stats": None,
    }


def _tensor(dtype: str, shape: list[int], numbers: array[Any], parts: list[bytes]) -> list[Any]:
    """[dtype, shape, data]: the bytes, or the number of the part that has them."""
    data = numbers.tobytes()
    if len(data) < INLINE_BELOW:
        return [dtype, shape, msgpack.ExtType(RAW_BYTES, data)]
    parts.append(data)
    return [dtype, shape, len(parts)]
