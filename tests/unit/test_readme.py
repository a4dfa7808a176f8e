"""What the README promises, run as it is written there."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import smg

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

has_simulator = importlib.util.find_spec("smg.__main__") is not None and hasattr(smg, "EngineGroup")


@pytest.mark.skipif(not has_simulator, reason="python -m smg mock is not there")
def test_the_embedded_example_runs_as_written(ipc_dir: Path) -> None:
    [example] = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    [command] = re.findall(r"^    python (-m smg mock .*)$", README, re.MULTILINE)
    url = f"ipc://{ipc_dir}/engine"
    mock = [re.sub("^ipc://.*", url, word) for word in command.split()]
    assert url in mock
    engines = subprocess.Popen([sys.executable, *mock], stdout=subprocess.DEVNULL)
    try:
        run = subprocess.run(
            [sys.executable, "-c", example, url], capture_output=True, text=True, timeout=50, check=False
        )
    finally:
        engines.kill()
        engines.wait()
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    ranks = {line.split()[0] for line in lines}
    assert len(ranks) == 1
    assert ranks <= {"0", "1"}
    assert lines[-1].split()[-1] in ("length", "stop")
    assert all(line.endswith(" None") for line in lines[:-1])
    assert list(ipc_dir.iterdir()) == []


def test_the_code_map_names_what_is_there() -> None:
    rows = re.findall(r"^\| (`.*`) \| ", README, re.MULTILINE)
    paths = [path for row in rows for path in re.findall(r"`([^`]+)`", row)]
    assert len(paths) >= 12
    for path in paths:
        here = ROOT / path
        assert here.exists() or here.with_suffix(".pyx").exists(), f"README names {path}"


@pytest.mark.parametrize("target", ["demo", "test", "slow", "engines", "build"])
def test_every_make_target_the_readme_names_exists(target: str) -> None:
    assert f"make {target}" in README
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
