"""The soak as a test; SMG_SOAK_SECONDS says for how long, and 1200 is the run whose plot is in docs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.soak import soak

SECONDS = float(os.environ.get("SMG_SOAK_SECONDS", "120"))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_everything_is_at_the_end_what_it_was_after_a_fault_every_second(ipc_dir: Path) -> None:
    found = soak(ipc_dir, SECONDS)
    assert found.wrong == []
    assert sum(found.faults.values()) > SECONDS / 2
    assert found.outcomes["finished"] > 5 * SECONDS
    assert found.outcomes["HTTP stream"] > SECONDS
    # The faults were felt, and nobody was left to wait for ever.
    assert found.outcomes["RankDied"] > 0
    assert found.outcomes["DeadlineExceeded"] > 0
