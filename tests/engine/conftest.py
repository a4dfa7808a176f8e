"""Groups with simulated ranks, over real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import smg
from smg.mock.simulator import Simulator

Make = Callable[..., tuple[smg.EngineGroup, Simulator]]


@pytest.fixture
def make_group(ipc_dir: Path) -> Iterator[Make]:
    """Make a live group and the simulator of its ranks: `group, mock = make_group(ranks=2, step_ms=0)`.

    `group={...}` are options of the group, the others of the simulator. Everything is closed after the test.
    """
    with ExitStack() as stack:

        def make(
            ranks: int = 2,
            group: dict[str, Any] | None = None,
            live: bool = True,
            backend: str = "tokenspeed",
            **options: Any,
        ) -> Any:
            url = f"ipc://{ipc_dir}/g{len(list(ipc_dir.iterdir()))}"
            made = stack.enter_context(
                smg.EngineGroup(
                    url, backend=backend, ranks=ranks, handshake_address="tcp://127.0.0.1:0", **(group or {})
                )
            )
            mock = stack.enter_context(
                Simulator(
                    url,
                    ranks=ranks,
                    handshake_address=made.handshake_address,
                    **{"backend": backend, "step_ms": 0, "record": True, **options},
                )
            )
            if live:
                made.wait_ready(10)
            return made, mock

        yield make


@pytest.fixture
def idle() -> Callable[[smg.EngineGroup], None]:
    """Check that nothing is in flight, by every count."""

    def check(group: smg.EngineGroup) -> None:
        assert group.in_flight.tolist() == [0] * len(group.ranks)
        assert group.requests == 0
        allocated, free, live, _ = group._core.slots
        assert live == 0
        assert free <= allocated

    return check
