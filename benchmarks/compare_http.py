"""The HTTP front against the Rust gateway: same flags, ranks, tokenizer, requests and load client, turn by turn.

    python -m benchmarks.compare_http [--quick] [--model-path DIR] [--rival-env DIR] [--case NAME]

Both gateways run all the time; the cases go to one and then to the other, `--repeats` times. CPU is what the
operating system accounts to a gateway's process, all threads, for everything it did in a run; delay is from the
simulated engine's send of a token to the client's receipt of it (CLOCK_MONOTONIC). Median (min–max) over the
repeats, and ratios of medians. The Rust gateway goes into an environment of its own, once.

The write floor is a C server that knows the answer beforehand and only writes it, an event per stream and step: what
the kernel of this machine takes for that, no gateway can be below. It weighs more where system calls are dear.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import venv
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smg.bench import accounting
from smg.bench.accounting import figure, ratio
from smg.bench.chats import Bodies, Client, Words, piece_ids
from smg.bench.gateways import RIVAL, Floor, Gateway, Server
from smg.bench.turns import ROOT

DEMO_MODEL = ROOT / "smg" / "data" / "demo-model"
ENVIRONMENT = ROOT / ".venv-rival"
OURS, THEIRS = "smg-fastpath", "rust"
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
    bulk: bool = False  # one-megabyte requests beside it, and a run without them before

    @property
    def streamed(self) -> bool:
        return self.stream and self.tokens > 1


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
    """The requests of each case, and what a run of one is."""

    def __init__(self, model: Path, scale: float) -> None:
        self.model, self.scale = model, scale
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

    def run(self, case: Case, server: Server) -> Result:
        """What the client saw, and what it cost."""
        ranks, stamps = server.simulator, None
        if ranks is not None:
            ranks.call("pace", step_ms=case.step_ms, start_at=1)
            stamps = (ranks.stamps_path, COLUMNS)
        client = Client(
            server.port,
            self.bodies(self.count(case), case.size, case.tokens, case.stream),
            connections=case.connections,
            stamps=stamps,
            ramp_ms=case.ramp_ms,
        )
        bulk = None
        if case.bulk:
            seconds = (self.count(case) / case.connections * case.tokens * case.step_ms + case.ramp_ms) / 1e3
            bulk = Client(server.port, self.bodies(16, 1_000_000, 1, False), connections=16, rate=50, limit=seconds)
        before, ranks_before = server.cpu(), accounting.process_cpu(ranks.pid) if ranks else 0.0
        client.start()
        if bulk is not None:
            bulk.start()
        result = client.result()
        if bulk is not None:
            result["bulk"] = bulk.result()
        result["gateway_cpu"] = server.cpu() - before
        result["ranks_cpu"] = accounting.process_cpu(ranks.pid) - ranks_before if ranks else 0.0
        result["rss"] = server.rss_mb()
        if result["errors"] or result["ok"] != self.count(case):
            print(f"{server.name}, {case.name}: {result}", file=sys.stderr)
        return result

    def turns(self, case: Case, gateways: list[Server], repeats: int) -> dict[str, list[Result]]:
        """Runs of a case, turn by turn, in both directions; for paced streams the write floor takes part."""
        with ExitStack() as stack:
            servers = list(gateways)
            if case.streamed and case.step_ms and not case.bulk:
                servers.append(stack.enter_context(Floor(case.step_ms, case.tokens)))
            results: dict[str, list[Result]] = {server.name: [] for server in servers}
            for repeat in range(repeats):
                for server in servers if repeat % 2 == 0 else servers[::-1]:
                    alone = self.run(replace(case, bulk=False), server) if case.bulk else None
                    results[server.name].append(self.run(case, server) | {"alone": alone})
        return results


# -------------------------------------------------------------- the tables

Pick = Callable[[Result], float]
COLUMN_NAMES = ["case", "gateway", "µs CPU/token", "µs CPU/request", "tokens/s", "requests/s", "delay p50 ms",
                "delay p99 ms", "gap p99 ms", "TTFT p50 ms", "TTFT p99 ms", "RSS MB", "client µs/token",
                "ranks µs/token", "events/token", "errors"]  # fmt: skip
RATIO_NAMES = ["case", "CPU", "bar", "CPU above the write floor", "delay p50", "delay p99", "gap p99", "RSS"]


def per(key: str, unit: str) -> Pick:
    return lambda result: result[key] / max(1, result[unit]) * 1e6


def row(case: Case, name: str, results: list[Result]) -> list[object]:
    def of(pick: Pick, digits: int = 2, shown: bool = True) -> str:
        return figure([pick(result) for result in results], digits) if shown else "–"

    first = "ttft" if case.streamed else "whole"
    delays = case.streamed and name != Floor.name
    return [
        case.name,
        name,
        of(per("gateway_cpu", "tokens"), shown=case.tokens > 1),
        of(per("gateway_cpu", "ok"), 1),
        of(lambda r: r["tokens"] / r["seconds"], 0),
        of(lambda r: r["ok"] / r["seconds"], 0),
        of(lambda r: r["delay"][0], shown=delays),
        of(lambda r: r["delay"][2], shown=delays),
        of(lambda r: r["gap"][2], shown=case.streamed),
        of(lambda r: r[first][0]),
        of(lambda r: r[first][2]),
        of(lambda r: r["rss"], 1),
        of(per("cpu", "tokens")),
        of(per("ranks_cpu", "tokens")),
        of(lambda r: r["events"] / max(1, r["tokens"]), 3),
        sum(r["errors"] + r["refused"] for r in results),
    ]


def ratios(case: Case, results: dict[str, list[Result]]) -> list[object]:
    """Ours / theirs."""
    cpu = per("gateway_cpu", "ok")

    def of(pick: Pick, shown: bool = True) -> str:
        if not shown:
            return "–"
        return f"{ratio([pick(r) for r in results[OURS]], [pick(r) for r in results[THEIRS]]):.2f}"

    total = ratio([cpu(r) for r in results[OURS]], [cpu(r) for r in results[THEIRS]])
    verdict = "–" if case.bar is None else f"≤ {case.bar}: {'met' if total <= case.bar else 'missed'}"
    floor = statistics.median(map(cpu, results[Floor.name])) if Floor.name in results else None
    return [
        case.name,
        f"{total:.2f}",
        verdict,
        "–" if floor is None else of(lambda r: cpu(r) - floor),
        of(lambda r: r["delay"][0], case.streamed),
        of(lambda r: r["delay"][2], case.streamed),
        of(lambda r: r["gap"][2], case.streamed),
        of(lambda r: r["rss"]),
    ]


def bulk_line(name: str, results: list[Result]) -> str:
    bulk = [result["bulk"] for result in results]
    late, refused = [b["late"] for b in bulk], [b["refused"] for b in bulk]
    gaps = [(result["alone"]["gap"][2], result["gap"][2]) for result in results]
    shown = ", ".join(f"{alone:.1f} → {beside:.1f} ms ({beside / alone:.2f}×)" for alone, beside in gaps)
    return (
        f"{name}: gap p99 without and with one-megabyte requests {shown}; bar 2×\n"
        f"{name}: one-megabyte requests answered {[b['ok'] for b in bulk]}, refused {refused} "
        f"{bulk[-1]['error'][:150]}, not sent since all 16 connections waited {late}"
    )


# -------------------------------------------------------------- the command


def rival_python(environment: Path) -> str:
    """The interpreter of an environment that has the Rust gateway, made when it is missing."""
    python = environment / "bin" / "python"
    if not python.exists():
        print(f"installing {RIVAL} in {environment}", file=sys.stderr)
        venv.create(environment, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", RIVAL], check=True)
    return str(python)


def arguments() -> argparse.Namespace:
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
    parser.add_argument("--only", choices=(OURS, THEIRS), help="drive one gateway alone")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    scale, repeats = (1 / 3, 1) if args.quick else (1.0, args.repeats)
    cases = [case for case in CASES if not args.case or any(part in case.name for part in args.case)]
    print(
        f"{accounting.machine()}\n{accounting.versions('pyzmq', 'aiohttp', 'uvloop', 'tokenizers', 'fastokens')}; "
        f"rival {RIVAL}; model {args.model_path.name}; {repeats} repeats\n",
        flush=True,
    )
    pythons = {OURS: lambda: sys.executable, THEIRS: lambda: rival_python(args.rival_env)}
    rows: list[list[object]] = []
    comparisons: list[list[object]] = []
    with ExitStack() as stack:
        tokens = piece_ids(args.model_path)
        gateways: list[Server] = [
            stack.enter_context(
                Gateway(name, args.model_path, python=python(), token_ids=tokens, rows=ROWS, columns=COLUMNS)
            )
            for name, python in pythons.items()
            if args.only in (None, name)
        ]
        bench = Bench(args.model_path, scale)
        for gateway in gateways:  # caches, code paths and memory as in a gateway that has run for a while
            bench.run(Case("warm-up", 32, 64, 16, 0, True), gateway)
        idle = ", ".join(f"{gateway.name} {gateway.rss_mb():.1f} MB" for gateway in gateways)
        for case in cases:
            results = bench.turns(case, gateways, repeats)
            shown = [row(case, name, runs) for name, runs in results.items()]
            print(accounting.table(COLUMN_NAMES, shown))
            if case.bulk:
                print("\n".join(bulk_line(name, runs) for name, runs in results.items()))
            print(flush=True)
            rows += shown
            if len(gateways) == 2:
                comparisons.append(ratios(case, results))
    print("## All\n\n" + accounting.table(COLUMN_NAMES, rows))
    print(f"\nRSS before the cases: {idle}")
    if comparisons:
        print("\n## Ratios, ours / the Rust gateway's\n\n" + accounting.table(RATIO_NAMES, comparisons))


if __name__ == "__main__":
    main()
