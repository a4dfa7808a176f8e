"""The simulation behind `smg bench policy`: its rank choice is the compiled one, its ranks keep their rules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg._fastpath import Core
from smg._outlets import new_outlet
from smg._streams import submit
from smg.bench.choosing import RankChoice, choosers
from smg.bench.decode import LIVE
from smg.bench.simulation import Engine, Rank, Request, simulate
from smg.bench.trace import SHAPES, Arrival, at_rate, draw, read
from smg.cli import main
from smg.protocol import tokenspeed

PAGES = 1000
ADD = tokenspeed.encode_add("0" * 24, [1, 2, 3])
SMALL = Engine(batch=4, kv=4000, chunk=64)

choice = st.tuples(st.just("choose"))
finish = st.tuples(st.just("finish"), st.integers(0, 1 << 16))
report = st.tuples(st.just("report"), st.integers(0, 5), st.integers(0, 40), st.integers(0, 40), st.integers(0, PAGES))
arrivals = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 300), st.integers(1, 60)).map(lambda a: Arrival(*a)), max_size=60
).map(sorted)


def frame(rid: str | None, load: tuple[int, ...] = ()) -> bytes:
    """An output frame that ends that request, and that tells this load."""
    rows = [rid] if rid else []
    columns = [rows, [[7]] * len(rows), ["length"] * len(rows), *([1] * len(rows) for _ in range(3))]
    return bytes(msgpack.packb(["BatchTokenIDOutSlim", *columns, *([[]] * len(rows) for _ in range(2)), 0, *load]))


@given(st.integers(1, 6), st.lists(choice | finish | report, max_size=120))
def test_the_simulated_rank_choice_is_the_compiled_one(ranks: int, operations: list[Any]) -> None:
    core = Core(ranks, backend="tokenspeed", decode_cold=lambda data, top: None, stall_timeout=0, max_inflight=0)
    for rank in range(ranks):
        core.set_state(rank, LIVE)
    outlet, twin = new_outlet(core), RankChoice(ranks)
    running: list[Any] = []
    for name, *arguments in operations:
        if name == "choose":
            stream = submit(core, ADD, tokenspeed.RID_OFFSET, outlet=outlet)
            running.append(stream)
            assert twin.choose() == stream.rank
        elif name == "finish" and running:
            stream = running.pop(arguments[0] % len(running))
            core.feed(stream.rank, frame(stream.request_id))
            twin.finished(None, stream.rank)
        elif name == "report":
            rank, queued, waiting, used = arguments
            core.feed(rank % ranks, frame(None, (queued, waiting, used, PAGES)))
            twin.report(rank % ranks, queued, waiting, used / PAGES)
        outlet.take()
    assert twin.in_flight == [core.in_flight(rank) for rank in range(ranks)]
    assert core.counters()["undecodable"] == [0] * ranks


@given(arrivals, st.integers(1, 4))
def test_every_request_runs_once_and_in_order(trace: list[Arrival], ranks: int) -> None:
    outcome = simulate(trace, ranks, RankChoice(ranks), SMALL)
    assert [request.arrival for request in outcome.requests] == trace
    for request in outcome.requests:
        assert request.left == 0
        assert request.arrival.at <= request.began < request.first <= request.ended <= outcome.end
        least = SMALL.per_prompt_token * request.arrival.prompt + SMALL.step * request.arrival.output
        assert request.ended - request.began >= least * 0.999
    assert all(1 <= value <= ranks + 1e-9 for value in outcome.imbalance)


@given(arrivals)
def test_a_rank_never_holds_more_than_its_batch_and_its_memory(trace: list[Arrival]) -> None:
    seen: list[tuple[int, float]] = []

    class Watching(RankChoice):
        def report(self, rank: int, running: int, waiting: int, kv_usage: float) -> None:
            seen.append((running, kv_usage))
            super().report(rank, running, waiting, kv_usage)

    simulate(trace, 1, Watching(1), SMALL)
    assert all(running <= SMALL.batch and kv_usage <= 1 for running, kv_usage in seen)


def test_requests_wait_for_memory_first_come_first_served() -> None:
    rank = Rank()
    large, small = (Request(Arrival(0, prompt, 1), number, prompt) for number, prompt in enumerate((3000, 100)))
    for request in (large, Request(Arrival(0, 1500, 1), 2, 1500), small):
        rank.waiting.append(request)
    rank.begin(SMALL, 0.0)
    assert rank.running == 1
    assert rank.queued == 2  # the small one would fit, but came later


def test_the_same_seed_gives_the_same_figures_for_every_policy() -> None:
    trace = draw(SHAPES["chat"], 20, 5, seed=3)
    assert trace == draw(SHAPES["chat"], 20, 5, seed=3)
    assert trace != draw(SHAPES["chat"], 20, 5, seed=4)
    for name, make in choosers(3, Engine(), 3).items():
        ends = [[r.ended for r in simulate(trace, 3, make(), Engine()).requests] for _ in range(2)]
        assert ends[0] == ends[1], name


def test_a_shape_comes_at_its_rate_in_bursts_and_with_a_heavy_tail() -> None:
    trace = draw(SHAPES["chat"], 50, 600, seed=1)
    assert 0.9 < len(trace) / (50 * 600) < 1.1
    per_second = [0] * 600
    for arrival in trace:
        per_second[int(arrival.at)] += 1
    mean = sum(per_second) / 600
    assert sum((count - mean) ** 2 for count in per_second) / 600 > 3 * mean  # a Poisson process has the mean
    outputs = sorted(arrival.output for arrival in trace)
    assert outputs[len(outputs) * 99 // 100] > 8 * outputs[len(outputs) // 2]


def test_spreading_requests_evenly_waits_less_than_spreading_them_blindly() -> None:
    engine = Engine()
    trace = draw(SHAPES["chat"], 6 * engine.capacity(draw(SHAPES["chat"], 1000, 1, 1)), 20, seed=1)
    waited = {
        name: sum(r.first - r.arrival.at for r in simulate(trace, 8, make(), engine).requests)
        for name, make in choosers(8, engine, 1).items()
    }
    assert waited["rank choice"] < waited["random"]


@pytest.mark.parametrize(
    ("stamps", "seconds"),
    [
        (["3.5", "1.5", "2"], [0, 0.5, 2]),
        (["2023-11-16 18:15:46.6805900", "2023-11-16 18:15:47.6805900", "2023-11-16 18:15:50.6805900"], [0, 1, 4]),
    ],
)
def test_a_trace_is_read_from_a_file_and_brought_to_a_rate(
    tmp_path: Path, stamps: list[str], seconds: list[float]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{stamp},374,44\n" for stamp in stamps))
    found = read(path)
    assert [arrival.at for arrival in found] == pytest.approx(seconds)
    assert found[0][1:] == (374, 44)
    assert at_rate(found, 6)[-1].at == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "must name the columns"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,x,3\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n", "line 2"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    assert main(["bench", "policy", "--trace", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_policies_are_compared_on_the_same_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    lines = "".join(f"{i / 10},{100 + i},{10 + i % 7}\n" for i in range(60))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + lines)
    figures = tmp_path / "figures.json"
    arguments = ["bench", "policy", "--trace", str(path), "--ranks", "2", "--load", "50", "--json", str(figures)]
    assert main(arguments) == 0
    measured = {m["name"]: m for m in json.loads(figures.read_text())["measurements"]}
    assert set(measured) == {
        f"policy.trace.ranks2.load50.{m}" for m in ("ttft_p50", "ttft_p99", "queue_p99", "imbalance")
    }
    names: Callable[[Any], list[str]] = lambda m: list(m["contestants"])  # noqa: E731
    assert names(measured["policy.trace.ranks2.load50.ttft_p99"])[0] == "rank choice"
    assert "power_of_two" in names(measured["policy.trace.ranks2.load50.ttft_p99"])
    assert "trace, 2 ranks, load 50 %" in capsys.readouterr().out
