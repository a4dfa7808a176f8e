"""The test's side of `tokenspeed_rank`: starts ranks, tells them what to do, hears what they received."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import smg

SCRIPT = Path(__file__).with_name("tokenspeed_rank.py")
PATIENCE = 60.0  # seconds for any one answer


class Launcher:
    """The process that has the engine imported and forks ranks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started = 0
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{SCRIPT.name} ended with {self.process.wait()}; its error output says why")

    def start(self) -> Rank:
        """A new rank in a process of its own, which has not dialed yet."""
        self.started += 1
        path = self.directory / f"control-{self.started}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(PATIENCE)
            listener.bind(str(path))
            listener.listen()
            assert self.process.stdin is not None
            print(path, file=self.process.stdin, flush=True)
            return Rank(listener.accept()[0])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Rank:
    """One engine rank."""

    def __init__(self, control: socket.socket) -> None:
        control.settimeout(PATIENCE)
        self.control = control
        self.lines = control.makefile("r")
        self.pid: int = self.next("started")["pid"]

    def next(self, kind: str) -> dict[str, Any]:
        """What the rank tells next, which has to be of that kind: nothing else may have come before it."""
        line = self.lines.readline()
        assert line, "the rank's process is gone; its error output says why"
        told: dict[str, Any] = json.loads(line)
        assert told["kind"] == kind, told
        return told

    def tell(self, command: str, **arguments: Any) -> None:
        self.control.sendall(json.dumps({"do": command, **arguments}).encode() + b"\n")

    def dial(self, group: smg.EngineGroup, index: int, *, max_model_len: int = 4096) -> None:
        """Begin to dial in as the rank with that index. The rank tells "dialed" once the router has answered."""
        host, _, port = group.handshake_address.removeprefix("tcp://").rpartition(":")
        self.tell("dial", host=host, port=int(port), index=index, max_model_len=max_model_len)

    def send(self, *rows: dict[str, Any], load: tuple[int, int, int, int] | None = None) -> None:
        """One step's outputs: `rid`, `tokens`, `completion` and what else `tokenspeed_rank.batch` reads.

        `load`: running, waiting, active and total pages, which this and later steps report.
        """
        self.tell("send", rows=rows, load=load)
        self.next("sent")

    def leave(self, how: str) -> None:
        """`stop`: with the sentinel. `hang_up`: without."""
        self.tell(how)
        self.next("left")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def decode(self, *frames: bytes) -> dict[str, Any] | None:
        """What the engine makes of a message, None when it drops it."""
        self.tell("decode", frames=[frame.hex() for frame in frames])
        told: dict[str, Any] = json.loads(self.lines.readline())
        assert told["kind"] in ("request", "dropped")
        return told if told["kind"] == "request" else None

    def close(self) -> None:
        self.lines.close()
        self.control.close()
