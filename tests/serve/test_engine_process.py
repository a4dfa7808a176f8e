"""One engine process: its exit, its last words, and the end of all that it started."""

import asyncio
import os
import signal
import sys
import threading

import pytest

from smg.serve.guard import Guard, group_members
from smg.serve.process import TAIL, EngineProcess

ENVIRONMENT = {"PATH": os.environ["PATH"]}


class Lines:
    """What a process printed, to wait for: lines come from threads."""

    def __init__(self):
        self.all = []
        self._more = threading.Condition()

    def __call__(self, line):
        with self._more:
            self.all.append(line)
            self._more.notify_all()

    async def wait(self, count):
        def waiting():
            with self._more:
                return self._more.wait_for(lambda: len(self.all) >= count, 20)

        assert await asyncio.get_running_loop().run_in_executor(None, waiting), self.all


@pytest.fixture
async def run():
    """Start a Python script as an engine process: `process, lines = run(text)`."""
    started = []
    guard = Guard(0)

    def start(script):
        lines = Lines()
        command = [sys.executable, "-S", "-E", "-c", script]
        process = EngineProcess(command, ENVIRONMENT, "/", lines, guard)
        started.append(process)
        return process, lines

    yield start
    for process in started:
        await process.end(0)
        assert group_members(process.pid) == []
    guard.close()


async def test_its_exit_code_is_told(run):
    process, _ = run("raise SystemExit(3)")
    assert await process.wait() == 3
    assert await process.end(0) == 3


async def test_the_signal_that_killed_it_is_told(run):
    process, _ = run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert await process.wait() == -signal.SIGKILL


async def test_its_last_lines_on_stderr_are_kept_and_all_lines_are_handed_on(run):
    process, lines = run("import sys\nfor n in range(50): print('line', n, file=sys.stderr)\nprint('out')")
    await process.wait()
    await process.end(0)
    assert list(process.last_errors) == [f"line {number}" for number in range(50 - TAIL, 50)]
    assert sorted(lines.all) == sorted(["out", *(f"line {number}" for number in range(50))])


async def test_a_progress_bar_counts_as_its_last_state_and_bad_bytes_do_no_harm(run):
    process, lines = run("import os; os.write(2, b' 0%\\r50%\\r100%\\n\\xff\\n')")
    await process.wait()
    await process.end(0)
    assert lines.all == ["100%", "\ufffd"]
    assert process.last_line == "\ufffd"


async def test_it_has_no_input_and_a_session_of_its_own(run):
    process, lines = run("import os, sys; print(repr(sys.stdin.read()), os.getsid(0) == os.getpid())")
    await process.wait()
    await process.end(0)
    assert lines.all == ["'' True"]


async def test_sigterm_goes_to_the_whole_group(run):
    process, lines = run(CHILD_THEN_EXIT)
    await lines.wait(1)
    assert await process.end(20) == 7


async def test_who_is_deaf_to_sigterm_is_killed_after_the_grace(run):
    process, lines = run(
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    await lines.wait(1)
    assert await process.end(0.05) == -signal.SIGKILL


async def test_descendants_that_outlive_their_parent_are_ended_too(run):
    process, lines = run(CHILD)
    await lines.wait(1)
    assert await process.wait() == 0
    assert group_members(process.pid) == [int(lines.all[0])]
    assert await process.end(0) == 0
    assert group_members(process.pid) == []


async def test_an_end_can_be_hurried(run):
    process, lines = run(
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    await lines.wait(1)
    ending = asyncio.ensure_future(process.end(60))
    await asyncio.sleep(0)
    process.kill()
    assert await ending == -signal.SIGKILL
    process.kill()  # nothing is left that it could mean


async def test_an_end_can_be_asked_for_again(run):
    process, _ = run("pass")
    await process.wait()
    assert [await process.end(20), await process.end(20)] == [0, 0]


async def test_a_command_that_is_none_is_an_error():
    with pytest.raises(OSError, match="nowhere"):
        EngineProcess(["/nowhere/python"], ENVIRONMENT, "/", print, None)


CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-E", "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
"""

# it is told that its child was ended, which SIGTERM to the parent alone would not do
CHILD_THEN_EXIT = f"""
import signal
signal.signal(signal.SIGTERM, lambda *_: None)
{CHILD}
raise SystemExit(7 if child.wait() == -signal.SIGTERM else 8)
"""
