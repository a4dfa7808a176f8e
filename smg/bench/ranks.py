"""Groups with ranks that make no step until they are told to, for receivers whose cost is measured."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from smg.bench.simulator import Simulator
from smg.engine.group import EngineGroup

NEVER = 1 << 30  # requests that never run at once


class Ranks:
    """Ranks of a group, in a process of their own. They hold at first."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator

    def start(self, step_ms: float) -> None:
        """Make steps, until all requests have ended or `hold`."""
        self._simulator.call("pace", step_ms=step_ms, start_at=1)

    def hold(self) -> None:
        """Take requests, make no steps."""
        self._simulator.call("pace", step_ms=10, start_at=NEVER)

    def adds(self) -> int:
        """Requests that have arrived so far."""
        return self._simulator.totals()["adds"]


@contextmanager
def groups_with_ranks(engine: str, groups: int, ranks: int) -> Iterator[tuple[list[EngineGroup], Sequence[Ranks]]]:
    """Groups in this process, their sockets in a directory of their own, with `ranks` live ranks each."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="smg-bench-"))
        made: list[EngineGroup] = []
        theirs: list[Ranks] = []
        for number in range(groups):
            group = EngineGroup(
                f"ipc://{directory}/{number}", backend=engine, ranks=ranks, handshake_address="tcp://127.0.0.1:0"
            )
            made.append(stack.enter_context(group))
            simulator = Simulator(group.handshake_address, engine=engine, ranks=ranks, start_at=NEVER)
            theirs.append(Ranks(stack.enter_context(simulator)))
        for group in made:
            group.wait_ready(30)
        yield made, theirs
        for group in made:
            group.close()  # before the ranks, so that it does not report their deaths
