"""Ends engines whose launcher is gone without having ended them: killed, or crashed.

This file is also a program, run as a process of its own. It reads process groups from its input, `+PID` and `-PID`
a line each, and when the input ends it ends those that are left. It imports nothing of the package, so that it is
small and up at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LOOK = 0.02  # seconds between two looks at what is left of a group


def group_members(group: int) -> list[int]:
    """Processes of a process group that run; zombies do not. Empty where there is no /proc."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state parent group ...; a name may hold anything
            state, _, its_group = path.read_bytes().rpartition(b")")[2].split()[:3]
        except (OSError, ValueError):
            continue  # it ended meanwhile
        if int(its_group) == group and state not in (b"Z", b"X"):
            members.append(int(path.parent.name))
    return members


class Guard:
    """The guard of this process's engines. `grace`: seconds between SIGTERM and SIGKILL."""

    def __init__(self, grace: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(grace)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher, which ends its engines itself
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def add(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Once nothing of the group is left."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError:
            pass  # somebody ended the guard; the engines serve on without one

    def close(self) -> None:
        """End the guard, and with it whatever was not removed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass
        self._process.wait()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its input
    groups: set[int] = set()
    for line in sys.stdin:
        if line.startswith("+"):
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    deadline = time.monotonic() + float(sys.argv[1])
    _signal(groups, signal.SIGTERM)
    while time.monotonic() < deadline and any(map(group_members, groups)):
        time.sleep(LOOK)
    _signal(groups, signal.SIGKILL)


def _signal(groups: set[int], number: int) -> None:
    for group in groups:
        if group_members(group):
            try:
                os.killpg(group, number)
            except (ProcessLookupError, PermissionError):
                pass  # it ended meanwhile


if __name__ == "__main__":
    main()
