"""What goes wrong, once a second: ranks that die, stop and lie, and strangers that dial."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable

import zmq

import smg
from smg.mock import SimulatorProcess, spawn
from smg.mock.settings import Settings
from tests.drills.fleet import Nursery

KILLED = (0, 1)  # ranks with a process each, which the operating system kills and stops
STEERED = (2, 3)  # ranks of one process that does as it is told
PATIENCE = 20.0  # seconds for ranks to come back


class Faults:
    """Ranks for a group of four, and one fault at a time."""

    def __init__(self, group: smg.EngineGroup, port: int, seed: int, **options: object) -> None:
        self.group, self.port = group, port
        self.rng = random.Random(seed)
        self.done: Counter[str] = Counter()
        self._options = {"worker_url": group.url, "handshake_address": group.handshake_address, **options}
        self._nursery = Nursery()
        self._pids = {rank: self._start(rank) for rank in KILLED}
        self._repairs: list[Callable[[], object]] = []  # of the last fault
        self._steered: SimulatorProcess = spawn(
            ranks=len(STEERED), start_index=STEERED[0], record=False, data_parallel_size=4, **self._options
        )
        self._context = zmq.Context()
        self._context.socket(zmq.DEALER).close()  # its threads begin with the first socket

    def _start(self, rank: int) -> int:
        return self._nursery.start(Settings(start_index=rank, data_parallel_size=4, **self._options))

    def next(self) -> str:
        """Mend what the last call broke, and break something else. Returns what."""
        self.repair()
        kinds: list[Callable[[], object]] = [
            self.kill, self.replace, self.stop, self.restart, self.sentinel, self.bad_frame, self.bad_frames,
            self.foreign_row, self.wrong_index, self.lost_request, self.hang, self.late_step, self.stranger,
            self.impostor, self.connections,
        ]  # fmt: skip
        kind = self.rng.choice(kinds)
        kind()
        self.done[kind.__name__] += 1
        return kind.__name__

    def repair(self) -> None:
        """Raises TimeoutError when a rank does not come back."""
        while self._repairs:
            self._repairs.pop()()
        until = time.monotonic() + PATIENCE
        while self.group.live < len(KILLED) + len(STEERED):
            if time.monotonic() > until:
                raise TimeoutError(f"not all ranks came back: {self.group.ranks}")
            time.sleep(0.005)

    def close(self) -> None:
        self._steered.close()
        for pid in self._pids.values():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it was to be killed, and nothing has replaced it yet
        self._nursery.close()
        self._context.destroy(0)

    # -- processes

    def kill(self) -> None:
        """SIGKILL; a new process dials when the next fault comes."""
        rank = self.rng.choice(KILLED)
        os.kill(self._pids[rank], signal.SIGKILL)
        self._repairs.append(lambda: self._pids.update({rank: self._start(rank)}))

    def replace(self) -> None:
        """SIGKILL while its successor dials."""
        rank = self.rng.choice(KILLED)
        old, self._pids[rank] = self._pids[rank], self._start(rank)
        os.kill(old, signal.SIGKILL)

    def stop(self) -> None:
        """SIGSTOP until the next fault."""
        pid = self._pids[self.rng.choice(KILLED)]
        os.kill(pid, signal.SIGSTOP)
        self._repairs.append(lambda: os.kill(pid, signal.SIGCONT))

    # -- ranks that misbehave

    def restart(self) -> None:
        self._steered.restart(self.rng.choice(STEERED))

    def sentinel(self) -> None:
        self._broken(lambda rank: self._steered.sentinel(rank))

    def bad_frame(self) -> None:
        self._steered.malformed(self.rng.choice(STEERED), self.rng.choice(("garbage", "truncated", "tag", "short")))

    def bad_frames(self) -> None:
        self._broken(lambda rank: self._steered.malformed(rank, "garbage", 3))

    def _broken(self, act: Callable[[int], None]) -> None:
        """Something that the router gives the rank up for: it dials again when the next fault comes."""
        rank = self.rng.choice(STEERED)
        self._repairs.append(lambda: self._steered.restart(rank))
        act(rank)

    def foreign_row(self) -> None:
        rid = self.rng.choice(("nobody", "0" * 24, "f" * 24, "x" * 2000))
        self._steered.emit(self.rng.choice(STEERED), rid, finish_reason=self.rng.choice(("", "stop")))

    def wrong_index(self) -> None:
        rank = self.rng.choice(STEERED)
        self._steered.engine_index(self.rng.choice((0, 1, 65535)), rank)
        self._repairs.append(lambda: self._steered.engine_index(None, rank))

    def lost_request(self) -> None:
        self._steered.drop_adds(3, self.rng.choice(STEERED))

    def hang(self) -> None:
        rank = self.rng.choice(STEERED)
        self._steered.stall(rank)
        self._repairs.append(lambda: self._steered.resume(rank))

    def late_step(self) -> None:
        rank = self.rng.choice(STEERED)
        self._steered.hold(rank)
        self._repairs.append(lambda: self._steered.release(rank))

    # -- strangers

    def stranger(self) -> None:
        """Garbage on the handshake port."""
        self._dial(b"xyz", [self.rng.randbytes(self.rng.randrange(200))])

    def impostor(self) -> None:
        """A second dialer with a live rank's identity, that says nothing useful and goes."""
        self._dial(bytes([self.rng.choice(STEERED), 0]), [b"\x81\xa6status\xa5MAYBE"])

    def _dial(self, identity: bytes, frames: list[bytes]) -> None:
        dealer = self._context.socket(zmq.DEALER)
        dealer.identity = identity
        dealer.connect(self.group.handshake_address)
        dealer.send_multipart(frames)
        self._repairs.append(lambda: dealer.close(0))

    def connections(self) -> None:
        """Fifty HTTP connections that come and go."""
        for _ in range(50):
            socket.create_connection(("127.0.0.1", self.port)).close()
