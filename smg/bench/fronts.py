"""The HTTP front beside the Rust gateway and the floor: same flags, ranks, tokenizer, requests and client, in turns.

Gateways run all the time; a case goes to one and then to the other. CPU is what the operating system accounts to a
gateway's process, all threads, for everything it did in a run; delay is from the simulated engine's send of a token to
the client's receipt of it (CLOCK_MONOTONIC). Client and ranks stand for other machines: they stay on the last CPU,
while a gateway, whichever, may use all.

No gateway can be below `send`, a C server that knows the answers beforehand and writes an event per stream and step,
nor below `receive + send`, which adds what it takes to get the engine's frames off their socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import smg
from smg.bench import accounting
from smg.bench.chats import Bodies, Client, Words, piece_ids
from smg.bench.gateways import RIVAL, Floor, Gateway, Server
from smg.bench.results import OURS, Measurement
from smg.bench.turns import BenchError, Plan, Receiver

MODEL = Path(smg.__file__).parent / "data" / "demo-model"
RUST = "rust"
SEND, RECEIVE_AND_SEND = Floor.name, "receive + send"
ROWS, COLUMNS = 4096, 129
BULK_CHARACTERS, BULK_RATE, BULK_CONNECTIONS = 1_000_000, 50, 16
Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One kind of load."""

    name: str
    title: str
    connections: int
    count: int  # requests of a run
    tokens: int
    step_ms: float
    size: int = 200  # characters of a prompt
    ramp_ms: float = 0.0
    bulk: bool = False  # one-megabyte requests beside it, and a run without them before

    @property
    def streamed(self) -> bool:
        return self.tokens > 1


CASES = [
    Case("paced256", "256 streams × 128, 10 ms", 256, 768, 128, 10),
    Case("spread256", "256 streams × 128, 10 ms, spread", 256, 768, 128, 10, ramp_ms=1300),
    Case("paced32", "32 streams × 128, 10 ms", 32, 96, 128, 10),
    Case("unthrottled256", "256 streams × 128, unthrottled", 256, 2048, 128, 0),
    Case("one_token", "32 one-token chats", 32, 4000, 1, 0),
    Case("one_token_8k", "32 one-token chats, 8k characters", 32, 2000, 1, 0, size=8_000),
    Case("one_token_32k", "32 one-token chats, 32k characters", 32, 800, 1, 0, size=32_000),
    Case("bulk256", "256 streams × 128, 10 ms, beside 50 × 1 MB/s", 256, 768, 128, 10, ramp_ms=1300, bulk=True),
]
WARM_UP = Case("warm_up", "", 32, 64, 16, 0)
#: reading and tokenizing requests is the same over every wire: once is enough
ENGINE_CASES = {"tokenspeed": CASES, "vllm": [case for case in CASES if case.streamed and not case.bulk]}


class Bench:
    """The requests of each case, and what a run of one is."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self._words = Words(model)
        self._bodies: dict[tuple[int, int, int, bool], Bodies] = {}

    def bodies(self, count: int, size: int, tokens: int, stream: bool) -> Bodies:
        key = (count, size, tokens, stream)
        if key not in self._bodies:
            self._bodies[key] = Bodies.of_chats(
                self._words, str(self.model), count=count, size=size, tokens=tokens, stream=stream
            )
        return self._bodies[key]

    def run(self, case: Case, server: Server) -> Result:
        """What the client saw, and what it cost."""
        ranks, stamps = server.simulator, None
        if ranks is not None:
            ranks.call("pace", step_ms=case.step_ms, start_at=1)
            stamps = (ranks.stamps_path, COLUMNS)
        client = Client(
            server.port,
            self.bodies(case.count, case.size, case.tokens, case.streamed),
            connections=case.connections,
            stamps=stamps,
            ramp_ms=case.ramp_ms,
        )
        bulk = None
        if case.bulk:
            seconds = (case.count / case.connections * case.tokens * case.step_ms + case.ramp_ms) / 1e3
            bodies = self.bodies(BULK_CONNECTIONS, BULK_CHARACTERS, 1, False)
            bulk = Client(server.port, bodies, connections=BULK_CONNECTIONS, rate=BULK_RATE, limit=seconds)
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
        # an answer that is whole but odd is an error too, and one that never came is neither refused nor an error
        result["wrong"] = max(result["errors"] + result["refused"], case.count - result["ok"])
        if not result["ok"]:
            raise BenchError(f"{server.name} answered no request of {case.name}: {result['error']}")
        return result

    def turn(self, case: Case, server: Server) -> Result:
        """A run; of a case with one-megabyte requests, also what it was `alone`, without them and just before."""
        alone = self.run(replace(case, bulk=False), server) if case.bulk else None
        return self.run(case, server) | {"alone": alone}


# -------------------------------------------------------------- what is measured of a run


class Metric(NamedTuple):
    """A quantity of a run."""

    title: str
    unit: str
    pick: Callable[[Result], float]


def _metrics(case: Case) -> dict[str, Metric]:
    unit, per = ("tokens", "token") if case.streamed else ("ok", "request")

    def cpu(of: str) -> Callable[[Result], float]:
        return lambda r: float(r[of] / max(1, r[unit]) * 1e6)

    found = {"cpu": Metric("CPU", f"µs/{per}", cpu("gateway_cpu"))}
    if case.streamed:
        found |= {
            "delay_p50": Metric("delay of a token, p50", "ms", lambda r: r["delay"][0]),
            "delay_p99": Metric("delay of a token, p99", "ms", lambda r: r["delay"][2]),
            "gap_p99": Metric("between tokens, p99", "ms", lambda r: r["gap"][2]),
            "events": Metric("events", "per token", lambda r: r["events"] / max(1, r["tokens"])),
        }
    if case.bulk:
        found |= {
            "gap_p99_alone": Metric(
                "between tokens without the 1 MB requests, p99", "ms", lambda r: r["alone"]["gap"][2]
            ),
            "gap_times": Metric(
                "between tokens with the 1 MB requests, p99 (× without them)",
                "×",
                lambda r: r["gap"][2] / r["alone"]["gap"][2],
            ),
            "bulk_ok": Metric("1 MB requests answered", "requests", lambda r: r["bulk"]["ok"]),
            "bulk_refused": Metric(
                "1 MB requests refused or broken", "requests", lambda r: r["bulk"]["refused"] + r["bulk"]["errors"]
            ),
            "bulk_late": Metric(
                "1 MB requests not sent, since all connections waited", "requests", lambda r: r["bulk"]["late"]
            ),
        }
    if not case.step_ms:
        found["rate"] = Metric(f"{per}s", "per second", lambda r: r[unit] / r["seconds"])
    first = "ttft" if case.streamed else "whole"
    return found | {
        "first_p50": Metric("TTFT, p50" if case.streamed else "whole request, p50", "ms", lambda r: r[first][0]),
        "first_p99": Metric("TTFT, p99" if case.streamed else "whole request, p99", "ms", lambda r: r[first][2]),
        "rss": Metric("resident memory", "MB", lambda r: r["rss"]),
        "wrong": Metric("requests that failed", "requests", lambda r: r["wrong"]),
        "client_cpu": Metric("CPU of the load client beside it", f"µs/{per}", cpu("cpu")),
        "ranks_cpu": Metric("CPU of the simulated ranks behind it", f"µs/{per}", cpu("ranks_cpu")),
    }


def measure(plan: Plan, model: Path = MODEL) -> Iterator[Measurement]:
    for engine in plan.engines:
        cases = [replace(case, count=_count(plan, case)) for case in _cases(plan, engine)]
        if cases or plan.wants(_idle(engine)):
            yield from _engine(plan, engine, cases, model)


def _idle(engine: str) -> str:
    return f"http.{engine}.idle"


def _count(plan: Plan, case: Case) -> int:
    return max(case.connections, case.count // 3) if plan.quick else case.count


def _cases(plan: Plan, engine: str) -> list[Case]:
    if plan.streams or plan.tokens or plan.step_ms is not None:
        streams, step_ms = plan.streams or 256, 10.0 if plan.step_ms is None else plan.step_ms
        tokens = min(plan.tokens or 128, COLUMNS - 1)
        pace = f"{step_ms:g} ms" if step_ms else "unthrottled"
        name = f"{'paced' if step_ms else 'unthrottled'}{streams}"
        cases = [Case(name, f"{streams} streams × {tokens}, {pace}", streams, 3 * streams, tokens, step_ms)]
    else:
        cases = ENGINE_CASES[engine]
    return [case for case in cases if plan.wants(f"http.{engine}.{case.name}")]


def _engine(plan: Plan, engine: str, cases: list[Case], model: Path) -> Iterator[Measurement]:
    tokens, bench = piece_ids(model), Bench(model)
    with ExitStack() as stack:

        def gateway(name: str, **how: Any) -> Server:
            plan.progress(f"http.{engine}: starting {name}")
            how |= {"engine": engine, "ranks": plan.ranks or 2, "token_ids": tokens, "rows": ROWS, "columns": COLUMNS}
            return stack.enter_context(Gateway(name, model, **how))

        gateways = {OURS: gateway(OURS)}
        if plan.rust_python:
            gateways[RUST] = gateway(RUST, python=plan.rust_python)
        else:
            plan.progress(f"the Rust gateway takes no part; --rust-python PYTHON names an environment with {RIVAL}")
        for server in gateways.values():  # caches, code paths and memory as in a gateway that has run for a while
            bench.run(WARM_UP, server)
        if plan.wants(_idle(engine)):
            idle = {name: [server.rss_mb()] for name, server in gateways.items()}
            title = f"{engine}: resident memory after {WARM_UP.count} requests, before the others"
            yield Measurement(_idle(engine), title, "MB", idle, {"engine": engine})
        for case in cases:
            yield from _case(plan, engine, case, bench, gateways)


def _case(plan: Plan, engine: str, case: Case, bench: Bench, gateways: dict[str, Server]) -> Iterator[Measurement]:
    name, metrics = f"http.{engine}.{case.name}", _metrics(case)
    results: dict[str, list[Result]] = {}

    def cpu_of(server: Server) -> float:
        result = bench.turn(case, server)
        results.setdefault(server.name, []).append(result)
        if result["wrong"]:
            plan.progress(
                f"{name}: {result['wrong']} requests failed at {server.name}: {result['error'] or 'no answer'}"
            )
        if case.bulk and result["bulk"]["error"]:
            plan.progress(f"{name}: {server.name} said of a 1 MB request: {result['bulk']['error']}")
        return metrics["cpu"].pick(result)

    contestants: dict[str, Callable[[], float]] = {n: partial(cpu_of, server) for n, server in gateways.items()}
    with ExitStack() as stack:
        floors = case.streamed and bool(case.step_ms) and not case.bulk
        if floors:
            contestants[SEND] = partial(cpu_of, stack.enter_context(Floor(case.step_ms, case.tokens)))
            receiver = Receiver(
                "consume", "receive", "--streams", case.connections, "--step-ms", case.step_ms, "--tokens", case.tokens
            )
            contestants["receive"] = stack.enter_context(receiver).per_token
        given = plan.turns(f"{name}, CPU", contestants)
    if floors:
        received = given.pop("receive")
        given[RECEIVE_AND_SEND] = [sum(pair) for pair in zip(given[SEND], received, strict=True)]
    for metric, (title, unit, pick) in metrics.items():
        samples = given if metric == "cpu" else {n: [pick(r) for r in results[n]] for n in gateways}
        yield Measurement(
            f"{name}.{metric}",
            f"{engine}, {case.title}: {title}",
            unit,
            samples,
            {"engine": engine, "streams": case.connections, "step_ms": case.step_ms, "tokens": case.tokens},
        )
