"""Output messages as vLLM 0.32 makes them, by msgspec, and the typed decoder that is the rival in decoding."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec


class Output(msgspec.Struct, array_like=True):
    """EngineCoreOutput: one request's part of a step."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: list[Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: dict[str, int] | None = None
    routed_experts: Any = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: list[str] | None = None
    new_sampling_mask: Any = None
    spec_decode_metrics: dict[str, Any] | None = None
    prompt_token_id_logprobs: Any = None


class Stats(msgspec.Struct):
    """SchedulerStats."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    num_kv_fetch_reqs_by_stage: dict[str, int] = {}
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    iteration_details: Any = None
    prefix_cache_stats: dict[str, Any] = {}
    connector_prefix_cache_stats: Any = None
    kv_cache_eviction_events: list[Any] = []
    spec_decoding_stats: Any = None
    kv_connector_stats: Any = None
    ec_connector_stats: Any = None
    waiting_lora_adapters: dict[str, int] = {}
    running_lora_adapters: dict[str, int] = {}
    cudagraph_stats: Any = None
    perf_stats: Any = None


class Outputs(msgspec.Struct, array_like=True):
    """EngineCoreOutputs: one step."""

    engine_index: int = 0
    outputs: list[Output] = []
    scheduler_stats: Stats | None = None
    timestamp: float = 0.0
    utility_output: Any = None
    finished_requests: list[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None


def encode(rids: Sequence[str], token_ids: Sequence[int]) -> bytes:
    """One engine step: a token for each request, and statistics."""
    rows = [Output(rid, [token]) for rid, token in zip(rids, token_ids, strict=True)]
    counts = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
    cache = {"reset": False, **dict.fromkeys(counts, 0), "hits_by_source": {}}
    stats = Stats(len(rids), kv_cache_usage=0.5, prefix_cache_stats=cache)
    return msgspec.msgpack.encode(Outputs(0, rows, stats, time.monotonic(), weight_version="default"))


def reencode(frame: bytes) -> bytes:
    """What msgspec makes of what a message holds."""
    return msgspec.msgpack.encode(decoder().decode(frame))


def decoder() -> msgspec.msgpack.Decoder[Outputs]:
    return msgspec.msgpack.Decoder(Outputs)
