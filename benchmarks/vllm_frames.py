"""Output messages as vLLM 0.32 makes them, by msgspec, and the typed decoder that is the rival in decoding.

    python -m benchmarks.vllm_frames

prints what a step of 32 and of 256 requests costs in `Core`, decoded, checked and applied, against a typed msgspec
decode of the same message alone, in µs of this thread's CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
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
    """SchedulerStats, as far as anybody reads them; the other keys are skipped."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: dict[str, Any] = {}


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
    cache = {"reset": False, "requests": 0, "queries": 0, "hits": 0}
    stats = Stats(len(rids), kv_cache_usage=0.5, prefix_cache_stats=cache)
    return msgspec.msgpack.encode(Outputs(0, rows, stats, time.monotonic(), weight_version="default"))


def decoder() -> msgspec.msgpack.Decoder[Outputs]:
    return msgspec.msgpack.Decoder(Outputs)


def live_core(requests: int) -> tuple[Any, Any, list[Any], bytes]:
    """A core with one live rank, its outlet, the running requests' streams and a step's message for them."""
    from smg._fastpath import Core
    from smg._outlets import new_outlet
    from smg._streams import submit
    from smg.protocol import vllm

    core = Core(1, backend="vllm", decode_cold=vllm.decode_logprobs, stall_timeout=0, max_inflight=0)
    core.set_state(0, 2)  # live
    outlet = new_outlet(core)
    payload = vllm.encode_add("0" * 24, [1, 2, 3])
    streams = [submit(core, payload, vllm.RID_OFFSET, outlet=outlet) for _ in range(requests)]
    return core, outlet, streams, encode([stream.request_id for stream in streams], range(1234, 1234 + requests))


def main(rounds: int = 60, times: int = 50) -> None:
    for rows in (32, 256):
        core, outlet, streams, frame = live_core(rows)
        decode = decoder().decode
        ours, theirs = [], []
        for _ in range(rounds):
            begin = time.thread_time()
            core.feed(0, frame, times=times)
            ours.append((time.thread_time() - begin) / times * 1e6)
            outlet.take()
            begin = time.thread_time()
            for _ in range(times):
                decode(frame)
            theirs.append((time.thread_time() - begin) / times * 1e6)
        counters = core.counters()
        assert counters["rows"] == [rounds * times * len(streams)]
        assert counters["late"] == counters["undecodable"] == [0]
        ratio = median(theirs) / median(ours)
        print(f"{rows} outputs + stats: {median(ours):.2f} µs, msgspec {median(theirs):.2f} µs, {ratio:.1f}×")


if __name__ == "__main__":
    main()
