"""The guard ends what its launcher left, whatever became of the launcher."""

import os
import signal
import subprocess
import sys
import time

import pytest

from smg.serve.guard import Guard, group_members

SLEEP = "import subprocess, sys, time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-E", "-c", {SLEEP!r}])
time.sleep(600)
"""


@pytest.fixture
def engine():
    """Start a script in a process group of its own; it has printed a line when this returns."""
    started = []

    def start(script):
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", script], stdout=subprocess.PIPE, start_new_session=True
        )
        started.append(process)
        assert process.stdout.readline() == b"up\n"
        return process

    yield start
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        process.stdout.close()


def test_what_was_not_removed_is_ended_with_its_descendants(engine):
    process = engine(PARENT)
    assert len(group_members(process.pid)) == 2
    with Guard(20) as guard:
        guard.add(process.pid)
    assert process.wait(20) == -signal.SIGTERM
    assert group_members(process.pid) == []


def test_who_is_deaf_is_killed_after_the_grace(engine):
    process = engine(DEAF)
    with Guard(0.1) as guard:
        guard.add(process.pid)
    assert process.wait(20) == -signal.SIGKILL


def test_what_was_removed_is_let_be(engine):
    process = engine(SLEEP)
    with Guard(20) as guard:
        guard.add(process.pid)
        guard.remove(process.pid)
    assert process.poll() is None


def test_a_launcher_that_is_killed_has_its_engines_ended(engine):
    process = engine(SLEEP)
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys, time\nfrom smg.serve.guard import Guard\n"
            f"guard = Guard(20)\nguard.add({process.pid})\nprint(guard.pid, flush=True)\ntime.sleep(600)",
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        guard = int(launcher.stdout.readline())
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
    assert process.wait(20) == -signal.SIGTERM
    deadline = time.monotonic() + 20
    while guard in group_members(guard):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_engines_go_on_without_a_guard_that_was_killed(engine):
    process = engine(SLEEP)
    with Guard(20) as guard:
        guard.add(process.pid)
        os.kill(guard.pid, signal.SIGKILL)
        while group_members(guard.pid):
            time.sleep(0.01)
        guard.add(process.pid)
        guard.remove(process.pid)
    assert process.poll() is None
