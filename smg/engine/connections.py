"""The connections of a listening socket, as its monitor tells of them.

A ROUTER tells from which identity a message is and over which descriptor it came. Neither names a process: an
identity is taken over by whoever connects with it next, and a descriptor is used again as soon as it is closed.
"""

from __future__ import annotations

import zmq
from zmq.utils.monitor import parse_monitor_message


class Connections:
    """Which connections are open, each with a number of its own; 0 stands for one that is closed."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._numbers: dict[int, int] = {}  # descriptor -> the open connection that has it
        self.accepted = 0  # connections so far; the number of the last
        self.open: set[int] = set()
        self.silent: set[int] = set()  # open, and nothing that they may have said was read yet

    def fileno(self) -> int:
        """Readable when there may be something to `read`."""
        return self._monitor.fileno()

    def read(self) -> None:
        """Take in what has happened since the last time."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            descriptor = int(event["value"])
            closed = self._numbers.pop(descriptor, 0)
            self.open.discard(closed)
            self.silent.discard(closed)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self.accepted += 1
                self._numbers[descriptor] = self.accepted
                self.open.add(self.accepted)
                self.silent.add(self.accepted)

    def hear(self, descriptor: int) -> int:
        """The connection with this descriptor, over which a message came.

        It may be a later one, if the sender's was closed before the message was read.
        """
        self.read()
        number = self._numbers.get(descriptor, 0)
        self.silent.discard(number)
        return number
