"""A simulator as a process of its own, for tests and tools that kill, stop or measure it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

from smg.mock.control import TRIGGERS, Controls, EventLog, SimulatorEnded
from smg.mock.settings import Settings

CALL_TIMEOUT = 30.0  # seconds
CLOSE_TIMEOUT = 5.0  # seconds between asking a process to end and killing it


def spawn(worker_url: str, *, record: bool = True, **options: Any) -> SimulatorProcess:
    """Start `python -m smg mock` on a worker URL, and return once every rank has dialed.

        with smg.mock.spawn("ipc:///run/user/1000/smg/engine-31000", ranks=2, step_ms=0) as mock:
            mock.wait_live()
            mock.kill()

    Options are the fields of `smg.mock.Settings`; ranks that are to be killed one by one are spawned one by
    one with `start_index=I`. The process ends with the handle, and with the process that holds the handle.
    Raises ValueError for options that make no sense, SimulatorEnded when the process does not come up.
    """
    settings = Settings(worker_url=worker_url, record=record, control=True, **options)
    process = SimulatorProcess(settings)
    try:
        process.wait_for("ready", timeout=CALL_TIMEOUT)
    except BaseException:
        process.close()
        raise
    return process


class SimulatorProcess(Controls):
    """A running simulator process. Everything in `Controls`, and what one does to processes."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.events = EventLog()
        self._calls: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        package_parent = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "smg.mock", *settings.to_argv()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin: IO[bytes] = self._process.stdin
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), name="smg-mock-events", daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for the signal that killed it, None while it runs."""
        return self._process.poll()

    def call(self, op: str, rank: int | None = None, **args: Any) -> Any:
        result: Future[Any] = Future()
        with self._lock:
            call = next(self._ids)
            self._calls[call] = result
            line = json.dumps({"id": call, "op": op, "rank": rank, **args}).encode() + b"\n"
            try:
                self._stdin.write(line)
                self._stdin.flush()
            except (BrokenPipeError, ValueError):  # ValueError: closed by `close`
                self._calls.pop(call)
                raise SimulatorEnded(f"the simulator (pid {self.pid}) has ended") from None
        if op == "exit" and not args.keys() & set(TRIGGERS):  # there is no answer to come
            self.wait(CALL_TIMEOUT)
            return None
        return result.result(CALL_TIMEOUT)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self._process.kill()
        self.wait()

    def terminate(self) -> None:
        """SIGTERM: the process ends as an engine does, with a sentinel per live rank. Waits for it."""
        self._process.terminate()
        self.wait()

    def suspend(self) -> None:
        """SIGSTOP: every thread of the process stands still, sockets stay open."""
        self._process.send_signal(signal.SIGSTOP)

    def unsuspend(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def wait(self, timeout: float = CLOSE_TIMEOUT) -> int:
        """Its exit status once it has ended. Raises subprocess.TimeoutExpired."""
        status = self._process.wait(timeout)
        self._reader.join(timeout)
        return status

    def close(self) -> None:
        """End the process, by SIGKILL if it does not end by SIGTERM. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(CLOSE_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self.wait()
        with self._lock:
            try:
                self._stdin.close()
            except BrokenPipeError:
                pass  # what could not be flushed has nobody to read it

    def __enter__(self) -> SimulatorProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self, stdout: IO[bytes]) -> None:
        """Sort the process's lines into answers and events, until it ends."""
        with stdout:
            for line in stdout:
                message = json.loads(line)
                if "event" in message:
                    self.events.append(message)
                    continue
                result = self._calls.pop(message["id"])
                if "error" in message:
                    result.set_exception(ValueError(message["error"]))
                else:
                    result.set_result(message["result"])
        why = f"the simulator (pid {self.pid}) ended with status {self._process.wait()}"
        with self._lock:
            for result in self._calls.values():
                result.set_exception(SimulatorEnded(why))
            self._calls.clear()
        self.events.end(why)
