"""Workers kept up: all started together, each started again when it ends, and all ended to the last process."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smg.engine.group import EngineGroup
from smg.serve.console import Console, EngineLogs, Progress, RankProgress
from smg.serve.errors import ServeError
from smg.serve.guard import Guard
from smg.serve.plan import WorkerPlan
from smg.serve.process import EngineProcess
from smg.serve.restarts import Restarts

LOOK = 0.1  # seconds between two looks at ranks that start
WATCH = 1.0  # seconds between two looks at ranks that serve
DEAF = 30.0  # seconds without a rank after which a process is as good as dead


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How long a worker may take to start (seconds), and how often it may start again."""

    startup_timeout: float
    restart: bool
    restart_limit: int
    restart_window: float
    end_grace: float


class Worker:
    """One worker of the plan: the group that its ranks dial into, and its process of the moment."""

    def __init__(self, plan: WorkerPlan, group: EngineGroup, policy: Policy, logs: EngineLogs, guard: Guard) -> None:
        self.plan = plan
        self.group = group
        self.process: EngineProcess | None = None
        self.ready = False  # whether enough ranks of this process have taken work
        self.restarts = Restarts(policy.restart_limit, policy.restart_window)
        self._sink = logs.sink(plan)
        self._guard = guard

    def spawn(self) -> EngineProcess:
        """Raises ServeError when the command cannot be run."""
        plan = self.plan
        self.ready = False
        self.progress = Progress(plan.index, time.monotonic(), self.group.ranks)
        try:
            self.process = EngineProcess(plan.command, plan.environment, plan.directory, self._sink, self._guard)
        except OSError as error:
            raise ServeError(f"{plan.name}: cannot run {plan.command[0]}: {error.strerror}") from None
        return self.process

    def look(self) -> list[RankProgress]:
        """Where its ranks stand."""
        found = self.progress.look(self.group.ranks, time.monotonic())
        self.ready = self.ready or sum(rank.state == "ready" for rank in found) >= self.group.min_ready
        return found

    @property
    def serving(self) -> bool:
        """Whether any rank of it lives, or is on its way."""
        return any(info.state not in ("dead", "absent") for info in self.group.ranks)


class Supervisor:
    """Runs the workers of a plan beside the groups that they dial, which are open already.

    `start`, then `watch` until it returns, and `stop` in any case.
    """

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        groups: Sequence[EngineGroup],
        policy: Policy,
        console: Console,
        logs: EngineLogs,
        guard: Guard,
    ) -> None:
        self._policy = policy
        self._console = console
        self._workers = [Worker(plan, group, policy, logs, guard) for plan, group in zip(plans, groups, strict=True)]

    async def start(self) -> None:
        """Start all workers; returns when of each as many ranks take work as its group needs.

        Raises ServeError as soon as one ends, or when the time is over.
        """
        for worker in self._workers:
            process = worker.spawn()
            self._console.say(
                f"{worker.plan.name}: pid {process.pid}, {worker.plan.rank_names} to dial {worker.plan.handshake}"
            )
        deadline = time.monotonic() + self._policy.startup_timeout
        endings: dict[asyncio.Future[int], Worker] = {
            asyncio.ensure_future(_running(worker).wait()): worker for worker in self._workers
        }
        try:
            while True:
                ranks = [rank for worker in self._workers for rank in worker.look()]
                self._console.show(ranks)
                ended = [worker for ending, worker in endings.items() if ending.done()]
                if ended:
                    raise ServeError(await self._obituary(ended[0], "during start-up"))
                if all(worker.ready for worker in self._workers):
                    return
                if time.monotonic() > deadline:
                    raise ServeError(self._overdue(ranks))
                await asyncio.wait(list(endings), timeout=LOOK, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for ending in endings:
                ending.cancel()
            self._console.settle()

    async def watch(self) -> None:
        """Keep every worker up; returns when none is left that runs or will run again."""
        await asyncio.gather(*(self._keep(worker) for worker in self._workers))

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """End every process group: SIGTERM, the grace, SIGKILL. `hurry` cuts the grace short."""
        processes = [worker.process for worker in self._workers if worker.process is not None]
        ending = asyncio.gather(*(process.end(self._policy.end_grace) for process in processes))
        if hurry is not None:
            hurried = asyncio.ensure_future(hurry.wait())
            waits: list[asyncio.Future[Any]] = [ending, hurried]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            if not ending.done():
                for process in processes:
                    process.kill()
        await ending

    # ---------------------------------------------------------- one worker

    async def _keep(self, worker: Worker) -> None:
        name = worker.plan.name
        while True:
            why = await self._end_of(worker)
            message = await self._obituary(worker, why)
            self._console.say(message)
            if not self._policy.restart:
                self._console.say(f"{name}: not started again (--worker-restart never)")
                return
            delay = worker.restarts.after_end(time.monotonic())
            if delay is None:
                self._console.say(
                    f"{name}: given up; it ended more than {self._policy.restart_limit} times within "
                    f"{self._policy.restart_window:g} s"
                )
                return
            await asyncio.sleep(delay)
            try:
                process = worker.spawn()
            except ServeError as error:
                self._console.say(f"{error}; not started again")
                return
            self._console.say(f"{name}: started again after {delay:g} s, pid {process.pid}")

    async def _end_of(self, worker: Worker) -> str:
        """Wait for the end of a worker's process, or for when it has to be ended; returns in which words."""
        process = _running(worker)
        ending = asyncio.ensure_future(process.wait())
        heard = time.monotonic()
        try:
            while True:
                await asyncio.wait([ending], timeout=WATCH if worker.ready else LOOK)
                if ending.done():
                    return "" if worker.ready else "before its ranks were ready"
                now = time.monotonic()
                was_ready, ranks = worker.ready, worker.look()
                if not worker.ready:
                    if ranks[0].elapsed > self._policy.startup_timeout:
                        return f"since it was not ready after {self._policy.startup_timeout:g} s"
                elif not was_ready:
                    self._console.say(f"{worker.plan.name}: {worker.plan.rank_names} ready again")
                    heard = now
                elif worker.serving:
                    heard = now
                elif now - heard > DEAF:
                    return f"since none of its ranks lives for {DEAF:g} s"
        finally:
            ending.cancel()

    async def _obituary(self, worker: Worker, why: str) -> str:
        """End what is left of the process, and say how it ended, with its last words."""
        process = _running(worker)
        elapsed = worker.look()[0].elapsed
        code = await process.end(0)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        plan = worker.plan
        text = f"{plan.name} ({plan.url}, {plan.rank_names}, pid {process.pid}) {how}"
        text += f" {why}, {elapsed:.1f} s after its start" if why else f", {elapsed:.0f} s after its start"
        if process.last_errors:
            lines = "\n".join(f"  {line}" for line in process.last_errors)
            return f"{text}; its last {len(process.last_errors)} lines on stderr:\n{lines}"
        return f"{text}; it printed nothing on stderr" + (
            f", and last on stdout: {process.last_line}" if process.last_line else ""
        )

    def _overdue(self, ranks: Sequence[RankProgress]) -> str:
        late = [rank for rank in ranks if rank.state != "ready"]
        lines = [f"  {rank}" for rank in late]
        for number in sorted({rank.worker for rank in late}):
            process = _running(self._workers[number])
            lines.append(f"  worker {number} last printed: {process.last_line or 'nothing'}")
        return (
            f"{len(late)} of {len(ranks)} ranks were not ready after {self._policy.startup_timeout:g} s "
            "(--worker-startup-timeout):\n" + "\n".join(lines)
        )


def _running(worker: Worker) -> EngineProcess:
    assert worker.process is not None
    return worker.process
