"""The tests of the compiled parts, run once more on a build with AddressSanitizer and UBSan."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sanitizers

SUITE = (
    "unit/test_msgpack_cursor.py",
    "unit/test_tokenspeed_wire.py",
    "unit/test_tokenspeed_requests.py",
    "unit/test_vllm_wire.py",
    "unit/test_vllm_arrays.py",
    "unit/test_requests_decoding.py",
    "unit/test_sse_escape.py",
    "unit/test_text_stops.py",
    "engine/test_choice.py",
    "engine/test_core_model.py",
    "engine/test_streams.py",
    "engine/test_ranks.py",
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tests_of_the_compiled_parts_pass_under_the_sanitizers(tmp_path: Path) -> None:
    sanitizers.build_package(tmp_path)
    files = [f"tests/{name}" for name in SUITE]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=600", *files]
    environment = {**sanitizers.environment(), "HYPOTHESIS_PROFILE": "ci"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    assert "passed" in done.stdout
