"""What a process cost, as the operating system accounts for it, and how a table of it looks."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

_CPUCLOCK_SCHED = 2  # <linux/posix-timers.h>: the clock that counts what the scheduler gave a process


def process_cpu(pid: int) -> float:
    """CPU seconds that a process has used: user and system, all its threads, those that ended too."""
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


def tree_cpu(pid: int) -> float:
    """`process_cpu` of a process and its children."""
    return sum(process_cpu(each) for each in tree(pid))


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for parent in found:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as children:
                    found += map(int, children.read().split())
        except OSError:
            pass  # it ended meanwhile
    return found


def rss_mb(pid: int) -> float:
    """Resident memory of a process and its children, in MB of 10**6 bytes."""
    total = 0
    for each in tree(pid):
        with open(f"/proc/{each}/statm") as statm:
            total += int(statm.read().split()[1])
    return total * os.sysconf("SC_PAGE_SIZE") / 1e6


def keep_aside(pid: int) -> None:
    """Confine a running process to the last CPU, if there are several.

    Clients and engines stand for other machines. Where CPUs are few, a scheduler wakes them on the one that has just
    sent them something, and what a gateway's tokens wait for is that.
    """
    cpus = os.sched_getaffinity(0)
    if len(cpus) > 1:
        for task in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(task), {max(cpus)})


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie; nan for none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def machine_facts() -> dict[str, Any]:
    """What this ran on, and how busy that was with other things before."""
    with open("/proc/cpuinfo") as info:
        models = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return {
        "CPU": models[0] if models else platform.machine(),
        "CPUs": len(os.sched_getaffinity(0)),
        "memory GiB": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load before": round(os.getloadavg()[0], 2),
    }


def version_facts(*names: str) -> dict[str, str]:
    """Python's version and those of some distributions."""
    found = {platform.python_implementation(): platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found


def line(facts: Mapping[str, Any]) -> str:
    """Such facts as one line."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def machine() -> str:
    """One line on where this ran, including how busy it was with other things."""
    return line(machine_facts())


def versions(*names: str) -> str:
    """Python's version and those of some distributions."""
    return line(version_facts(*names))
