"""A frontend of bare pyzmq sockets, for tests of the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import zmq

from smg.mock import Simulator, SimulatorProcess
from smg.protocol import handshake

TIMEOUT_MS = 10_000


class Sockets:
    """The router's three kinds of sockets for one group, without a router: everything is done by hand."""

    def __init__(self, directory: Path, ranks: int = 1, output_hwm: int = 0) -> None:
        self._context = zmq.Context()
        self.handshake = self._context.socket(zmq.ROUTER)
        self.handshake.router_handover = True
        self.address = f"tcp://127.0.0.1:{self.handshake.bind_to_random_port('tcp://127.0.0.1')}"
        self._directory = directory
        self._output_hwm = output_hwm
        self.inputs: dict[int, zmq.Socket[bytes]] = {}
        self.outputs: dict[int, zmq.Socket[bytes]] = {}
        for rank in range(ranks):
            self.open(rank)

    def open(self, rank: int, incarnation: int = 1) -> None:
        """New data sockets for a rank's incarnation."""
        for sockets in (self.inputs, self.outputs):
            if rank in sockets:
                sockets[rank].close(0)
        self.inputs[rank] = self._context.socket(zmq.ROUTER)
        self.inputs[rank].router_mandatory = True
        self.outputs[rank] = self._context.socket(zmq.PULL)
        self.outputs[rank].rcvhwm = self._output_hwm
        for sockets, name in ((self.inputs, "in"), (self.outputs, "out")):
            sockets[rank].bind(f"ipc://{self._directory}/{name}-{rank}-{incarnation}")

    def receive(self, socket: zmq.Socket[bytes]) -> list[bytes]:
        assert socket.poll(TIMEOUT_MS), "nothing came"
        return socket.recv_multipart()

    def expect_status(self, status: str, rank: int) -> None:
        identity, payload = self.receive(self.handshake)
        assert identity == rank.to_bytes(2, "little")
        assert msgpack.unpackb(payload)["status"] == status

    def send_init(self, rank: int) -> None:
        ends = [s.getsockopt_string(zmq.LAST_ENDPOINT) for s in (self.inputs[rank], self.outputs[rank])]
        identity = rank.to_bytes(2, "little")
        self.handshake.send_multipart([identity, handshake.encode_init(ends[:1], ends[1:])])

    def registration(self, rank: int) -> dict[str, Any]:
        identity, payload = self.receive(self.inputs[rank])
        assert identity == rank.to_bytes(2, "little")
        registered: dict[str, Any] = msgpack.unpackb(payload)
        return registered

    def admit(self, rank: int) -> dict[str, Any]:
        """The whole handshake with a rank that comes alone."""
        self.expect_status("HELLO", rank)
        self.send_init(rank)
        self.expect_status("READY", rank)
        return self.registration(rank)

    def admit_all(self, mock: Simulator | SimulatorProcess) -> None:
        """Take in all ranks, whose messages interleave as they like."""
        said = []
        while len(said) < 2 * len(mock.indexes):
            identity, payload = self.receive(self.handshake)
            rank = int.from_bytes(identity, "little")
            said.append((msgpack.unpackb(payload)["status"], rank))
            if said[-1][0] == "HELLO":
                self.send_init(rank)
        assert sorted(said) == [(status, rank) for status in ("HELLO", "READY") for rank in mock.indexes]
        for rank in mock.indexes:
            self.registration(rank)
        mock.wait_live()

    def abort(self, *rids: str, rank: int = 0) -> None:
        self.send(rank, b"\x01", msgpack.packb(list(rids)))

    def send(self, rank: int, *frames: bytes) -> None:
        self.inputs[rank].send_multipart([rank.to_bytes(2, "little"), *frames])

    def raw_output(self, rank: int = 0) -> list[bytes]:
        return self.receive(self.outputs[rank])

    def silent(self, rank: int = 0) -> bool:
        """Whether no output waits right now (after an event that says the simulator is past the point)."""
        return not self.outputs[rank].poll(0)

    def close(self) -> None:
        self._context.destroy(0)
