"""What the tests here break: groups with simulated ranks, and services in front of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "http"))  # its modules import each other by bare name

from serving import Served


@pytest.fixture
def serve(ipc_dir: Path) -> Iterator[Callable[..., Served]]:
    """Start a service: `serve(ranks=2, mock={...}, **ServiceOptions)`; mock=None: no ranks."""
    with ExitStack() as stack:

        def start(ranks: int = 2, mock: dict[str, Any] | None = {}, **options: Any) -> Served:  # noqa: B006
            served = Served(ipc_dir, options, ranks, mock)
            stack.callback(served.close)
            return served

        yield start
