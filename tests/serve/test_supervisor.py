"""Workers kept up, with stand-ins for engines and a simulator that plays their ranks."""

import asyncio
import os
import re
import signal
import sys
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

import smg
from smg.mock import Simulator
from smg.serve import restarts, supervisor
from smg.serve.console import EngineLogs
from smg.serve.errors import ServeError
from smg.serve.guard import Guard, group_members
from smg.serve.plan import WorkerPlan
from smg.serve.restarts import Restarts
from smg.serve.supervisor import Policy, Supervisor

RUN = "import time; print('up', flush=True); time.sleep(600)"


class Said:
    """A console that keeps what is said, to wait for."""

    def __init__(self):
        self.all = []
        self.shown = []
        self._more = asyncio.Event()

    def say(self, text):
        self.all.append(text)
        self._more.set()

    def engine(self, line):
        pass

    def show(self, ranks):
        self.shown.append([rank.state for rank in ranks])
        self._more.set()

    def settle(self):
        pass

    async def until(self, condition):
        while not condition():
            self._more.clear()
            try:
                await asyncio.wait_for(self._more.wait(), 20)
            except asyncio.TimeoutError:
                raise AssertionError(f"it was not among {self.all}, {self.shown[-1:]}") from None

    async def line(self, pattern, count=1):
        """The `count`th line in which the pattern is found."""

        def found():
            return [line for line in self.all if re.search(pattern, line, re.DOTALL)]

        await self.until(lambda: len(found()) >= count)
        return found()[count - 1]


class Rig:
    """Workers, each a stand-in process and a group; `play` makes a simulator dial as a worker's ranks."""

    def __init__(self, directory, scripts, ranks, min_ready, policy):
        self.console = Said()
        self.guard = Guard(0)
        self.groups = [
            smg.EngineGroup(
                f"ipc://{directory}/engine-{index}",
                backend="tokenspeed",
                ranks=ranks,
                min_ready=min_ready,
                handshake_address="tcp://127.0.0.1:0",
            )
            for index in range(len(scripts))
        ]
        self.plans = [
            WorkerPlan(
                index=index,
                url=group.url,
                ranks=ranks,
                handshake=group.handshake_address,
                ports={},
                gpus=None,
                command=[sys.executable, "-S", "-E", "-c", script],
                environment={"PATH": os.environ["PATH"]},
                directory=str(directory),
            )
            for index, (group, script) in enumerate(zip(self.groups, scripts, strict=True))
        ]
        given = {
            "startup_timeout": 20.0, "restart": True, "restart_limit": 3, "restart_window": 60.0, "end_grace": 5.0
        }  # fmt: skip
        self.supervisor = Supervisor(
            self.plans,
            self.groups,
            Policy(**{**given, **policy}),
            self.console,
            EngineLogs(None, self.console),
            self.guard,
        )
        self._simulators = []

    async def play(self, worker=0, **options):
        """Dial as the ranks of the worker, once its process is started."""
        await self.pid(worker)
        group = self.groups[worker]
        ranks = len(group.ranks)
        options = {"handshake_address": group.handshake_address, "ranks": ranks, "no_sentinel": True, **options}
        simulator = Simulator(group.url, **options).start()
        self._simulators.append(simulator)
        return simulator

    async def pid(self, worker=0, start=1):
        """Of a worker's first, second, ... process."""
        line = await self.console.line(rf"worker {worker}: .*pid \d+", start)
        return int(re.search(r"pid (\d+)", line)[1])

    async def close(self):
        await self.supervisor.stop()
        self.guard.close()
        for simulator in self._simulators:
            simulator.close()
        for group in self.groups:
            await group.aclose()


@pytest.fixture
async def rig(ipc_dir, monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(supervisor, "LOOK", 0.01)
    monkeypatch.setattr(supervisor, "WATCH", 0.02)
    async with AsyncExitStack() as stack:

        def make(*scripts, ranks=1, min_ready=None, **policy):
            made = Rig(ipc_dir, scripts, ranks, min_ready, policy)
            stack.push_async_callback(made.close)
            return made

        yield make


# ------------------------------------------------------------ start


async def test_a_start_is_over_when_every_rank_takes_work(rig):
    made = rig(RUN, RUN, ranks=2)
    starting = asyncio.ensure_future(made.supervisor.start())
    await made.play(0)
    await made.console.until(lambda: made.console.shown and made.console.shown[-1][:2] == ["ready", "ready"])
    assert not starting.done()
    await made.play(1)
    await starting
    assert made.console.shown[-1] == ["ready"] * 4


async def test_a_start_is_over_when_a_group_has_the_ranks_that_it_needs(rig):
    made = rig(RUN, ranks=2, min_ready=1)
    starting = asyncio.ensure_future(made.supervisor.start())
    await made.play(ranks=1)
    await starting
    assert made.console.shown[-1] == ["ready", "spawned"]


async def test_a_rank_is_seen_spawned_then_to_say_hello_then_loading(rig):
    made = rig(RUN)
    starting = asyncio.ensure_future(made.supervisor.start())
    await made.console.until(lambda: made.console.shown)
    simulator = await made.play(withhold=("ready",))
    await made.console.until(lambda: made.console.shown[-1] == ["loading"])
    simulator.proceed(0)
    await starting
    states = [states[0] for states in made.console.shown]
    assert list(dict.fromkeys(states)) == ["spawned", "hello", "loading", "ready"]


async def test_an_engine_that_ends_while_others_start_ends_the_start_with_all_that_is_known_of_it(rig):
    script = "import sys\nfor n in range(25): print('line', n, file=sys.stderr)\nsys.exit(3)"
    made = rig(RUN, script, ranks=2)
    with pytest.raises(ServeError) as refused:
        await made.supervisor.start()
    head, *rest = str(refused.value).splitlines()
    pid = await made.pid(1)
    url = re.escape(made.plans[1].url)
    assert re.fullmatch(
        rf"worker 1 \({url}, ranks 0-1, pid {pid}\) exited with code 3 during start-up, \d+\.\d s after its start; "
        r"its last 20 lines on stderr:",
        head,
    )
    assert rest == [f"  line {number}" for number in range(5, 25)]
    await made.supervisor.stop()
    assert group_members(await made.pid(0)) == []


async def test_an_engine_that_says_nothing_on_stderr_is_quoted_from_stdout(rig):
    made = rig("print('no such device'); raise SystemExit(1)")
    with pytest.raises(ServeError, match=r"printed nothing on stderr, and last on stdout: no such device"):
        await made.supervisor.start()


async def test_ranks_that_are_late_are_named_with_their_state_and_the_engines_last_line(rig):
    made = rig(RUN, ranks=2, startup_timeout=0.5)
    playing = asyncio.ensure_future(made.play(withhold=("ready",), ranks=1))
    with pytest.raises(ServeError) as refused:
        await made.supervisor.start()
    head, loading, spawned, last = str(refused.value).splitlines()
    assert head == "2 of 2 ranks were not ready after 0.5 s (--worker-startup-timeout):"
    assert re.fullmatch(r"  worker 0 rank 0: loading after 0\.\d s", loading)
    assert re.fullmatch(r"  worker 0 rank 1: spawned after 0\.\d s", spawned)
    assert last == "  worker 0 last printed: up"
    await playing


async def test_a_python_that_is_none_is_said(rig):
    made = rig(RUN)
    made.plans[0].command[0] = "/nowhere/python"
    with pytest.raises(ServeError, match="worker 0: cannot run /nowhere/python: No such file"):
        await made.supervisor.start()


# ------------------------------------------------------------ afterwards


async def started(made, workers=1):
    simulators = []
    starting = asyncio.ensure_future(made.supervisor.start())
    for worker in range(workers):
        simulators.append(await made.play(worker))
    await starting
    return simulators, asyncio.ensure_future(made.supervisor.watch())


async def test_a_worker_that_dies_is_started_again_and_its_ranks_join(rig):
    made = rig(RUN, RUN)
    (simulator, _), watching = await started(made, 2)
    os.kill(await made.pid(0), signal.SIGKILL)
    simulator.die(0)
    await made.console.line(r"worker 0 \(.* was killed by SIGKILL, ")
    await made.console.line(r"worker 0: started again after 0\.01 s")
    assert made.groups[1].live == 1
    await made.play(0)
    await made.console.line("worker 0: rank 0 ready again")
    assert [info.incarnation for info in made.groups[0].ranks] == [2]
    assert not watching.done()
    watching.cancel()


async def test_what_a_dead_worker_left_running_is_ended_before_it_starts_again(rig):
    script = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])"
    )
    made = rig(f"{script}; print('up', flush=True); time.sleep(600)")
    _, watching = await started(made)
    pid = await made.pid()
    os.kill(pid, signal.SIGKILL)
    await made.console.line("started again")
    assert group_members(pid) == []
    watching.cancel()


async def test_pauses_grow_until_a_worker_that_never_stays_is_given_up(rig):
    made = rig(RUN, restart_limit=2)
    _, watching = await started(made)
    for start in (1, 2, 3):
        os.kill(await made.pid(0, start), signal.SIGKILL)
    await made.console.line("worker 0: started again after 0.02 s")
    await made.console.line("worker 0: given up; it ended more than 2 times within 60 s")
    await asyncio.wait_for(watching, 20)


async def test_a_worker_that_is_not_to_be_started_again_is_not(rig):
    made = rig(RUN, RUN, restart=False)
    _, watching = await started(made, 2)
    os.kill(await made.pid(0), signal.SIGKILL)
    await made.console.line("worker 0: not started again")
    assert not watching.done()  # the other one lives
    os.kill(await made.pid(1), signal.SIGKILL)
    await asyncio.wait_for(watching, 20)


async def test_a_process_without_any_rank_is_as_good_as_dead(rig, monkeypatch):
    monkeypatch.setattr(supervisor, "DEAF", 0.1)
    made = rig(RUN)
    (simulator,), watching = await started(made)
    simulator.die(0)
    await made.console.line(r"was killed by SIGKILL since none of its ranks lives for 0.1 s")
    await made.console.line("started again")
    watching.cancel()


async def test_a_worker_that_does_not_come_back_in_time_is_started_once_more(rig):
    made = rig(RUN, startup_timeout=0.3)
    _, watching = await started(made)
    os.kill(await made.pid(), signal.SIGKILL)
    await made.console.line(r"killed by SIGKILL since it was not ready after 0.3 s")
    await made.pid(0, 3)
    watching.cancel()


async def test_a_stop_ends_every_process_of_every_worker(rig):
    made = rig(RUN, RUN)
    _, watching = await started(made, 2)
    watching.cancel()
    await made.supervisor.stop()
    assert [group_members(await made.pid(worker)) for worker in (0, 1)] == [[], []]


async def test_a_stop_that_is_hurried_does_not_wait_for_who_is_deaf(rig):
    made = rig("import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)")
    _, watching = await started(made)
    watching.cancel()
    hurry = asyncio.Event()
    hurry.set()
    await asyncio.wait_for(made.supervisor.stop(hurry), 4)  # less than the grace


# ------------------------------------------------------------ back-off


@given(st.integers(0, 8), st.floats(1, 1000), st.lists(st.floats(0, 500), max_size=40))
def test_in_any_window_there_are_at_most_so_many_restarts_each_after_a_longer_pause(limit, window, gaps):
    policy = Restarts(limit, window)
    now, granted, last = 0.0, [], []
    for gap in gaps:
        now += gap
        last = [end for end in last if now - end < window] + [now]
        delay = policy.after_end(now)
        assert (delay is None) == (len(last) > limit)
        if delay is not None:
            granted.append(now)
            assert delay == min(30.0, 0.5 * 2 ** (len(last) - 1))
        assert sum(now - moment < window for moment in granted) <= limit


def test_a_worker_that_ran_for_longer_than_the_window_starts_again_at_once():
    policy = Restarts(2, 100)
    assert [policy.after_end(now) for now in (0, 1, 2, 103)] == [0.5, 1.0, None, 0.5]
