"""What CI runs of this suite: its matrix, and the script that installs TokenSpeed."""

import os
import shutil
import subprocess

import pytest
from e2e_lane import ENGINES, lane_from
from serve_process import ROOT

SCRIPT = ROOT / "scripts" / "ci_install_tokenspeed.sh"
PINNED = "04bc08649f3e53e19144ee86564be7c6121c99d2"


def script(*arguments, **environment):
    return subprocess.run(
        [str(SCRIPT), *arguments], env={**os.environ, **environment}, capture_output=True, text=True, timeout=20
    )


def test_the_matrix_has_every_engine_with_one_rank_and_with_two():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "e2e.yml").read_text())["jobs"]
    rows = [row for job in ("cpu", "gpu") for row in jobs[job]["strategy"]["matrix"]["include"]]
    assert {(row["engine"], row["ranks"]) for row in rows} == {
        (engine, ranks) for engine in ENGINES for ranks in (1, 2)
    }
    for row in rows:
        environment = {"E2E_ENGINE": row["engine"], "E2E_ZMQ_ENGINE_COUNT": str(row["ranks"]), "E2E_MODEL": "/m"}
        assert lane_from({**environment, "E2E_MIN_SELECTED": str(row["selected"])}).min_selected > 0
        assert 0 < row["minutes"] <= 60


def test_a_dry_run_of_the_tokenspeed_install_prints_its_commands_and_runs_none(tmp_path):
    run = script("--dry-run", "--path", str(tmp_path / "env"))
    assert run.returncode == 0, run.stderr
    assert f"checkout --detach {PINNED}" in run.stdout
    assert all(line.startswith("+ ") for line in run.stdout.splitlines())
    assert list(tmp_path.iterdir()) == []


def test_another_commit_has_to_come_after_the_pinned_one(tmp_path):
    run = script("--dry-run", "--ref", "abc123", "--path", str(tmp_path / "env"))
    assert f"merge-base --is-ancestor {PINNED} abc123" in run.stdout


@pytest.mark.parametrize("arguments", [("--nope",), ("--path",)])
def test_options_that_are_none_are_refused(arguments):
    run = script(*arguments)
    assert run.returncode == 2
    assert arguments[0] in run.stderr


def test_the_install_script_is_clean():
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    run = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True, timeout=20)
    assert run.returncode == 0, run.stdout
