"""Whatever the OpenAPI document allows, and much that it does not, gets an answer that is no server error."""

import subprocess
import sys
from pathlib import Path

import pytest

from smg.http.requests import Limits

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_generated_request_is_a_server_error(serve):
    served = serve(
        mock={"step_ms": 0, "output_tokens": "1-20", "grammar_backend": True, "enable_output_logprobs": True},
        front={"limits": Limits(output_tokens=1000, sequences=64)},
    )
    command = [str(SCHEMATHESIS), "run", f"{served.service.url}/openapi.json"]
    options = ["--checks", "not_a_server_error", "--max-examples", "50", "--request-timeout", "30", "--seed", "1"]
    phases = ["--phases", "examples,coverage,fuzzing"]
    found = subprocess.run([*command, *options, *phases], capture_output=True, text=True, timeout=550)
    assert found.returncode == 0, found.stdout[-5000:]
    assert served.group.in_flight.tolist() == [0, 0]
    assert served.front.admission.active == 0
    assert served.ask("/health").status == 200
