"""A `serve` of its own process group: what it printed, what it started, and what is left of it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import smg
from smg.protocol import addresses
from smg.serve import ports

ROOT = Path(smg.__file__).parents[1]
MODEL = ROOT / "smg" / "data" / "demo-model"
TIMEOUT = 30.0  # seconds for anything that a test waits for


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="smg-", dir=os.environ.get("XDG_RUNTIME_DIR")))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def free_base(directory: Path, workers: int = 4) -> int:
    """A worker base port from which that many workers get handshake ports that are free and differ."""
    for base in range(31000, 40000, 20):
        handshakes = {
            addresses.handshake_port(addresses.worker_path(ports.worker_url(base + index, str(directory))))
            for index in range(workers)
        }
        if len(handshakes) == workers and all(map(ports.is_free, handshakes)):
            return base
    raise AssertionError("no free handshake ports")


class ServeProcess:
    """Runs `python -m smg serve`, by default with --backend mock and ports that the system gives.

    Everything it prints is in `lines`, each as it came, from both streams.
    """

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        backend: str = "mock",
        model: str | Path = MODEL,
        env: dict[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.lines: list[str] = []
        self._more = threading.Condition()
        self._open = 2
        self.url = ""
        own = ["--backend", backend, "--worker-base-port", str(free_base(directory)), "--log-level", "warn"]
        own += ["--model", str(model), "--port", "0", "--prometheus-port", "0", "--served-model-name", "demo"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "smg", "serve", *own, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "SMG_ZMQ_SOCKET_DIR": str(directory), **(env or {})},
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream) -> None:
        for line in stream:
            with self._more:
                self.lines.append(line.rstrip("\n"))
                self._more.notify_all()
        with self._more:
            self._open -= 1
            self._more.notify_all()

    def wait_line(self, pattern: str, timeout: float = TIMEOUT, *, after: int = 0) -> re.Match[str]:
        """The first line, from the `after`th on, in which the pattern is found."""
        seen = after
        deadline = time.monotonic() + timeout
        with self._more:
            while True:
                for line in self.lines[seen:]:
                    if found := re.search(pattern, line):
                        return found
                seen = len(self.lines)
                left = deadline - time.monotonic()
                assert self._open, f"it ended without {pattern!r}:\n" + "\n".join(self.lines)
                assert left > 0, f"no {pattern!r} in:\n" + "\n".join(self.lines)
                self._more.wait(left)

    def said(self, pattern: str) -> str:
        """The line, of one that has ended, in which the pattern is found."""
        found = [line for line in self.lines if re.search(pattern, line)]
        assert found, f"no {pattern!r} in:\n" + "\n".join(self.lines)
        return found[0]

    def wait_ready(self, timeout: float = TIMEOUT) -> str:
        """The URL it answers on, once all ranks take work."""
        self.url = self.wait_line(r"ready; answering on (\S+),", timeout)[1]
        return self.url

    def worker_pid(self, worker: int, *, after: int = 0) -> int:
        return int(self.wait_line(rf"worker {worker}: .*pid (\d+)", after=after)[1])

    def finish(self, timeout: float = TIMEOUT) -> int:
        """Its exit status, once it has ended and all was read."""
        status = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
        return status

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.finish()

    def close(self) -> None:
        """End it and, should it not have done so itself, its engines."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait(TIMEOUT)
        for pid in self.left_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for stream in (self.process.stdout, self.process.stderr):
            stream.close()

    # what is left

    def left_processes(self) -> list[int]:
        """Processes whose command line names the sockets' directory: its engines, and itself."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"ipc://{self.directory}".encode() in (path / "cmdline").read_bytes():
                    found.append(int(path.name))
        return found

    def left_files(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())
