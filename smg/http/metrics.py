"""What Prometheus reads: HTTP and admission, latencies, and every rank.

Names are the Rust gateway's where it has them. Everything is read when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from smg._sse import Histogram
from smg.http.front import ENDPOINTS, Front
from smg.http.server import Server

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

#: Labels that never change. "grpc" is what the Rust gateway calls its router of token ids, over ZeroMQ too.
ROUTER_TYPE, BACKEND_TYPE, CONNECTION_MODE, WORKER_TYPE = "grpc", "regular", "zmq", "regular"
#: error code -> what the Rust gateway calls it; every other code is its own name
ERROR_TYPES = {"no_available_workers": "no_workers", "model_not_found": "no_workers"}

STATES = ("absent", "hello", "live", "stalled", "draining", "dead")

#: counter of a group -> metric and what it counts, per rank
RANK_COUNTERS = {
    "frames": ("smg_rank_frames", "output frames applied"),
    "tokens": ("smg_rank_tokens", "tokens received"),
    "requests": ("smg_rank_requests", "requests given to the rank"),
    "undecodable": ("smg_rank_undecodable_frames", "output frames that could not be decoded"),
    "late": ("smg_rank_late_rows", "rows of requests that had ended here"),
    "foreign": ("smg_rank_foreign_rows", "rows of requests that are not this router's"),
    "misattributed": ("smg_rank_misattributed_frames", "frames that name another engine index"),
    "aborts": ("smg_rank_aborts_sent", "ABORTs sent to the rank"),
}
#: counter of a group -> `cause` of a request's end
END_CAUSES = ("finished", "aborted", "dropped", "died", "deadline", "closed", "lost")


#: attribute of `Latencies` -> metric, what it is, and whether it says how the workers are reached
LATENCIES = {
    "first_token": ("smg_router_ttft_seconds", "from a sequence's submission to its first token", False),
    "between_tokens": ("smg_router_inter_token_seconds", "between two tokens of a sequence", False),
    "per_token": ("smg_router_tpot_seconds", "a sequence's mean time per token after the first", False),
    "generation": ("smg_router_generation_duration_seconds", "from a sequence's submission to its last token", False),
    "request": ("smg_router_request_duration_seconds", "from a request's head to the end of its completion", True),
}


class Metrics(Collector):
    """Collects what a front has counted, and its groups, with the connections of its `server`."""

    def __init__(self, front: Front, server: Server) -> None:
        self._front, self._counts, self._server = front, front.counts, server
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._http()
        yield from self._router()
        yield from self._workers()
        yield from self._ranks()

    def _http(self) -> Iterator[Metric]:
        counts, admission = self._counts, self._front.admission
        requests = CounterMetricFamily("smg_http_requests", "HTTP requests received", labels=["method", "path"])
        for key, count in counts.requests.items():
            requests.add_metric(key, count)
        yield requests
        responses = CounterMetricFamily(
            "smg_http_responses", "HTTP responses sent", labels=["path", "status_code", "error_code"]
        )
        for (path, status, code), count in counts.responses.items():
            responses.add_metric([path, str(status), code], count)
        yield responses
        yield _histograms(
            "smg_http_request_duration_seconds",
            "from a request's head to its answer's end",
            ["method", "path"],
            counts.durations,
        )
        yield GaugeMetricFamily("smg_http_connections_active", "open HTTP connections", self._server.open_connections)
        yield GaugeMetricFamily("smg_admission_inflight", "requests being served", admission.active)
        yield GaugeMetricFamily("smg_admission_queue_depth", "requests that wait for a place", admission.queued)
        rejected = CounterMetricFamily(
            "smg_admission_queue_rejected", "requests refused at admission", labels=["reason"]
        )
        for reason, count in admission.rejected.items():
            rejected.add_metric([reason], count)
        yield rejected
        limited = CounterMetricFamily("smg_http_rate_limit", "requests let in and refused", labels=["result"])
        limited.add_metric(["allowed"], admission.allowed)
        limited.add_metric(["rejected"], sum(admission.rejected.values()))
        yield limited
        unknown = CounterMetricFamily(
            "smg_http_unknown_fields",
            "request fields that were accepted and mean nothing here",
            labels=["field"],
        )
        for name, count in counts.unknown_fields.items():
            unknown.add_metric([name], count)
        yield unknown

    def _router(self) -> Iterator[Metric]:
        counts, model = self._counts, self._front.model_name
        short = ["router_type", "backend_type", "model", "endpoint"]
        long = ["router_type", "backend_type", "connection_mode", "model", "endpoint"]

        def key(path: str, model: str = model) -> list[str]:
            return [ROUTER_TYPE, BACKEND_TYPE, CONNECTION_MODE, model, ENDPOINTS[path].name]

        requests = CounterMetricFamily(
            "smg_router_requests", "requests for completions that were understood", labels=[*long, "streaming"]
        )
        for (path, streaming), count in counts.routed.items():
            requests.add_metric([*key(path), str(streaming).lower()], count)
        yield requests
        errors = CounterMetricFamily(
            "smg_router_request_errors", "requests for completions that failed", labels=[*long, "error_type"]
        )
        for (path, code), count in counts.errors.items():
            named = "other" if code == "model_not_found" else model
            errors.add_metric([*key(path, named), ERROR_TYPES.get(code, code)], count)
        yield errors
        for name, (metric, text, reached) in LATENCIES.items():
            found = {tuple(key(path)): getattr(of_path, name) for path, of_path in counts.latencies.items()}
            if not reached:
                found = {(*labels[:2], *labels[3:]): histogram for labels, histogram in found.items()}
            yield _histograms(metric, text, long if reached else short, found)
        tokens = CounterMetricFamily("smg_router_tokens", "tokens of requests", labels=[*short, "token_type"])
        for (path, kind), count in counts.tokens.items():
            tokens.add_metric([ROUTER_TYPE, BACKEND_TYPE, model, ENDPOINTS[path].name, kind], count)
        yield tokens
        labels = ["worker_type", "endpoint"]
        retries = CounterMetricFamily("smg_worker_retries", "requests that another rank took over", labels=labels)
        exhausted = CounterMetricFamily(
            "smg_worker_retries_exhausted", "requests that no further rank took over", labels=labels
        )
        for (path, taken), count in counts.retries.items():
            (retries if taken else exhausted).add_metric([WORKER_TYPE, ENDPOINTS[path].name], count)
        yield from (retries, exhausted)

    def _workers(self) -> Iterator[Metric]:
        front = self._front
        size = GaugeMetricFamily(
            "smg_worker_pool_size",
            "engine groups",
            labels=["worker_type", "connection_mode", "model"],
        )
        size.add_metric([WORKER_TYPE, CONNECTION_MODE, front.model_name], len(front.router.groups))
        yield size
        selected = CounterMetricFamily(
            "smg_worker_selection",
            "sequences that the policy gave to a worker",
            labels=["worker_type", "connection_mode", "model", "policy"],
        )
        requests = CounterMetricFamily("smg_worker_requests", "sequences sent to a worker", labels=["worker", "model"])
        sent = {group.url: sum(group.counters["requests"]) for group in front.router.groups}
        for url, count in sent.items():
            requests.add_metric([url, front.model_name], count)
        policy = front.router.policy
        selected.add_metric([WORKER_TYPE, CONNECTION_MODE, front.model_name, policy], sum(sent.values()))
        yield from (selected, requests)
        active = GaugeMetricFamily("smg_worker_requests_active", "requests in flight", labels=["worker"])
        health = GaugeMetricFamily("smg_worker_health", "1 when a rank takes work", labels=["worker"])
        for group in front.router.groups:
            active.add_metric([group.url], group.requests)
            health.add_metric([group.url], float(group.live > 0))
        yield active
        yield health

    def _ranks(self) -> Iterator[Metric]:
        front = self._front
        labels = ["worker", "model", "dp_rank"]
        gauges = {
            "in_flight": GaugeMetricFamily("smg_rank_requests_active", "requests in flight", labels=labels),
            "running": GaugeMetricFamily("smg_engine_running_requests", "requests running", labels=labels),
            "waiting": GaugeMetricFamily("smg_engine_waiting_requests", "requests waiting", labels=labels),
            "kv_usage": GaugeMetricFamily("smg_engine_token_usage", "KV cache in use, 0..1", labels=labels),
            "incarnation": GaugeMetricFamily(
                "smg_rank_incarnation", "processes that dialed in as this rank", labels=labels
            ),
        }
        state = GaugeMetricFamily("smg_rank_state", "1 for the state it is in", labels=[*labels, "state"])
        totals = {
            name: CounterMetricFamily(metric, text, labels=labels) for name, (metric, text) in RANK_COUNTERS.items()
        }
        ended = CounterMetricFamily("smg_rank_requests_ended", "requests that ended", labels=[*labels, "cause"])
        for group in front.router.groups:
            counters, load = group.counters, group.load
            for rank in group.ranks:
                key = [group.url, front.model_name, str(rank.index)]
                gauges["in_flight"].add_metric(key, rank.in_flight)
                gauges["incarnation"].add_metric(key, rank.incarnation)
                if load["reported"][rank.index]:
                    for name in ("running", "waiting", "kv_usage"):
                        gauges[name].add_metric(key, float(load[name][rank.index]))
                for name in STATES:
                    state.add_metric([*key, name], float(rank.state == name))
                for name, family in totals.items():
                    family.add_metric(key, counters[name][rank.index])
                for cause in END_CAUSES:
                    ended.add_metric([*key, cause], counters[cause][rank.index])
        yield from gauges.values()
        yield state
        yield from totals.values()
        yield ended


def _histograms(name: str, text: str, labels: Sequence[str], histograms: Mapping[Any, Histogram]) -> Metric:
    """One histogram for each tuple of label values."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in histograms.items():
        buckets = [
            ("+Inf" if bound == float("inf") else f"{bound:g}", float(count)) for bound, count in histogram.cumulative()
        ]
        family.add_metric(values, buckets, histogram.sum)
    return family
