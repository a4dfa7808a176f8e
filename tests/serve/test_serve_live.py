"""Serve with real processes on loopback: it answers, keeps its workers up, and leaves nothing behind."""

import os
import re
import signal
import time

import openai
import pytest
from serve_process import ServeProcess

from smg.serve import ports
from smg.serve.guard import group_members

MESSAGES = [{"role": "user", "content": "Hello"}]


def client_of(process: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{process.url}/v1", api_key="not-used", max_retries=0, timeout=30)


def chat(client, tokens=4, **options):
    return client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=tokens, **options)


def ranks_that_stream(client, chats: int) -> list[str]:
    """The ranks, each within its worker, that this many chats go to which all run at once."""
    answers = [
        client.chat.completions.with_raw_response.create(
            model="demo", messages=MESSAGES, max_tokens=100_000, stream=True
        )
        for _ in range(chats)
    ]
    for answer in answers:
        with answer.parse() as stream:  # leaving it ends the chat
            assert any(
                choice.delta.content for chunk, _ in zip(stream, range(5), strict=False) for choice in chunk.choices
            )
    return sorted(answer.headers["x-smg-rank"] for answer in answers)


def listening_ports(pid: int) -> set[int]:
    """TCP ports that a process listens on."""
    inodes = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{descriptor}")))
        except OSError:
            continue
    with open(f"/proc/{pid}/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


# ------------------------------------------------------------ a worker that dies


def test_a_killed_worker_comes_back_while_the_other_serves_on_and_sigterm_leaves_nothing(start):
    process = start("--data-parallel-size", "2", "--", "--step-ms", "1", "--data-parallel-size", "2")
    process.wait_ready()
    for worker in (0, 1):
        process.wait_line(rf"^worker {worker}: pid \d+, ranks 0-1 to dial tcp://127\.0\.0\.1:\d+")
        process.wait_line(rf"^worker {worker} rank 1: ready after \d+\.\d s")
        process.wait_line(rf"^\[worker {worker}\] mock: rank 1, incarnation 1: live")
    engines = {process.worker_pid(worker) for worker in (0, 1)}
    taken = listening_ports(process.process.pid)
    assert len(taken) == 4  # HTTP, metrics, and a handshake for each worker
    with client_of(process) as client:
        assert ranks_that_stream(client, 4) == ["0", "0", "1", "1"]

        before = len(process.lines)
        os.kill(process.worker_pid(0), signal.SIGKILL)
        process.wait_line(
            r"worker 0 \(ipc://\S+, ranks 0-1, pid \d+\) was killed by SIGKILL, \d+ s after", after=before
        )
        assert chat(client).choices[0].finish_reason == "length"  # by the other one
        engines.add(int(process.wait_line(r"worker 0: started again after 0.5 s, pid (\d+)", after=before)[1]))
        process.wait_line(r"worker 0: ranks 0-1 ready again", after=before)
        assert ranks_that_stream(client, 4) == ["0", "0", "1", "1"]

    assert process.stop() == 0
    assert process.left_processes() == []
    assert process.left_files() == []
    assert all(map(ports.is_free, taken))
    assert [group_members(pid) for pid in engines] == [[]] * 3


@pytest.mark.slow
def test_a_worker_that_is_not_to_be_restarted_stays_away_and_the_last_one_takes_serve_with_it(start):
    process = start("--worker-restart", "never", "--data-parallel-size", "2")
    process.wait_ready()
    os.kill(process.worker_pid(0), signal.SIGKILL)
    process.wait_line(r"worker 0: not started again")
    with client_of(process) as client:
        assert chat(client).choices[0].finish_reason == "length"
    os.kill(process.worker_pid(1), signal.SIGKILL)
    process.wait_line(r"no worker is left")
    assert process.finish() == 1
    assert process.left_processes() == []
    assert process.left_files() == []


@pytest.mark.slow
def test_a_worker_that_ends_too_often_is_given_up(start):
    process = start("--worker-restart-limit", "1")
    process.wait_ready()
    os.kill(process.worker_pid(0), signal.SIGKILL)
    pid = int(process.wait_line(r"worker 0: started again after 0.5 s, pid (\d+)")[1])
    os.kill(pid, signal.SIGKILL)
    process.wait_line(r"worker 0: given up; it ended more than 1 times within 600 s")
    assert process.finish() == 1


# ------------------------------------------------------------ ends


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_what_runs_come_to_its_end_and_leaves_nothing(start, number):
    process = start("--", "--step-ms", "20")
    process.wait_ready()
    with client_of(process) as client:
        stream = iter(chat(client, tokens=20, stream=True))
        next(stream)
        process.process.send_signal(number)
        assert list(stream)[-1].choices[0].finish_reason == "length"
    assert process.finish() == 0
    assert process.left_processes() == []
    assert process.left_files() == []


@pytest.mark.slow
def test_a_signal_during_start_up_ends_what_was_started(start):
    process = start("--", "--withhold", "ready")
    process.wait_line(r"worker 0 rank 0: loading")
    assert process.stop() == 128 + signal.SIGTERM
    assert process.left_processes() == []
    assert process.left_files() == []


FAILING = """#!{python}
import sys
for number in range(30):
    print("line", number, file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture
def engine(tmp_path):
    """A Python that runs a script of the test's own, whatever it is asked to run, once it was found to be one."""
    import sys

    def make(script):
        path = tmp_path / "python"
        text = script.format(python=sys.executable)
        head, _, body = text.partition("\n")
        check = "import os, sys\nif sys.argv[1] == '-c': os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
        path.write_text(f"{head}\n{check}{body}")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.mark.slow
def test_an_engine_that_ends_during_start_up_ends_the_launch_at_once_with_its_last_words(start, engine):
    process = start("--worker-python", engine(FAILING))
    assert process.finish() == 1
    error = process.said(r"smg serve: worker 0 \(ipc://\S+, rank 0, pid \d+\) exited with code 3 ")
    assert "during start-up" in error
    assert "its last 20 lines on stderr:" in error
    at = process.lines.index(error)
    assert process.lines[at + 1 : at + 21] == [f"  line {number}" for number in range(10, 30)]
    assert process.left_files() == []


@pytest.mark.slow
def test_engines_end_also_when_serve_is_killed(start):
    process = start("--data-parallel-size", "2", "--worker-shutdown-timeout-secs", "5")
    process.wait_ready()
    engines = [process.worker_pid(worker) for worker in (0, 1)]
    process.stop(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(map(group_members, engines)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    again = start("--data-parallel-size", "2")  # what it left in the directory is no hindrance
    again.wait_ready()
    assert again.stop() == 0
    assert again.left_files() == []


# ------------------------------------------------------------ logs


@pytest.mark.slow
def test_engines_logs_go_to_files_when_a_directory_is_named(start, tmp_path):
    process = start("--log-dir", str(tmp_path / "logs"))
    process.wait_ready()
    assert process.stop() == 0
    (file,) = (tmp_path / "logs").iterdir()
    assert re.fullmatch(r"engine-\d+\.log", file.name)
    assert "mock: rank 0, incarnation 1: live\n" in file.read_text()
    assert not any("mock:" in line for line in process.lines)
