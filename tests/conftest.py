"""What every test may use: hypothesis profiles and a place for ipc sockets."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("default", deadline=None, max_examples=100, suppress_health_check=_quiet)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.register_profile("long", settings.get_profile("default"), max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


@pytest.fixture
def ipc_dir() -> Iterator[Path]:
    """A private directory (mode 0700) with a path short enough for socket addresses."""
    path = Path(tempfile.mkdtemp(prefix="smg-", dir=os.environ.get("XDG_RUNTIME_DIR")))
    yield path
    shutil.rmtree(path, ignore_errors=True)
