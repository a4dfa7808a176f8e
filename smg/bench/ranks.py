"""Groups with ranks that make no step until they are told to, for receivers whose cost is measured."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from smg.bench.simulator import Simulator
from smg.engine.group import EngineGroup
from smg.mock import SimulatorProcess, spawn

NEVER = 1 << 30  # requests that never run at once


class Ranks(Protocol):
    """Ranks of a group, in a process of their own. They hold at first."""

    def start(self, step_ms: float) -> None:
        """Make steps, until all requests have ended or `hold`."""

    def hold(self) -> None:
        """Take requests, make no steps."""

    def adds(self) -> int:
        """Requests that have arrived so far."""


class CheapRanks:
    """TokenSpeed's wire, from the simulator in C."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator

    def start(self, step_ms: float) -> None:
        self.simulator.call("pace", step_ms=step_ms, start_at=1)

    def hold(self) -> None:
        self.simulator.call("pace", step_ms=10, start_at=NEVER)

    def adds(self) -> int:
        return self.simulator.totals()["adds"]


class MockRanks:
    """Any engine's wire, from `smg mock`, whose pace is set when it starts."""

    def __init__(self, process: SimulatorProcess) -> None:
        self.process = process

    def start(self, step_ms: float) -> None:
        self.process.release()

    def hold(self) -> None:
        self.process.hold()

    def adds(self) -> int:
        return sum(self.process.stats(rank)["adds"] for rank in self.process.indexes)


def mock_ranks(stack: ExitStack, address: str, engine: str, ranks: int, step_ms: float) -> MockRanks:
    """`smg mock` on a handshake address; ends with the stack."""
    process = stack.enter_context(
        spawn(
            "ipc:///nowhere/engine-31000",  # the address is given
            handshake_address=address,
            backend=engine,
            ranks=ranks,
            step_ms=step_ms,
            max_running=4096,
            prefill_chunk=1 << 22,
            kv_pages=1 << 20,
            hold=True,
            record=False,
        )
    )
    return MockRanks(process)


@contextmanager
def groups_with_ranks(
    engine: str, groups: int, ranks: int, step_ms: float
) -> Iterator[tuple[list[EngineGroup], Sequence[Ranks]]]:
    """Groups in this process, their sockets in a directory of their own, with `ranks` live ranks each."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="smg-bench-"))
        made: list[EngineGroup] = []
        theirs: list[Ranks] = []
        for number in range(groups):
            group = EngineGroup(
                f"ipc://{directory}/{number}", backend=engine, ranks=ranks, handshake_address="tcp://127.0.0.1:0"
            )
            stack.enter_context(group)
            made.append(group)
            if engine == "tokenspeed":
                simulator = Simulator(group.handshake_address, ranks=ranks, start_at=NEVER)
                theirs.append(CheapRanks(stack.enter_context(simulator)))
            else:
                theirs.append(mock_ranks(stack, group.handshake_address, engine, ranks, step_ms))
        for group in made:
            group.wait_ready(30)
        yield made, theirs
        for group in made:
            group.close()  # before the ranks, so that it does not report their deaths
