"""The connections of a listening socket, as its monitor tells of them.

A ROUTER tells from which identity a message is and over which descriptor it came. Neither names a process: an
identity is taken over by whoever connects with it next, and a descriptor is used again as soon as it is closed.
"""

from __future__ import annotations

import contextlib
import os
import socket as sockets

import zmq
from zmq.utils.monitor import parse_monitor_message

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Connections:
    """Which connections are open, each with a number of its own; 0 stands for one that is closed."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._numbers: dict[int, int] = {}  # descriptor -> the open connection that has it
        self._last = 0
        self.greeted = 0  # connections so far whose peers have said who they are
        self.open: set[int] = set()
        self.silent: set[int] = set()  # open, and nothing that they may have said was read yet

    def fileno(self) -> int:
        """Readable when there may be something to `read`."""
        return self._monitor.fileno()

    def read(self) -> None:
        """Take in what has happened since the last time."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:  # which does not say of whom
                self.greeted += 1
                continue
            descriptor = int(event["value"])
            closed = self._numbers.pop(descriptor, 0)
            self.open.discard(closed)
            self.silent.discard(closed)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._last += 1
                self._numbers[descriptor] = self._last
                self.open.add(self._last)
                self.silent.add(self._last)

    def hear(self, descriptor: int) -> int:
        """The connection with this descriptor, over which a message came.

        It may be a later one, if the sender's was closed before the message was read.
        """
        self.read()
        number = self._numbers.get(descriptor, 0)
        self.silent.discard(number)
        return number

    def hang_up(self, number: int) -> None:
        """Close a connection, so that its peer, if it is there, dials again."""
        descriptor = next((known for known, its in self._numbers.items() if its == number), None)
        if descriptor is None:
            return
        with contextlib.suppress(OSError):  # it is closed by now
            own = os.dup(descriptor)
            # A close is told before it is done: where none was told by now, the descriptor was still this connection's.
            self.read()
            if number not in self.open:
                os.close(own)
                return
            with sockets.socket(fileno=own) as connection:
                connection.shutdown(sockets.SHUT_RDWR)
