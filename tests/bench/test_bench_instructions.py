"""Instruction counts of the hot paths stay where they are: noise cannot move them, a change of code can."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = json.loads((ROOT / "benchmarks" / "instructions.json").read_text())
ALLOWED = 1.15  # other compilers and interpreters take a few more


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not there: apt install valgrind")
@pytest.mark.parametrize("path", KEPT)
def test_a_hot_path_takes_no_more_instructions_than_it_did(path: str) -> None:
    spec = importlib.util.spec_from_file_location("instructions", ROOT / "scripts" / "instructions.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.measure(path) <= ALLOWED * KEPT[path]
