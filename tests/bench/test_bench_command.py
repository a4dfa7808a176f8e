"""`python -m smg bench` from the command line: its table, its raw data, its exit status, and what it asks for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from smg.bench import turns
from smg.bench.results import AT_MOST, FELL_SHORT, OURS, Measurement, read_bars
from smg.bench.turns import BenchError, Plan, Receiver
from smg.cli import main

ROOT = Path(__file__).parents[2]
DECODE = ["bench", "decode", "--quick", "--repeats", "1", "--streams", "8", "--engines", "tokenspeed"]
NAME = "decode.tokenspeed.rows8"


def test_a_part_prints_its_table_and_writes_every_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert main([*DECODE, "--seed", "7", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "| tokenspeed frame of 8 rows" in out
    written = json.loads(path.read_text())
    assert written["seed"] == 7
    assert written["machine"]["CPUs"] >= 1
    assert {"CPython", "pyzmq", "msgspec"} <= written["versions"].keys()
    [measured] = written["measurements"]
    assert measured["name"] == NAME
    assert {name: len(of["samples"]) for name, of in measured["contestants"].items()} == {
        OURS: 10,
        "msgspec": 10,
        "msgpack": 10,
    }


@pytest.mark.parametrize(
    ("end", "status", "why"),
    [
        (BenchError("a rival has gone"), 2, "smg bench: a rival has gone"),
        (KeyboardInterrupt(), 130, "stopped; what was measured so far:"),
    ],
)
def test_what_was_measured_before_a_failure_or_ctrl_c_is_kept(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    end: BaseException,
    status: int,
    why: str,
) -> None:
    def measure(plan: Plan) -> Iterator[Measurement]:
        yield Measurement(NAME, "a frame", "µs", {OURS: [1.0, 1.0]})
        raise end

    monkeypatch.setattr("smg.bench.decode.measure", measure)
    path, bars = tmp_path / "figures.json", tmp_path / "bars.json"
    bars.write_text(json.dumps({NAME: {AT_MOST: 1000}}))
    assert main([*DECODE, "--json", str(path), "--assert", str(bars)]) == status
    printed = capsys.readouterr()
    assert "| a frame (µs) |" in printed.out
    assert why in printed.err
    assert [measured["name"] for measured in json.loads(path.read_text())["measurements"]] == [NAME]


@pytest.mark.parametrize(
    ("bars", "status"),
    [
        ({NAME: {"msgspec": 1000}}, 0),
        ({NAME: {"msgspec": 1e-6}}, FELL_SHORT),
        ({NAME: {"nobody": 1}}, FELL_SHORT),
        ({"embed.idle": {AT_MOST: 1}}, 0),
    ],
)
def test_the_exit_status_is_that_of_the_bars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bars: dict[str, dict[str, float]], status: int
) -> None:
    path = tmp_path / "bars.json"
    path.write_text(json.dumps(bars))
    assert main([*DECODE, "--assert", str(path)]) == status
    assert (f"smg bench: {NAME}, " in capsys.readouterr().err) == (status != 0)


def test_files_that_cannot_be_used_are_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*DECODE, "--assert", str(tmp_path / "none.json")]) == 2
    printed = capsys.readouterr()
    assert "none.json" in printed.err
    assert printed.out == ""


def test_bars_of_what_only_leaves_out_are_not_held(tmp_path: Path) -> None:
    path = tmp_path / "bars.json"
    path.write_text(json.dumps({NAME: {"msgspec": 1000}, "decode.tokenspeed.rows256": {"msgspec": 1e-6}}))
    assert main([*DECODE, "--only", "rows8", "--assert", str(path)]) == 0
    assert main([*DECODE, "--assert", str(path)]) == FELL_SHORT


def test_only_what_nothing_is_called_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DECODE, "--only", "rows9"]) == 2
    assert "--only rows9: nothing that decode measures has this in its name" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--ranks=2", "--rust-python=python", "--step-ms=1"])
def test_an_option_that_would_change_nothing_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*DECODE, option])
    assert ended.value.code == 2
    assert option in capsys.readouterr().err


def test_what_is_missing_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "smg.bench.plots", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*DECODE, "--plot", str(tmp_path)]) == 2
    assert "pip install 'smg-fastpath[bench]'" in capsys.readouterr().err


def test_other_commands_do_not_import_the_measurements() -> None:
    code = (
        "import contextlib, io, sys\nfrom smg.cli import main\nwith contextlib.redirect_stderr(io.StringIO()):\n"
        "    main([])\nprint([name for name in sys.modules if name.startswith('smg.bench')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_contestants_take_turns_in_both_directions() -> None:
    order: list[str] = []
    given = Plan(repeats=3).turns(
        "x", {name: lambda name=name: float(len(order.append(name) or order)) for name in "ab"}
    )
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert given == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}


def test_a_receiver_that_never_answers_is_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setattr(turns, "CHILD_LIMIT", 0.05)
    with (
        Receiver("consume", "outlet", python=str(silent)) as receiver,
        pytest.raises(BenchError, match=r"smg\.bench\.consume outlet --on-demand` ended with status -9"),
    ):
        receiver.per_token()


def test_the_bars_that_come_with_it_name_parts_that_exist() -> None:
    from smg.bench.command import PARTS

    bars = read_bars(ROOT / "benchmarks" / "bars.json")
    assert {name.partition(".")[0] for name in bars} <= PARTS.keys()
