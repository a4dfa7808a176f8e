"""The commands as a user runs them: processes, signals, exit codes, what they leave behind."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from scripted import MODEL
from serving import wait_until

import smg
from smg.cli import main
from smg.http import flags
from smg.mock import Simulator

ROOT = Path(smg.__file__).parents[1]


def command(*arguments: str, **options) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "smg", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        **options,
    )
    _started.append(process)
    return process


_started: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def _nothing_is_left_running():
    """Also when a test fails midway."""
    yield
    while _started:
        with _started.pop() as process:
            process.kill()


def finish(process: subprocess.Popen, timeout: float = 20) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, err


def test_alone_it_prints_help_and_exits_2(capsys):
    assert main([]) == 2
    assert "launch" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert smg.__version__ in capsys.readouterr().out


@pytest.mark.parametrize("name", ["launch", "mock", "demo"])
def test_every_command_has_help(capsys, name):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert "--" in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fly"])
    assert ended.value.code == 2
    assert "fly" in capsys.readouterr().err


def test_help_needs_none_of_the_server():
    code = "import sys; from smg.cli import main; main([]); print(any(m.startswith('aiohttp') for m in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=30).stdout
    assert out.strip() == "False"


# ------------------------------------------------------------ launch


def launch_arguments(directory: Path, *more: str) -> list[str]:
    return [
        "launch",
        *("--worker-urls", f"ipc://{directory}/g", "--backend", "tokenspeed", "--zmq-engine-count", "2"),
        *("--model-path", str(MODEL), "--port", "0", "--prometheus-port", "0"),
        *("--zmq-handshake-address", "tcp://127.0.0.1:0"),
        *more,
    ]


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readiness", timeout=20) as response:
            return response.status == 200
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return False


def test_launch_serves_until_sigterm_and_leaves_nothing(ipc_dir):
    process = command(*launch_arguments(ipc_dir, "--log-level", "warn"))
    dial = process.stdout.readline()
    handshake = re.search(r"tcp://\S+", dial)[0]
    url = re.search(r"answering on (\S+),", process.stdout.readline())[1]
    with Simulator(f"ipc://{ipc_dir}/g", ranks=2, handshake_address=handshake, step_ms=50, no_sentinel=True):
        wait_until(lambda: is_ready(url), 20)
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 10, "stream": True}
        with urllib.request.urlopen(f"{url}/v1/chat/completions", json.dumps(body).encode(), 20) as response:
            response.readline()
            process.send_signal(signal.SIGTERM)  # the stream runs: it is let go on to its end
            assert response.read().endswith(b"data: [DONE]\n\n")
        code, out, err = finish(process)
    assert (code, err) == (0, "")
    assert "shutting down" in out
    assert not list(ipc_dir.glob("*.sock"))


def test_launch_may_have_as_many_descriptors_as_it_is_let(ipc_dir):
    process = command(
        *launch_arguments(ipc_dir), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
    )
    process.stdout.readline()
    assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (4096, 4096)
    process.terminate()
    assert finish(process)[0] == 0


def test_launch_takes_the_rust_gateways_flags_with_a_warning(ipc_dir):
    more = [
        "--policy",
        "cache_aware",
        "--disable-circuit-breaker",
        "--tool-call-parser",
        "llama",
        "--selector",
        "a=b",
        "c=d",
    ]
    process = command(*launch_arguments(ipc_dir, *more))
    process.stdout.readline()
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 0
    assert "--disable-circuit-breaker --tool-call-parser --selector" in err
    assert "cache_aware" in err


def test_ignored_flags_do_not_shadow_real_ones():
    import argparse

    from smg.http import launch

    parser = argparse.ArgumentParser(allow_abbrev=False)
    launch.add_arguments(parser)  # argparse refuses a flag that is there twice
    own = {option for action in parser._actions for option in action.option_strings}
    assert {"--worker-urls", "--api-key", "--sse-keepalive-secs", *flags.SWITCHES, *flags.VALUES, *flags.LISTS} <= own


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--worker-urls", "tcp://127.0.0.1:1"), "ipc://"),
        (("--backend", "nope"), "nope"),
        (("--model-path", "/nowhere"), "/nowhere"),
        (("--host", "256.1.1.1"), "cannot listen"),
        (("--tls-cert-path", "/nowhere.pem"), "/nowhere.pem"),
    ],
)
def test_a_start_that_cannot_be_is_one_clear_line(ipc_dir, change, message):
    arguments = launch_arguments(ipc_dir)
    if change[0] in arguments:
        arguments[arguments.index(change[0]) + 1] = change[1]
    else:
        arguments += change
    code, _, err = finish(command(*arguments))
    assert code == 1
    lines = [line for line in err.splitlines() if line.startswith("smg launch: ")]
    assert len(lines) == 1, err
    assert message in lines[0]
    assert "Traceback" not in err


def test_a_port_that_is_taken_is_one_clear_line(ipc_dir, served):
    code, _, err = finish(command(*launch_arguments(ipc_dir, "--port", str(served.port))))
    assert code == 1
    assert f"cannot listen on 127.0.0.1:{served.port}" in err


# ------------------------------------------------------------ demo


def demo_left(directory: Path) -> list[Path]:
    return list(directory.glob("smg-demo-*"))


@pytest.fixture
def demo_tmp(ipc_dir, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(ipc_dir))
    return ipc_dir


def test_demo_streams_chats_over_both_ranks_and_ends_with_nothing_in_flight(demo_tmp):
    code, out, err = finish(command("demo", "--step-ms", "2", "--max-tokens", "12"), 40)
    assert (code, err) == (0, "")
    ended = re.findall(r"^chat +(\d+) rank (\d) length", out, re.MULTILINE)
    assert sorted(int(number) for number, _ in ended) == list(range(1, 9))
    assert {rank for _, rank in ended} == {"0", "1"}
    assert "in flight    0 0" in out
    assert "curl -N http://127.0.0.1:" in out
    assert demo_left(demo_tmp) == []


def test_demo_keeps_serving_until_ctrl_c(demo_tmp):
    process = command("demo", "--keep", "--step-ms", "2", "--max-tokens", "4", "--chats", "2")
    line = ""
    while "curl -N" not in line:
        line = process.stdout.readline()
        assert line, "it ended"
    url, body = re.search(r"curl -N (\S+) .* -d '(.*)'", line).groups()
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as response:
        assert response.read().endswith(b"data: [DONE]\n\n")
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finish(process)
    assert (code, err) == (130, "")
    assert demo_left(demo_tmp) == []


@pytest.mark.parametrize(
    ("number", "after"),
    [
        (signal.SIGINT, "router "),
        (signal.SIGINT, "simulator "),
        (signal.SIGINT, "chat "),
        (signal.SIGTERM, "simulator "),
    ],
)
def test_demo_leaves_nothing_behind_whenever_it_is_stopped(demo_tmp, number, after):
    process = command("demo")
    while not process.stdout.readline().startswith(after):
        assert process.poll() is None
    os.killpg(process.pid, number)
    code, _, err = finish(process)
    assert code == 128 + number
    assert "Traceback" not in err
    assert demo_left(demo_tmp) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
