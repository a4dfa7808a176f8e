"""Groups and services to break: simulated ranks in this process, or one process for each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "http"))  # its modules import each other by bare name

from serving import Served  # noqa: E402

from tests.engine.conftest import idle, make_group  # noqa: E402

__all__ = ["idle", "make_group", "serve"]


@pytest.fixture
def serve(ipc_dir: Path) -> Iterator[Callable[..., Served]]:
    """Start a service: `serve(front={...}, ranks=2, mock={...}, **ServiceOptions)`; mock=None: no ranks."""
    with ExitStack() as stack:

        def start(ranks: int = 2, mock: dict[str, Any] | None = {}, **options: Any) -> Served:  # noqa: B006
            served = Served(ipc_dir, options, ranks, mock)
            stack.callback(served.close)
            return served

        yield start
