"""What receivers whose cost is measured receive from: ranks that make no step until they are told to."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import zmq

from smg.bench.simulator import Simulator
from smg.engine.group import EngineGroup

NEVER = 1 << 30  # requests that never run at once


class Ranks:
    """Ranks of a group, in a process of their own. They hold at first."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator

    def start(self, step_ms: float) -> None:
        """Make steps, until all requests have ended or `hold`."""
        self.simulator.call("pace", step_ms=step_ms, start_at=1)

    def hold(self) -> None:
        """Take requests, make no steps."""
        self.simulator.call("pace", step_ms=10, start_at=NEVER)

    def adds(self) -> int:
        """Requests that have arrived so far."""
        return self.simulator.totals()["adds"]


@contextmanager
def groups_with_ranks(
    engine: str, groups: int, ranks: int, **options: Any
) -> Iterator[tuple[list[EngineGroup], Sequence[Ranks]]]:
    """Groups in this process, their sockets in a directory of their own, with `ranks` live ranks each.

    `options` are the simulator's.
    """
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="smg-bench-"))
        made: list[EngineGroup] = []
        theirs: list[Ranks] = []
        for number in range(groups):
            group = EngineGroup(
                f"ipc://{directory}/{number}", backend=engine, ranks=ranks, handshake_address="tcp://127.0.0.1:0"
            )
            made.append(stack.enter_context(group))
            simulator = Simulator(group.handshake_address, engine=engine, ranks=ranks, start_at=NEVER, **options)
            theirs.append(Ranks(stack.enter_context(simulator)))
        for group in made:
            group.wait_ready(30)
        yield made, theirs
        for group in made:
            group.close()  # before the ranks, so that it does not report their deaths


@contextmanager
def pull_socket() -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A socket as a group has it for outputs, for those who receive without a group, and its address."""
    with (
        tempfile.TemporaryDirectory(prefix="smg-bench-") as directory,
        zmq.Context() as context,
        context.socket(zmq.PULL) as pull,
    ):
        pull.setsockopt(zmq.RCVHWM, 0)
        pull.bind(f"ipc://{directory}/out")
        yield pull, f"ipc://{directory}/out"
