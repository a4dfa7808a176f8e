"""The HTTP front against the Rust gateway: same flags, ranks, tokenizer, requests and load client, turn by turn.

    python -m benchmarks.compare_http [--quick] [--model-path DIR] [--rival-env DIR] [--case NAME]

Both gateways run all the time; the cases go to one and then to the other, `--repeats` times. CPU is what the
operating system accounts to a gateway's process, all threads, for everything it did in a run; delay is from the
simulated engine's send of a token to the client's receipt of it (CLOCK_MONOTONIC). Median (min–max) over the
repeats, and ratios of medians. The Rust gateway goes into an environment of its own, once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import accounting
from benchmarks.accounting import figure, ratio
from benchmarks.gateways import RIVAL, ROOT, Gateway, rival_python
from benchmarks.load import Bodies, Client, Words, piece_ids

DEMO_MODEL = ROOT / "smg" / "data" / "demo-model"
ENVIRONMENT = ROOT / ".venv-rival"
ROWS, COLUMNS = 4096, 129
Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One kind of load. `bar`: the highest allowed ratio of CPU, ours to theirs."""

    name: str
    connections: int
    count: int  # requests of a run
    tokens: int
    step_ms: float
    stream: bool
    size: int = 200  # characters of a prompt
    ramp_ms: float = 0.0
    bar: float | None = None
    bulk: bool = False  # one-megabyte requests beside it

    @property
    def per_token(self) -> bool:
        return self.tokens > 1


CASES = [
    Case("256 streams × 128, 10 ms", 256, 768, 128, 10, True, bar=0.33),
    Case("256 streams × 128, 10 ms, spread", 256, 768, 128, 10, True, ramp_ms=1300, bar=0.33),
    Case("32 streams × 128, 10 ms", 32, 96, 128, 10, True, ramp_ms=0, bar=0.5),
    Case("256 streams × 128, unthrottled", 256, 2048, 128, 0, True, bar=0.4),
    Case("32 one-token chats", 32, 4000, 1, 0, False, bar=0.6),
    Case("32 one-token chats, 8k characters", 32, 2000, 1, 0, False, size=8_000, bar=0.6),
    Case("32 one-token chats, 32k characters", 32, 800, 1, 0, False, size=32_000, bar=0.6),
    Case("256 streams × 128, 10 ms, beside 50 × 1 MB/s", 256, 768, 128, 10, True, ramp_ms=1300, bulk=True),
]


class Bench:
    """The gateways, and the requests of each case."""

    def __init__(self, model: Path, gateways: list[Gateway], scale: float) -> None:
        self.model, self.gateways, self.scale = model, gateways, scale
        self._words = Words(model)
        self._bodies: dict[tuple[int, int, int, bool], Bodies] = {}

    def bodies(self, count: int, size: int, tokens: int, stream: bool) -> Bodies:
        key = (count, size, tokens, stream)
        if key not in self._bodies:
            self._bodies[key] = Bodies.of_chats(
                self._words, str(self.model), count=count, size=size, tokens=tokens, stream=stream
            )
        return self._bodies[key]

    def count(self, case: Case) -> int:
        return max(case.connections, int(case.count * self.scale))

    def run(self, case: Case, gateway: Gateway) -> Result:
        """One run of a case: what the client saw, and what it cost."""
        simulator = gateway.simulator
        assert simulator is not None
        simulator.call("pace", step_ms=case.step_ms, start_at=1)
        bodies = self.bodies(self.count(case), case.size, case.tokens, case.stream)
        client = Client(
            gateway.port,
            bodies,
            connections=case.connections,
            stamps=(simulator.stamps_path, COLUMNS),
            ramp_ms=case.ramp_ms,
        )
        bulk = None
        if case.bulk:
            seconds = self.count(case) / case.connections * case.tokens * case.step_ms / 1e3 + case.ramp_ms / 1e3
            bulk = Client(
                gateway.port,
                self.bodies(16, 1_000_000, 1, False),
                connections=16,
                rate=50,
                limit=seconds,
            )
        before, ranks_before = gateway.cpu(), accounting.process_cpu(simulator.pid)
        client.start()
        if bulk is not None:
            bulk.start()
        result = client.result()
        if bulk is not None:
            result["bulk"] = bulk.result()
        result["gateway_cpu"] = gateway.cpu() - before
        result["ranks_cpu"] = accounting.process_cpu(simulator.pid) - ranks_before
        result["rss"] = gateway.rss_mb()
        if result["errors"] or result["ok"] != self.count(case):
            print(f"{gateway.name}, {case.name}: {result}", file=sys.stderr)
        return result


# -------------------------------------------------------------- the tables

COLUMN_NAMES = ["case", "gateway", "µs CPU/token", "µs CPU/request", "tokens/s", "requests/s", "delay p50 ms",
                "delay p99 ms", "gap p99 ms", "TTFT p50 ms", "TTFT p99 ms", "RSS MB", "client µs/token",
                "ranks µs/token", "events/token", "errors"]  # fmt: skip


def per(key: str, unit: str) -> Callable[[Result], float]:
    return lambda result: result[key] / max(1, result[unit]) * 1e6


def row(case: Case, gateway: Gateway, results: list[Result]) -> list[object]:
    def of(pick: Callable[[Result], float], digits: int = 2) -> str:
        return figure([pick(result) for result in results], digits)

    streamed = case.stream and case.per_token
    return [
        case.name,
        gateway.name,
        of(per("gateway_cpu", "tokens")) if case.per_token else "–",
        of(per("gateway_cpu", "ok"), 1),
        of(lambda r: r["tokens"] / r["seconds"], 0),
        of(lambda r: r["ok"] / r["seconds"], 0),
        of(lambda r: r["delay"][0]) if streamed else "–",
        of(lambda r: r["delay"][2]) if streamed else "–",
        of(lambda r: r["gap"][2]) if streamed else "–",
        of(lambda r: (r["ttft"] if streamed else r["whole"])[0]),
        of(lambda r: (r["ttft"] if streamed else r["whole"])[2]),
        of(lambda r: r["rss"], 1),
        of(per("cpu", "tokens")),
        of(per("ranks_cpu", "tokens")),
        of(lambda r: r["events"] / max(1, r["tokens"]), 3),
        sum(r["errors"] + r["refused"] for r in results),
    ]


def ratios(case: Case, ours: list[Result], theirs: list[Result]) -> list[object]:
    def of(pick: Callable[[Result], float]) -> str:
        return f"{ratio([pick(r) for r in ours], [pick(r) for r in theirs]):.2f}"

    streamed = case.stream and case.per_token
    cpu = ratio([per("gateway_cpu", "ok")(r) for r in ours], [per("gateway_cpu", "ok")(r) for r in theirs])
    verdict = "–" if case.bar is None else f"{case.bar} {'met' if cpu <= case.bar else 'MISSED'}"
    return [
        case.name,
        f"{cpu:.2f}",
        verdict,
        of(lambda r: r["delay"][0]) if streamed else "–",
        of(lambda r: r["delay"][2]) if streamed else "–",
        of(lambda r: r["rss"]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_http",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a third of the requests, one repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model-path", type=Path, default=DEMO_MODEL, help="a tokenizer and chat template")
    parser.add_argument("--rival-env", type=Path, default=ENVIRONMENT, help="environment of the Rust gateway")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name has this in it")
    parser.add_argument("--only", choices=("smg-fastpath", "rust"), help="drive one gateway alone")
    args = parser.parse_args()
    scale, repeats = (1 / 3, 1) if args.quick else (1.0, args.repeats)
    cases = [case for case in CASES if not args.case or any(part in case.name for part in args.case)]
    print(f"{accounting.machine()}\n{accounting.versions('pyzmq', 'aiohttp', 'uvloop', 'tokenizers', 'fastokens')}; "
          f"rival {RIVAL}; model {args.model_path.name}; {repeats} repeats\n", flush=True)  # fmt: skip
    pythons = {"smg-fastpath": lambda: sys.executable, "rust": lambda: rival_python(args.rival_env)}
    with ExitStack() as stack:
        gateways = [
            stack.enter_context(
                Gateway(
                    name, args.model_path, python=python(),
                    token_ids=piece_ids(args.model_path), rows=ROWS, columns=COLUMNS,
                )
            )
            for name, python in pythons.items()
            if args.only in (None, name)
        ]  # fmt: skip
        bench = Bench(args.model_path, gateways, scale)
        for gateway in gateways:  # caches, code paths and memory as in a gateway that has run for a while
            bench.run(Case("warm-up", 32, 64, 16, 0, True), gateway)
        idle = ", ".join(f"{gateway.name} {gateway.rss_mb():.1f} MB" for gateway in gateways)
        rows, comparisons = [], []
        for case in cases:
            results: dict[str, list[Result]] = {gateway.name: [] for gateway in gateways}
            for repeat in range(repeats):
                for gateway in gateways if repeat % 2 == 0 else gateways[::-1]:
                    results[gateway.name].append(bench.run(case, gateway))
            rows += [row(case, gateway, results[gateway.name]) for gateway in gateways]
            if len(gateways) == 2:
                comparisons.append(ratios(case, results["smg-fastpath"], results["rust"]))
            for gateway in gateways:
                print(
                    accounting.table(COLUMN_NAMES, rows[-len(gateways) :]) if gateway is gateways[0] else "", flush=True
                )
                if case.bulk:
                    bulk = [result["bulk"] for result in results[gateway.name]]
                    print(f"{gateway.name}: megabyte requests answered {[b['ok'] for b in bulk]}, refused "
                          f"{[b['refused'] for b in bulk]} ({bulk[-1]['error'][:150]}), not sent for want of a "
                          f"connection {[b['late'] for b in bulk]}", flush=True)  # fmt: skip
    print("\n## All\n\n" + accounting.table(COLUMN_NAMES, rows))
    print(f"\nRSS before the cases: {idle}")
    if comparisons:
        header = ["case", "CPU ours/rust", "bar", "delay p50 ours/rust", "delay p99 ours/rust", "RSS ours/rust"]
        print("\n## Ratios\n\n" + accounting.table(header, comparisons))


if __name__ == "__main__":
    main()
