"""Groups and services to break: simulated ranks in this process, or one process for each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import smg

sys.path.append(str(Path(__file__).resolve().parents[1] / "http"))  # its modules import each other by bare name

from serving import Served

from tests.drills.fleet import Fleet, Nursery
from tests.engine.conftest import idle, make_group

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


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def make_fleet(ipc_dir: Path, nursery: Nursery) -> Iterator[Callable[..., Fleet]]:
    """A live group with a process per rank: `make_fleet(4, group={...}, step_ms=5)`; or for a given `of=group`."""
    with ExitStack() as stack:

        def make(ranks: int = 4, of: smg.EngineGroup | None = None, **options: Any) -> Fleet:
            url, chosen = f"ipc://{ipc_dir}/fleet", options.pop("group", {})
            group = of or stack.enter_context(
                smg.EngineGroup(url, backend="tokenspeed", ranks=ranks, handshake_address="tcp://127.0.0.1:0", **chosen)
            )
            fleet = Fleet(nursery, group, **options)
            stack.callback(fleet.close)
            group.wait_ready(20)
            return fleet

        yield make
