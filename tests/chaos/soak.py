"""Mixed load with a fault every second: python -m tests.chaos.soak [--seconds 1200] [--out FILE]

Ends with 1, and says what, when a request ended wrongly, or when memory, descriptors, threads, tasks or slots are
not at the end what they were. `--out` keeps the samples, one a second, for scripts/plot_soak.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "http"))  # its modules import each other by bare name

from scripted import MODEL
from serving import Served

from smg.mock.replies import make_replies
from smg.mock.settings import Settings
from tests.chaos.faults import Faults
from tests.chaos.load import Embedded, HttpClient, Ledger

PAGE = os.sysconf("SC_PAGE_SIZE")
GROWTH = 0.08  # of memory, from the second fifth of a run to the last
GROWTH_LEAST = 12 << 20  # bytes, which the memory of a short run may still come to


@dataclass
class Sample:
    """The router's process at one moment."""

    seconds: float  # since the load began
    memory: int  # bytes, resident
    descriptors: int
    threads: list[str]  # names
    tasks: int  # of the HTTP front's loop
    connections: int  # HTTP
    live: int  # ranks
    in_flight: int  # requests
    slots: tuple[int, int, int, int]  # allocated, free, live, ended but not taken
    ended: int  # requests, so far
    faults: int  # so far


@dataclass
class Soak:
    """What a run was and found."""

    samples: list[Sample] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    counters: dict[str, list[int]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    before: Sample | None = None
    after: Sample | None = None


class Load:
    """Clients on a loop in a thread of its own, and one that blocks in another."""

    def __init__(self, served: Served, ledger: Ledger, seed: int, embedded: int = 6, http: int = 6) -> None:
        replies = make_replies(Settings(worker_url=served.group.url, model_path=str(MODEL)))
        self._clients: list[Any] = [Embedded(served.group, replies, ledger, seed + i) for i in range(embedded)]
        self._clients += [HttpClient(served.port, ledger, seed + 100 + i) for i in range(http)]
        self._blocking = Embedded(served.group, replies, ledger, seed + 200)
        self._threads = [threading.Thread(target=self._run), threading.Thread(target=self._blocking.run_blocking)]
        self.failure: BaseException | None = None

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for client in (*self._clients, self._blocking):
            client.stopping = True
        for thread in self._threads:
            thread.join(60)

    def _run(self) -> None:
        async def main() -> None:
            await asyncio.gather(*(client.run() for client in self._clients))

        try:
            asyncio.run(main())
        except BaseException as error:
            self.failure = error


def sample(served: Served, ledger: Ledger, faults: Faults, began: float) -> Sample:
    return Sample(
        seconds=time.monotonic() - began,
        memory=int(Path("/proc/self/statm").read_text().split()[1]) * PAGE,
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=sorted(name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")),
        tasks=served.on_loop(lambda: len(asyncio.all_tasks())),
        connections=served.service._servers[0].open_connections,
        live=served.group.live,
        in_flight=served.group.requests,
        slots=served.group._core.slots,
        ended=sum(ledger.outcomes.values()),
        faults=sum(faults.done.values()),
    )


def soak(directory: Path, seconds: float, seed: int = 1, say: Callable[[str], object] = lambda text: None) -> Soak:
    """Run for about `seconds`, then let everything come to rest. `directory`: for sockets, private."""
    ledger, found = Ledger(), Soak()
    options = {"stall_timeout": 1.0, "front": {"request_timeout_secs": 3.0}}
    served = Served(directory, options, ranks=4, mock=None)
    try:
        faults = Faults(served.group, served.port, seed, step_ms=10.0, model_path=str(MODEL), no_sentinel=True)
        try:
            served.group.wait_ready(30)
            with Load(served, ledger, seed):  # what is made once and kept, such as a connection's first buffers
                time.sleep(min(5.0, seconds / 10))
            began = time.monotonic()
            found.before = rest(served, ledger, faults, began)
            began = time.monotonic()
            with Load(served, ledger, seed + 1000) as load:
                while (passed := time.monotonic() - began) < seconds and load.failure is None:
                    what = faults.next()
                    time.sleep(max(0.0, int(passed) + 1 - (time.monotonic() - began)))
                    found.samples.append(sample(served, ledger, faults, began))
                    say(f"{found.samples[-1]} {what}")
                faults.repair()
            found.after = rest(served, ledger, faults, began, found.before)
            found.counters = served.group.counters
            if load.failure is not None:
                ledger.fault(f"the load ended: {load.failure!r}")
        finally:
            faults.close()
    finally:
        served.close()
    found.outcomes, found.faults = dict(ledger.outcomes), dict(faults.done)
    found.wrong = ledger.wrong + unlike(found)
    return found


def rest(served: Served, ledger: Ledger, faults: Faults, began: float, before: Sample | None = None) -> Sample:
    """Wait until nothing runs and, where there is a measure, as much is open as before; at most 20 seconds."""
    until = time.monotonic() + 20
    while True:
        now = sample(served, ledger, faults, began)
        quiet = now.in_flight == now.connections == 0
        if before is not None:
            quiet = quiet and now.descriptors <= before.descriptors and len(now.threads) <= len(before.threads)
        if quiet or time.monotonic() > until:
            return now
        time.sleep(0.1)


def unlike(found: Soak) -> list[str]:
    """What is not as it was, in words."""
    before, after = found.before, found.after
    assert before is not None
    assert after is not None
    wrong = []
    for name in ("descriptors", "tasks", "connections", "in_flight"):
        was, now = getattr(before, name), getattr(after, name)
        if now > was:
            wrong.append(f"{name}: {was} before the load, {now} after it")
    if more := Counter(after.threads) - Counter(before.threads):
        wrong.append(f"threads: more than before the load by {dict(more)}")
    if after.live != before.live:
        wrong.append(f"live ranks: {before.live} before the load, {after.live} after it")
    _, _, live, untaken = after.slots
    if live or untaken:
        wrong.append(f"slots at rest: {live} live, {untaken} not taken")
    memory = [s.memory for s in found.samples]
    fifth = max(1, len(memory) // 5)
    early, late = statistics.median(memory[fifth : 2 * fifth] or memory), statistics.median(memory[-fifth:])
    if late - early > max(GROWTH_LEAST, GROWTH * early):
        wrong.append(f"memory: {early / 1e6:.1f} MB in the second fifth of the run, {late / 1e6:.1f} MB in the last")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Mixed load with a fault every second.")
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file for the samples, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="smg-") as directory:
        found = soak(Path(directory), args.seconds, args.seed, lambda text: print(text, flush=True))
    if args.out:
        args.out.write_text(json.dumps(asdict(found)))
    for name, numbers in (("outcomes", found.outcomes), ("faults", found.faults)):
        print(name, json.dumps(dict(sorted(numbers.items())), indent=1))
    print("before", found.before, "\nafter", found.after)
    print("\n".join(found.wrong[:20]) or "nothing is wrong")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
