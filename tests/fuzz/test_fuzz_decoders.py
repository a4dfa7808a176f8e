"""The compiled decoders under AddressSanitizer and UBSan, fed with mutations of the vectors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import compile_targets
import pytest

RUN = Path(__file__).with_name("run.py")
SECONDS = 30  # for each decoder
RATE = 5_000  # executions per second that even a machine with other work makes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fuzz")
    compile_targets.build(directory)
    return directory


def run(built: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUN), "--build", str(built), "--crash", str(built / "crash"), *arguments]
    return subprocess.run(command, cwd=built, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("target", ["tokenspeed", "vllm"])
def test_mutated_messages_find_nothing(built: Path, target: str) -> None:
    seed = os.environ.get("SMG_FUZZ_SEED", "1")
    done = run(built, target, "--seconds", str(SECONDS), "--seed", seed)
    crash = built / "crash"
    assert done.returncode == 0, f"{done.stderr}\ninput: {crash.read_bytes().hex() if crash.exists() else 'not kept'}"
    found = re.search(r"(\d+) executions .* (\d+) inputs beyond", done.stdout)
    assert found, done.stdout
    assert int(found[1]) > SECONDS * RATE
    assert int(found[2]) > 50  # coverage led somewhere that the vectors did not


def test_the_sanitizers_see_a_read_past_the_end_of_a_message(built: Path) -> None:
    """Otherwise a run that finds nothing would say nothing."""
    done = run(built, "overread", "--executions", "1000")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert (built / "crash").read_bytes()


def test_a_replayed_input_is_run_by_itself(built: Path) -> None:
    one = built / "one"
    one.write_bytes(bytes.fromhex("9301c0"))
    done = run(built, "tokenspeed", "--replay", str(one))
    assert (done.returncode, done.stdout) == (0, "tokenspeed: nothing found\n")
