"""Simulated ranks as processes of their own, quick to start: each is a fork of one that has imported everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import smg
from smg.mock.replies import make_replies
from smg.mock.settings import Settings

# Reads the arguments of one simulator per line, tab-separated, and answers with its process id. A simulator ends
# with this process.
NURSERY = """
import ctypes, os, signal, sys
from smg.mock.command import main
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        os._exit(main(line.rstrip("\\n").split("\\t")))
    print(pid, flush=True)
"""


class Nursery:
    """Starts simulators."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, settings: Settings) -> int:
        """A new simulator's process id. It dials as soon as it can."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\t".join(settings.to_argv()) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(10)


class Fleet:
    """The ranks of a group, one process each. `options` are the simulators'."""

    def __init__(self, nursery: Nursery, group: smg.EngineGroup, **options: Any) -> None:
        self.group = group
        self._nursery = nursery
        self._size = len(group.ranks)
        self._options = {"step_ms": 5.0, "no_sentinel": True, **options}
        self._pids: dict[int, int] = {}
        for rank in range(self._size):
            self.start(rank)
        self._replies = make_replies(self._settings(0))

    def _settings(self, rank: int) -> Settings:
        return Settings(
            worker_url=self.group.url,
            handshake_address=self.group.handshake_address,
            start_index=rank,
            data_parallel_size=self._size,
            **self._options,
        )

    def start(self, rank: int) -> None:
        """A new process for a rank, whatever became of its last one."""
        self._pids[rank] = self._nursery.start(self._settings(rank))

    def pid(self, rank: int) -> int:
        return self._pids[rank]

    def signal(self, rank: int, number: int) -> None:
        os.kill(self._pids[rank], number)

    def kill(self, rank: int) -> None:
        os.kill(self._pids.pop(rank), signal.SIGKILL)

    def replace(self, rank: int, pause: float) -> None:
        """SIGKILL a rank's process `pause` seconds after its successor was started, or that long before it."""
        old = self._pids.pop(rank)
        if pause < 0:
            os.kill(old, signal.SIGKILL)
            time.sleep(-pause)
            self.start(rank)
        else:
            self.start(rank)
            time.sleep(pause)
            os.kill(old, signal.SIGKILL)

    def reply(self, seed: int, count: int) -> list[int]:
        """The first token ids of the reply to a request with that seed."""
        return self._replies.window(self._replies.start(seed), 0, count)

    def close(self) -> None:
        for pid in self._pids.values():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended by itself
        self._pids.clear()


def wait_until(condition: Callable[[], bool], timeout: float = 10.0) -> float:
    """Wait for what is told by no event. Returns how long it took, in seconds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + timeout, "it did not come"
        time.sleep(0.0005)
    return time.monotonic() - began


def wait_life(group: smg.EngineGroup, rank: int, incarnation: int, timeout: float = 10.0) -> float:
    """Until this incarnation of the rank takes work."""
    return wait_until(
        lambda: (group.ranks[rank].incarnation, group.ranks[rank].state) == (incarnation, "live"), timeout
    )
