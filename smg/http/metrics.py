"""What Prometheus reads: HTTP and admission, latencies, and every rank.

Names are the Rust gateway's where it has them. Latencies are counted in C as
outputs are written; everything else is read when it is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from smg._sse import Histogram

if TYPE_CHECKING:
    from smg.http.completion import Completion
    from smg.http.exchange import Exchange
    from smg.http.front import Front
    from smg.http.server import Server

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

BETWEEN_TOKENS_BOUNDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0,
)  # fmt: skip
FIRST_TOKEN_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
)  # fmt: skip
DURATION_BOUNDS = (
    0.001,
    0.005,
    0.01,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)

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


class Metrics(Collector):
    """Counts the front's own events and collects everybody else's."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self.requests: Counter[tuple[str, str]] = Counter()  # (method, path)
        self.responses: Counter[tuple[str, int, str]] = Counter()  # (path, status, error code)
        self.tokens: Counter[tuple[str, str]] = Counter()  # (path, "input" or "output")
        self.retries: Counter[tuple[str, bool]] = Counter()  # (path, whether another rank took it)
        self.durations: dict[str, Histogram] = {}
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS)
        self.between_tokens = Histogram(BETWEEN_TOKENS_BOUNDS)
        self._server: Server | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def watch(self, server: Server) -> None:
        """Whose connections are counted."""
        self._server = server

    def answered(self, method: str, exchange: Exchange, seconds: float) -> None:
        path = exchange.path
        self.requests[method, path] += 1
        self.responses[path, exchange.status, exchange.code] += 1
        histogram = self.durations.get(path)
        if histogram is None:
            histogram = self.durations[path] = Histogram(DURATION_BOUNDS)
        histogram.observe(seconds)

    def retried(self, path: str, taken: bool) -> None:
        """A rank died with a sequence that had no token yet; `taken` says whether another rank has it now."""
        self.retries[path, taken] += 1

    def completed(self, path: str, completion: Completion) -> None:
        for choice in completion.choices:
            self.tokens[path, "output"] += choice.completion_tokens
            self.tokens[path, "input"] += choice.prompt_tokens

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._http()
        yield from self._latencies()
        yield from self._workers()
        yield from self._ranks()

    def _http(self) -> Iterator[Metric]:
        front, admission = self._front, self._front.admission
        requests = CounterMetricFamily("smg_http_requests", "HTTP requests received", labels=["method", "path"])
        for key, count in self.requests.items():
            requests.add_metric(key, count)
        yield requests
        responses = CounterMetricFamily(
            "smg_http_responses", "HTTP responses sent", labels=["path", "status_code", "error_code"]
        )
        for (path, status, code), count in self.responses.items():
            responses.add_metric([path, str(status), code], count)
        yield responses
        yield _histograms(
            "smg_http_request_duration_seconds", "from a request's head to its answer's end", self.durations
        )
        connections = self._server.open_connections if self._server is not None else 0
        yield GaugeMetricFamily("smg_http_connections_active", "open HTTP connections", connections)
        yield GaugeMetricFamily("smg_admission_inflight", "requests being served", admission.active)
        yield GaugeMetricFamily("smg_admission_queue_depth", "requests that wait for a place", admission.queued)
        rejected = CounterMetricFamily(
            "smg_admission_queue_rejected", "requests refused at admission", labels=["reason"]
        )
        for reason, count in admission.rejected.items():
            rejected.add_metric([reason], count)
        yield rejected
        tokens = CounterMetricFamily(
            "smg_router_tokens", "tokens of completed requests", labels=["endpoint", "token_type"]
        )
        for (path, kind), count in self.tokens.items():
            tokens.add_metric([path, kind], count)
        yield tokens
        labels = ["worker_type", "endpoint"]
        retries = CounterMetricFamily("smg_worker_retries", "requests that another rank took over", labels=labels)
        exhausted = CounterMetricFamily(
            "smg_worker_retries_exhausted", "requests that no further rank took over", labels=labels
        )
        for (path, taken), count in self.retries.items():
            (retries if taken else exhausted).add_metric(["regular", path], count)
        yield from (retries, exhausted)
        unknown = CounterMetricFamily(
            "smg_http_unknown_fields",
            "request fields that were accepted and mean nothing here",
            labels=["field"],
        )
        for name, count in front.unknown_fields.items():
            unknown.add_metric([name], count)
        yield unknown

    def _latencies(self) -> Iterator[Metric]:
        yield _histograms("smg_router_ttft_seconds", "from submission to the first output", {"": self.first_token}, ())
        yield _histograms("smg_router_tpot_seconds", "between the tokens of a stream", {"": self.between_tokens}, ())

    def _workers(self) -> Iterator[Metric]:
        front = self._front
        size = GaugeMetricFamily(
            "smg_worker_pool_size",
            "engine groups",
            labels=["worker_type", "connection_mode", "model"],
        )
        size.add_metric(["regular", "zmq", front.model_name], len(front.router.groups))
        yield size
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


def _histograms(name: str, text: str, histograms: dict[str, Histogram], labels: tuple[str, ...] = ("path",)) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for label, histogram in histograms.items():
        buckets = [
            ("+Inf" if bound == float("inf") else f"{bound:g}", float(count)) for bound, count in histogram.cumulative()
        ]
        family.add_metric([label] if labels else [], buckets, histogram.sum)
    return family
