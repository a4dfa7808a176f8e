"""One engine process with all of its descendants: started in a group of its own, heard, and ended to the last one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from smg.serve.guard import LOOK, Guard, group_members

LINE_BYTES = 1 << 16  # a longer one comes in pieces
TAIL = 20
KILLED = 10.0  # seconds for the kernel to end what was killed


class EngineProcess:
    """Starts the command at once. `on_line(line)` is called for each line it prints, from threads. `guard` ends it
    should this process not live to do so.

    The process leads a group and a session, so that Ctrl-C in the terminal does not reach it. It stays a zombie
    until `end`, so that the group's id cannot come to mean something else while signals go to it. Raises OSError
    when it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        on_line: Callable[[str], None],
        guard: Guard,
    ) -> None:
        self.last_errors: deque[str] = deque(maxlen=TAIL)
        self.last_line = ""
        self._popen = subprocess.Popen(
            command,
            env=environment,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        guard.add(self._popen.pid)
        self._guard = guard
        self._on_line = on_line
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ended = False
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._readers = [
            self._thread("stdout", self._read, self._popen.stdout, False),
            self._thread("stderr", self._read, self._popen.stderr, True),
        ]
        self._thread("exit", self._await_exit, asyncio.get_running_loop())

    @property
    def pid(self) -> int:
        """Of the process and of its group."""
        return self._popen.pid

    async def wait(self) -> int:
        """Its exit code once it has ended, negative for the signal that killed it; descendants may still live."""
        return await asyncio.shield(self._exit)

    async def end(self, grace: float) -> int:
        """SIGTERM to the group, SIGKILL after `grace` seconds to what is left of it; returns when nothing is.

        Idempotent. Returns the exit code.
        """
        if self._ended:
            return self._popen.wait()
        if grace > 0:
            self._signal(signal.SIGTERM)
            await self._gone(grace)
        self._signal(signal.SIGKILL)
        await self._gone(KILLED)
        self._ended = True
        self._guard.remove(self.pid)
        code = self._popen.wait()
        for reader in self._readers:  # what it said last is read before anybody reports on it
            await asyncio.get_running_loop().run_in_executor(None, reader.join, 1.0)
        return code

    def kill(self) -> None:
        """SIGKILL to the group; an `end` that waits is over soon."""
        if not self._ended:
            self._signal(signal.SIGKILL)

    async def _gone(self, timeout: float) -> None:
        """Wait until no process of the group runs, but not longer than `timeout` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        await asyncio.wait([self._exit], timeout=timeout)
        while group_members(self.pid) and loop.time() < deadline:
            await asyncio.sleep(LOOK)

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # nothing but zombies is left

    def _thread(self, name: str, target: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name=f"smg-engine-{name}", daemon=True)
        thread.start()
        return thread

    def _read(self, pipe: IO[bytes], is_error: bool) -> None:
        with pipe:
            for raw in iter(lambda: pipe.readline(LINE_BYTES), b""):
                # a progress bar draws over itself: its last state is the line
                line = raw.decode("utf-8", "replace").rstrip("\r\n").rpartition("\r")[2]
                if line.strip():
                    self.last_line = line
                if is_error:
                    self.last_errors.append(line)
                self._on_line(line)

    def _await_exit(self, loop: asyncio.AbstractEventLoop) -> None:
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        try:
            loop.call_soon_threadsafe(self._exit.set_result, code)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more
