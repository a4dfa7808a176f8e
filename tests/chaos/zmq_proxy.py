"""Between a group and simulated ranks: every message stops here, and goes on when and as a test says.

To the ranks the proxy is a router, to the router it is the ranks. It passes handshakes on by itself, with its own
data addresses in INIT, and keeps requests and outputs, each rank's in their order, until they are told on.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import zmq

import smg
from smg.protocol import handshake

PATIENCE = 10.0  # seconds for what has to come


def wait_for(condition: Callable[[], object]) -> None:
    """Poll for what has no event to wait for; fails loudly."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.0005)


class Link:
    """One incarnation of a rank: what it said and was told, and what of that is still held."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], identity: bytes, router: str, path: str) -> None:
        self.requests: deque[list[bytes]] = deque()  # from the router
        self.outputs: deque[bytes] = deque()  # from the rank
        self.requests_seen = self.outputs_seen = 0  # held or not
        self._context, self._identity, self._path = context, identity, path
        self.handshake = self._open(zmq.DEALER)
        self.handshake.connect(router)
        self._to_rank = self._open(zmq.ROUTER)
        self._to_rank.router_mandatory = True
        self._from_rank = self._open(zmq.PULL)
        self._to_rank.bind(f"{path}-in")
        self._from_rank.bind(f"{path}-out")
        self._from_router: zmq.Socket[bytes] | None = None
        self._to_router: zmq.Socket[bytes] | None = None

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        if kind == zmq.DEALER:
            socket.identity = self._identity
        return socket

    def take_init(self, payload: bytes) -> bytes:
        """Connect where the router says, and say where the rank shall connect instead."""
        init = handshake.decode_init(payload)
        self._from_router, self._to_router = self._open(zmq.DEALER), self._open(zmq.PUSH)
        self._from_router.connect(init.inputs[0])
        self._to_router.connect(init.outputs[0])
        return handshake.encode_init([f"{self._path}-in"], [f"{self._path}-out"])

    def pump(self) -> None:
        """Take in what has come from either side. A registration goes on at once."""
        while self._to_rank.poll(0):
            _, payload = self._to_rank.recv_multipart()
            if self._from_router is not None:
                self._from_router.send(payload)
        while self._from_router is not None and self._from_router.poll(0):
            self.requests.append(self._from_router.recv_multipart())
            self.requests_seen += 1
        while self._from_rank.poll(0):
            self.outputs.append(self._from_rank.recv())
            self.outputs_seen += 1

    def tell_rank(self, frames: list[bytes]) -> None:
        self._to_rank.send_multipart([self._identity, *frames])

    def tell_router(self, frame: bytes) -> None:
        assert self._to_router is not None
        self._to_router.send(frame)

    def close_output(self) -> None:
        """Towards the router: this rank says nothing any more, but still listens."""
        assert self._to_router is not None
        self._to_router.close()

    def close_input(self) -> None:
        """Towards the router: this rank hears nothing any more, but could still speak."""
        assert self._from_router is not None
        self._from_router.close()
        self._from_router = None

    def close(self) -> None:
        for socket in (self.handshake, self._to_rank, self._from_rank, self._from_router, self._to_router):
            if socket is not None:
                socket.close(0)


class Proxy:
    """Stands before the group's handshake address: the ranks dial `address`. `links` has the present incarnations."""

    def __init__(self, group: smg.EngineGroup, directory: Path) -> None:
        self.links: dict[int, Link] = {}
        self._group, self._directory = group, directory
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._numbers = itertools.count()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.router_handover = True
        self.address = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"

    def pump(self) -> None:
        """Move handshakes on and take in what has come."""
        while self._front.poll(0):
            identity, payload = self._front.recv_multipart()
            rank = int.from_bytes(identity, "little")
            if handshake.decode_status(payload).status == handshake.HELLO:
                if rank in self.links:
                    self.links[rank].close()
                path = f"ipc://{self._directory}/p{next(self._numbers)}"
                self.links[rank] = Link(self._context, identity, self._group.handshake_address, path)
            self.links[rank].handshake.send(payload)
        for rank, link in self.links.items():
            while link.handshake.poll(0):
                init = link.take_init(link.handshake.recv())
                self._front.send_multipart([handshake.identity(rank), init])
            link.pump()

    def wait_for(self, condition: Callable[[], object]) -> None:
        def pumped() -> object:
            self.pump()
            return condition()

        wait_for(pumped)

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        self._context.destroy(0)
