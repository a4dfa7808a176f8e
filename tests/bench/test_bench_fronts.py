"""`smg bench http` without --url: the front as a process on simulated ranks, held to bars, in one short run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from smg.bench import fronts
from smg.bench.chats import piece_ids
from smg.bench.gateways import Gateway
from smg.bench.results import AT_MOST, FELL_SHORT, OURS
from smg.bench.turns import Plan
from smg.cli import main

pytestmark = pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc")), reason="the client and the ranks are C: needs a compiler (cc)"
)
ROOT = Path(__file__).parents[2]
SHORT = ["bench", "http", "--quick", "--repeats", "2", "--streams", "4", "--step-ms", "1", "--tokens", "16"]


def test_the_front_is_set_beside_the_floor_and_held_to_its_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `--only paced256 --assert benchmarks/bars.json` does, with four streams."""
    name = "http.tokenspeed.paced4"
    bars = {
        f"{name}.cpu": {"receive + send": 1e-6},
        f"{name}.wrong": {AT_MOST: 1},
        "http.tokenspeed.bulk256.cpu": {"rust": 1},
    }
    (tmp_path / "bars.json").write_text(json.dumps(bars))
    files = ["--json", str(tmp_path / "figures.json"), "--assert", str(tmp_path / "bars.json")]
    assert main([*SHORT, "--engines", "tokenspeed", "--only", "paced4", *files]) == FELL_SHORT
    printed = capsys.readouterr()
    [said] = [line for line in printed.err.splitlines() if line.startswith("smg bench: ")]
    assert said.startswith(f"smg bench: {name}.cpu, receive + send: ")
    assert said.endswith("≤ 1e-06: missed")
    assert "the Rust gateway takes no part; --rust-python" in printed.err
    measured = {
        m["name"]: m["contestants"] for m in json.loads((tmp_path / "figures.json").read_text())["measurements"]
    }
    assert measured[f"{name}.cpu"].keys() == {OURS, "send", "receive + send"}
    assert all(len(of["samples"]) == 2 and of["median"] > 0 for of in measured[f"{name}.cpu"].values())
    assert measured[f"{name}.wrong"][OURS]["samples"] == [0, 0]
    # One each for the role, the finish reason and the end, and from one for all 16 tokens to one for each
    assert 4 / 16 <= measured[f"{name}.events"][OURS]["median"] <= 19 / 16


def test_the_bars_that_come_with_it_are_measured_under_these_names() -> None:
    plan = Plan()
    bars = json.loads((ROOT / "benchmarks" / "bars.json").read_text())
    measured = {
        f"http.{engine}.{case.name}.{metric}"
        for engine in plan.engines
        for case in fronts.ENGINE_CASES[engine]
        for metric in fronts._metrics(case)
    }
    assert {name for name in bars if name.startswith("http.")} <= measured


def test_a_turn_with_one_megabyte_requests_is_set_beside_one_without_them() -> None:
    case = next(case for case in fronts.CASES if case.bulk)
    result: dict[str, Any] = {
        "gap": [10.0, 11.0, 18.0, 30.0],
        "alone": {"gap": [10.0, 11.0, 12.0, 13.0]},
        "bulk": {"ok": 40, "refused": 3, "errors": 1, "late": 2},
    }
    picked = {
        name: metric.pick(result) for name, metric in fronts._metrics(case).items() if name.startswith(("gap", "bulk"))
    }
    assert picked == {
        "gap_p99": 18,
        "gap_p99_alone": 12,
        "gap_times": 1.5,
        "bulk_ok": 40,
        "bulk_refused": 4,
        "bulk_late": 2,
    }


def test_a_load_test_of_the_front_in_closed_and_open_loop_tells_goodput_and_errors_by_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    arguments = ["bench", "http", "--repeats", "2", "--requests", "6", "--concurrency", "3", "--rate", "300"]
    arguments += ["--output-tokens", "8", "--slo-ttft-ms", "20000", "--slo-token-ms", "20000", "--slo-e2e-ms", "1e-3"]
    ids = piece_ids(fronts.MODEL)
    with Gateway(OURS, fronts.MODEL, token_ids=ids, rows=16, columns=16) as server:
        assert server.simulator is not None
        server.simulator.call("pace", step_ms=1, start_at=1)
        assert main([*arguments, "--url", f"front=http://127.0.0.1:{server.port}", "--json", str(path)]) == 0
        measured = {m["name"]: m for m in json.loads(path.read_text())["measurements"]}
        assert main([*arguments, "--url", f"http://127.0.0.1:{server.port}", "--model", "other", "--completions"]) == 2
    for loop in ("http.closed.3", "http.open.300"):
        of = {
            name: measured[f"{loop}.{name}"]["contestants"]["front"]["median"] for name in ("errors", "good", "itl_p50")
        }
        assert of["errors"] == 0
        assert of["good"] == 0  # every request takes longer than the whole bound
        assert of["itl_p50"] >= 0
        assert measured[f"{loop}.throughput"]["contestants"]["front"]["median"] > 8
    printed = capsys.readouterr()
    assert "requests with TTFT ≤ 20000 ms, further tokens on average ≤ 20000 ms, whole ≤ 0.001 ms (%)" in printed.out
    assert "8 × HTTP 404 (" in printed.err
