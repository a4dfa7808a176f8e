"""Simulated ranks on real sockets, against a frontend of bare pyzmq sockets."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from mock_frontend import Sockets

import smg.mock
from smg.mock import Simulator, SimulatorEnded, SimulatorProcess
from smg.mock.command import add_arguments, main
from smg.mock.simulator import RANK_OPERATIONS, operations, readable
from smg.protocol import addresses

DEAD = b"ENGINE_CORE_DEAD"
FAST = {"step_ms": 1.0, "vocab_size": 1000}


class Frontend(Sockets):
    """What it says to TokenSpeed's ranks, and how it reads theirs."""

    def add(self, rid: str, rank: int = 0, *, stream: bool = True, prompt: int = 3, **sampling: Any) -> None:
        names = ["max_new_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k"]
        defaults = {
            **dict.fromkeys(names),
            "max_new_tokens": 4,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
        }
        params = [*{**defaults, **sampling}.values()]
        elements = [list(range(prompt)), params, False, -1, 0, None, stream]
        payload = msgpack.packb(["TokenizedGenerateReqInput", rid, None, None, *elements])
        self.send(rank, b"\x00", payload)

    def output(self, rank: int = 0) -> list[Any]:
        """The next output frame, decoded, without its tag."""
        (frame,) = self.receive(self.outputs[rank])
        tag, *elements = msgpack.unpackb(frame)
        assert tag == "BatchTokenIDOutSlim"
        return elements

    def rows(self, rank: int = 0) -> list[tuple[str, list[int], str]]:
        """(rid, new tokens, reason) of the next output frame."""
        rids, tokens, reasons = self.output(rank)[:3]
        return list(zip(rids, tokens, reasons, strict=True))


@pytest.fixture
def frontend(ipc_dir: Path) -> Iterator[Frontend]:
    end = Frontend(ipc_dir, ranks=2)
    yield end
    end.close()


@pytest.fixture
def start(frontend: Frontend) -> Iterator[Callable[..., Simulator]]:
    """Start a simulator in a thread and, unless told not to, take all its ranks in."""
    with contextlib.ExitStack() as stack:

        def start(admit: bool = True, **options: Any) -> Simulator:
            options = {"record": True, "handshake_address": frontend.address, **FAST, **options}
            mock = stack.enter_context(Simulator("ipc:///nowhere/engine-0", **options))
            if admit:
                frontend.admit_all(mock)
            return mock

        yield start


Start = Callable[..., Simulator]


# Handshake


def test_a_rank_says_hello_then_ready_and_registers_on_its_input(frontend: Frontend, start: Start) -> None:
    mock = start(admit=False, start_index=1)
    registered = frontend.admit(1)
    mock.wait_live()
    assert registered["vllm_version"] == "tokenspeed-0.1.1"
    assert (registered["data_parallel_size"], registered["data_parallel_rank"]) == (2, 1)


def test_the_identity_is_the_engine_index_in_two_bytes_little_endian(frontend: Frontend, start: Start) -> None:
    start(admit=False, start_index=258)
    assert frontend.receive(frontend.handshake)[0] == b"\x02\x01"


def test_a_rank_waits_for_a_frontend_that_starts_later(ipc_dir: Path) -> None:
    url = f"ipc://{ipc_dir}/engine-1"
    with Simulator(url, **FAST) as mock:
        assert mock.address == f"tcp://127.0.0.1:{addresses.handshake_port(f'{ipc_dir}/engine-1')}"
        late = Frontend(ipc_dir)
        try:
            late.handshake.bind(mock.address)
            late.admit(0)
            mock.wait_live()
        finally:
            late.close()


def test_all_ranks_of_a_simulator_dial_separately(frontend: Frontend, start: Start) -> None:
    mock = start(ranks=2)
    assert [mock.stats(rank)["state"] for rank in (0, 1)] == ["live", "live"]


def test_a_withheld_step_comes_when_told_to_proceed(frontend: Frontend, start: Start) -> None:
    mock = start(admit=False, withhold=("ready", "registration"))
    frontend.expect_status("HELLO", 0)
    frontend.send_init(0)
    assert mock.stats(0)["state"] == "dialing"
    assert not frontend.handshake.poll(0)
    mock.proceed()
    frontend.expect_status("READY", 0)
    frontend.registration(0)
    mock.wait_live()


def test_a_withheld_hello_keeps_the_rank_unknown(frontend: Frontend, start: Start) -> None:
    mock = start(admit=False, withhold=("hello",))
    mock.proceed()
    frontend.admit(0)
    mock.wait_live()


def test_a_rank_that_died_in_its_handshake_has_nothing_to_proceed_with(frontend: Frontend, start: Start) -> None:
    mock = start(admit=False, withhold=("registration",))
    frontend.expect_status("HELLO", 0)
    frontend.send_init(0)
    frontend.expect_status("READY", 0)
    mock.die(0)
    mock.proceed(0)
    assert mock.stats(0)["state"] == "dead"
    mock.restart(0)
    frontend.expect_status("HELLO", 0)


def test_without_init_a_rank_gives_up_at_its_timeout(frontend: Frontend, start: Start) -> None:
    mock = start(admit=False, handshake_timeout=0.01)
    assert "0.01 s" in mock.wait_for("timeout", rank=0)["reason"]
    mock.wait_dead(0)


@pytest.mark.parametrize("init", [b"\xc1", msgpack.packb({"addresses": {"inputs": [], "outputs": []}})])
def test_an_init_without_addresses_ends_the_rank(init: bytes, frontend: Frontend, start: Start) -> None:
    mock = start(admit=False)
    frontend.expect_status("HELLO", 0)
    frontend.handshake.send_multipart([b"\x00\x00", init])
    assert mock.wait_for("refused_init")["reason"]
    mock.wait_dead(0)


# Requests and outputs


def test_a_request_streams_to_its_end_with_the_reply_its_seed_gives(frontend: Frontend, start: Start) -> None:
    mock = start()
    frontend.add("a", temperature=0.0)
    frames = [frontend.output() for _ in range(4)]
    assert [f[1][0][0] for f in frames] == mock.reply(0, 4)
    assert [f[2] for f in frames] == [[""], [""], [""], ["length"]]
    assert [f[4] for f in frames] == [[1], [2], [3], [4]]
    assert frames[0][8:] == [0, 1, 0, 1, 20480]
    mock.wait_for("finish", rid="a", reason="length", completion_tokens=4)
    assert mock.stats(0)["running"] == 0


def test_an_engine_step_is_one_frame_whatever_it_holds(frontend: Frontend, start: Start) -> None:
    mock = start(hold=True)
    for rid in "abc":
        frontend.add(rid)
    mock.wait_for("add", count=3)
    mock.step()
    assert [row[0] for row in frontend.rows()] == ["a", "b", "c"]
    mock.step(10)
    assert [row[2] for row in [frontend.rows() for _ in range(3)][-1]] == ["length"] * 3
    assert mock.stats(0)["frames"] == 4
    assert frontend.silent()


@pytest.mark.parametrize("elements", [9, 10, 14])
def test_frames_have_the_elements_asked_for(elements: int, frontend: Frontend, start: Start) -> None:
    start(slim_elements=elements)
    frontend.add("a", max_new_tokens=1)
    assert len(frontend.output()) == elements - 1


def test_an_abort_is_silent_and_frees_the_request(frontend: Frontend, start: Start) -> None:
    mock = start(hold=True)
    frontend.add("a")
    frontend.add("b")
    mock.wait_for("add", rid="b")
    mock.step()
    frontend.rows()
    frontend.abort("a")
    mock.wait_for("abort", rids=["a"])
    mock.step()
    assert [row[0] for row in frontend.rows()] == ["b"]
    assert mock.stats(0)["aborts"] == 1


def test_an_early_abort_kills_the_add_that_comes_after_it(frontend: Frontend, start: Start) -> None:
    mock = start()
    frontend.abort("a")
    frontend.add("a")
    frontend.add("b")
    assert mock.wait_for("add", rid="a")["outcome"] == "killed"
    assert frontend.rows()[0][0] == "b"


def test_an_invalid_request_is_answered_with_a_bare_abort(frontend: Frontend, start: Start) -> None:
    mock = start()
    frontend.add("a", top_k=500)
    assert frontend.rows() == [("a", [], "abort")]
    assert "top_k" in mock.wait_for("add", outcome="rejected")["reason"]
    mock.wait_for("finish", rid="a", reason="abort")


def test_an_undecodable_add_is_dropped_without_an_answer(frontend: Frontend, start: Start) -> None:
    mock = start()
    frontend.send(0, b"\x00", b"\xc1")
    frontend.send(0, b"\x07", b"\x90")
    frontend.send(0, b"\x00")
    frontend.add("b", max_new_tokens=1)
    assert frontend.rows()[0][0] == "b"
    assert mock.stats(0)["undecodable"] == 3
    assert len(mock.events.matching("undecodable")) == 3


def test_decoded_requests_are_kept_by_field_name(frontend: Frontend, start: Start) -> None:
    mock = start(ranks=2)
    frontend.add("a", rank=1, max_new_tokens=7, top_k=5)
    mock.wait_for("add", rank=1)
    (request,) = mock.requests()
    assert request == mock.requests(1)[0]
    assert (request["rid"], request["input_ids"], request["rank"], request["outcome"]) == (
        "a",
        [0, 1, 2],
        1,
        "queued",
    )
    assert (request["sampling_params"]["max_new_tokens"], request["sampling_params"]["top_k"]) == (7, 5)
    assert request["stream"] is True


def test_without_record_nothing_is_kept(frontend: Frontend, start: Start) -> None:
    mock = start(record=False)
    frontend.add("a", max_new_tokens=1)
    frontend.rows()
    assert mock.requests() == []
    assert mock.stats(0)["adds"] == 1
    assert not mock.events.matching("add")


def test_a_full_output_stops_the_rank_and_loses_nothing(ipc_dir: Path) -> None:
    frontend = Frontend(ipc_dir, output_hwm=1)
    options: dict[str, Any] = {**FAST, "step_ms": 0, "record": True, "handshake_address": frontend.address}
    try:
        with Simulator("ipc:///nowhere/engine-0", no_sentinel=True, **options) as mock:
            frontend.admit_all(mock)
            frontend.add("a", max_new_tokens=6000)
            mock.wait_for("blocked")
            assert mock.stats(0)["unsent"] == 1
            assert mock.stats(0)["tokens"] < 6000
            total = 0
            while total < 6000:
                ((rid, tokens, _),) = frontend.rows()
                assert rid == "a"
                total += len(tokens)
            mock.wait_for("unblocked")
            frontend.add("b", max_new_tokens=1)  # it reads again
            assert frontend.rows()[0][0] == "b"
    finally:
        frontend.close()


# Faults


def test_a_dead_rank_says_nothing_and_the_other_goes_on(frontend: Frontend, start: Start) -> None:
    mock = start(ranks=2)
    mock.die(1)
    mock.wait_dead(1)
    frontend.add("a", rank=0, max_new_tokens=1)
    frontend.rows(0)
    assert frontend.silent(1)
    assert mock.stats(1)["state"] == "dead"


def test_a_restarted_rank_is_a_new_incarnation_of_the_same_identity(frontend: Frontend, start: Start) -> None:
    mock = start()
    frontend.add("a", max_new_tokens=1000)
    mock.wait_for("add", rid="a")
    frontend.open(0, incarnation=2)
    mock.restart(0)
    frontend.admit(0)
    mock.wait_live(0)
    stats = mock.stats(0)
    assert (stats["incarnation"], stats["running"], stats["adds"]) == (2, 0, 0)
    frontend.add("b", max_new_tokens=1)
    assert frontend.rows()[0][0] == "b"


def test_a_stalled_rank_neither_reads_nor_steps_until_resumed(frontend: Frontend, start: Start) -> None:
    mock = start(ranks=2)
    mock.stall(0)
    frontend.add("a", max_new_tokens=1)
    frontend.add("b", rank=1, max_new_tokens=1)
    frontend.rows(1)  # the other rank has run meanwhile
    assert mock.stats(0)["adds"] == 0
    mock.resume(0)
    assert frontend.rows(0)[0][0] == "a"


def test_a_stalled_rank_with_a_small_mark_fills_up(frontend: Frontend, start: Start) -> None:
    mock = start(input_hwm=1)
    mock.stall(0)

    def fits() -> bool:
        try:
            frontend.inputs[0].send_multipart([b"\x00\x00", b"\x01", b"\x90" + bytes(1000)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    assert not all(fits() for _ in range(200_000))


def test_a_rank_on_hold_takes_requests_and_steps_only_when_told(frontend: Frontend, start: Start) -> None:
    mock = start()
    mock.hold()
    frontend.add("a", max_new_tokens=2)
    mock.wait_for("add", rid="a")
    assert frontend.silent()
    mock.step()
    assert frontend.rows() == [("a", mock.reply(mock.requests()[0]["sampling_params"]["seed"], 1), "")]
    assert frontend.silent()
    mock.release()
    assert frontend.rows()[0][2] == "length"


def test_the_sentinel_is_one_raw_frame(frontend: Frontend, start: Start) -> None:
    mock = start()
    mock.sentinel(0)
    assert frontend.raw_output() == [DEAD]
    assert mock.stats(0)["state"] == "live"


def test_malformed_frames_are_made_from_the_running_requests(frontend: Frontend, start: Start) -> None:
    mock = start(hold=True)
    frontend.add("a")
    mock.wait_for("add")
    mock.step()
    frontend.rows()
    mock.ragged("completion_tokens", 0)
    rids, _, _, _, completions, *_ = msgpack.unpackb(frontend.raw_output()[0])[1:]
    assert (rids, completions) == (["a"], [])
    mock.malformed(0, count=3)
    for _ in range(3):
        with pytest.raises(ValueError):
            msgpack.unpackb(frontend.raw_output()[0])
    with pytest.raises(ValueError, match="kind"):
        mock.malformed(0, kind="unheard of")


def test_a_frame_can_be_sent_for_any_request(frontend: Frontend, start: Start) -> None:
    mock = start()
    mock.emit(0, "long-gone", token_ids=[5, 6], finish_reason="stop", prompt_tokens=9, completion_tokens=40)
    assert frontend.output()[:5] == [["long-gone"], [[5, 6]], ["stop"], [9], [40]]
    mock.raw(0, b"one", b"two")
    assert frontend.raw_output() == [b"one", b"two"]


def test_a_dropped_add_is_never_answered(frontend: Frontend, start: Start) -> None:
    mock = start()
    mock.drop_adds(1, 0)
    frontend.add("a", max_new_tokens=1)
    frontend.add("b", max_new_tokens=1)
    assert frontend.rows()[0][0] == "b"
    mock.wait_for("dropped", rank=0)
    assert (mock.stats(0)["adds"], mock.stats(0)["dropped"], mock.stats(0)["queued"]) == (2, 1, 1)


def test_a_rank_can_claim_to_be_another(frontend: Frontend, start: Start) -> None:
    mock = start()
    for claimed in (7, None):
        mock.engine_index(claimed, 0)
        frontend.add(f"a{claimed}", max_new_tokens=1)
        assert frontend.output()[8] == (claimed or 0)


def test_an_armed_fault_runs_right_after_the_frame_it_waits_for(frontend: Frontend, start: Start) -> None:
    mock = start()
    mock.die(0, after_frames=3)
    frontend.add("a", max_new_tokens=10)
    mock.wait_dead(0)
    # No assertion on what arrived: a die loses what the socket has not sent. The count is the engine's own.
    assert mock.stats(0)["frames"] == 3


def test_an_armed_fault_runs_right_after_the_add_it_waits_for(frontend: Frontend, start: Start) -> None:
    mock = start(hold=True)
    mock.sentinel(0, after_adds=2)
    frontend.add("a")
    mock.wait_for("add", rid="a")
    assert frontend.silent()
    frontend.add("b")
    assert frontend.raw_output() == [DEAD]


def test_faults_given_at_the_start_run_once_their_rank_is_live(frontend: Frontend, start: Start) -> None:
    mock = start(ranks=2, fault=("sentinel rank=1", "emit rank=0 rid=x token_ids=4,5"))
    assert frontend.raw_output(1) == [DEAD]
    assert frontend.rows(0) == [("x", [4, 5], "")]
    assert mock.stats(0)["state"] == "live"


def test_a_fault_that_cannot_be_done_is_told(frontend: Frontend, start: Start) -> None:
    mock = start(fault=("malformed kind=unheard",))
    assert "unheard" in mock.wait_for("failed")["reason"]
    mock.die(0)
    for wrong in (
        lambda: mock.sentinel(0),
        lambda: mock.die(5),
        lambda: mock.call("nothing"),
        lambda: mock.call("step", 0, cuont=1),
        lambda: mock.exit(),
    ):
        with pytest.raises(ValueError):
            wrong()


# Handles


def test_closing_sends_the_sentinel_of_each_live_rank(frontend: Frontend, start: Start) -> None:
    mock = start(ranks=2)
    mock.close()
    mock.close()
    assert frontend.raw_output(0) == frontend.raw_output(1) == [DEAD]
    with pytest.raises(SimulatorEnded):
        mock.stats(0)
    with pytest.raises(SimulatorEnded, match="waiting for 1 x add"):
        mock.wait_for("add")


def test_waiting_has_an_end_and_says_what_happened_instead(frontend: Frontend, start: Start) -> None:
    mock = start()
    with pytest.raises(TimeoutError, match=r"add .*'rid': 'a'(.|\n)*'event': 'live'"):
        mock.wait_for("add", rid="a", timeout=0.01)
    with pytest.raises(TimeoutError, match="rank 0 dead"):
        mock.wait_dead(0, timeout=0.01)


@pytest.fixture
def process(frontend: Frontend) -> Iterator[SimulatorProcess]:
    with smg.mock.spawn("ipc:///nowhere/engine-0", handshake_address=frontend.address, **FAST) as mock:
        frontend.admit_all(mock)
        yield mock


def test_a_process_is_controlled_like_a_thread(frontend: Frontend, process: SimulatorProcess) -> None:
    frontend.add("a", temperature=0.0)
    assert [frontend.rows()[0][1][0] for _ in range(4)] == process.reply(0, 4)
    process.wait_for("finish", rid="a")
    assert process.requests(0)[0]["rid"] == "a"
    assert process.stats(0)["tokens"] == 4
    process.raw(0, b"\xff")
    assert frontend.raw_output() == [b"\xff"]
    with pytest.raises(ValueError, match="operation 'nothing'"):
        process.call("nothing")


def test_a_killed_process_goes_without_a_word(frontend: Frontend, process: SimulatorProcess) -> None:
    process.kill()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(SimulatorEnded, match=str(process.pid)):
        process.stats(0)
    with pytest.raises(SimulatorEnded):
        process.wait_for("add")
    assert frontend.silent()


def test_a_terminated_process_ends_like_an_engine(frontend: Frontend, process: SimulatorProcess) -> None:
    process.terminate()
    assert process.returncode == 0
    assert frontend.raw_output() == [DEAD]


def test_a_process_can_be_told_to_crash(frontend: Frontend, process: SimulatorProcess) -> None:
    process.exit(7)
    assert process.returncode == 7
    assert frontend.silent()


def test_a_suspended_process_keeps_its_sockets_and_goes_on_later(frontend: Frontend, process: SimulatorProcess) -> None:
    process.suspend()
    frontend.add("a", max_new_tokens=1)
    process.unsuspend()
    assert frontend.rows()[0][0] == "a"


def test_a_suspended_process_can_be_closed(process: SimulatorProcess) -> None:
    process.suspend()
    process.close()
    assert process.returncode == 0


def test_a_process_ends_when_its_owner_is_gone(frontend: Frontend) -> None:
    owner = (
        "import os, sys, smg.mock\n"
        f"mock = smg.mock.spawn('ipc:///nowhere/engine-0', handshake_address={frontend.address!r})\n"
        "print(mock.pid, flush=True)\n"
        "sys.stdin.read()\n"
        "os._exit(0)"
    )
    with python("-c", owner, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        assert holder.stdin is not None
        holder.stdin.close()
        deadline = time.monotonic() + 10
        while alive(pid) and time.monotonic() < deadline:
            holder.wait(10)
        assert not alive(pid)


def alive(pid: int) -> bool:
    """Whether a process runs (one that nobody waited for yet does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def python(*argv: str, **pipes: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that finds the package under test, and does not outlive the test."""
    root = str(Path(smg.mock.__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with subprocess.Popen([sys.executable, *argv], env={**os.environ, "PYTHONPATH": path}, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_process_that_cannot_start_says_so_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SimulatorEnded, match="status 2"):
        smg.mock.spawn("ipc:///nowhere/engine-0", model_path="/nowhere")
    assert "no tokenizer.json" in capfd.readouterr().err


def test_descriptors_too_high_for_select_are_waited_for_all_the_same() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= 2000:
        pytest.skip("this process may not have such descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2001), hard))
    try:
        low, writer = os.pipe()
        high = fcntl.fcntl(low, fcntl.F_DUPFD, 2000)
        assert readable([low, high], 0.001) == []
        os.write(writer, b"x")
        assert sorted(readable([low, high], None)) == [low, high]
        for descriptor in (low, high, writer):
            os.close(descriptor)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Command line


def test_the_command_line_runs_ranks_and_ends_on_a_signal(frontend: Frontend) -> None:
    argv = ["--worker-url=ipc:///nowhere/engine-0", f"--handshake-address={frontend.address}"]
    with python("-m", "smg.mock", *argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        frontend.admit(0)
        assert run.stderr is not None
        said = "".join(run.stderr.readline().decode() for _ in range(3))
        assert frontend.address in said
        assert "rank 0, incarnation 1: live" in said
        run.send_signal(signal.SIGINT)
        assert frontend.raw_output() == [DEAD]
        assert run.wait(10) == 0


def test_the_command_line_ends_with_status_1_when_all_ranks_are_dead(frontend: Frontend) -> None:
    argv = ["--worker-url=ipc:///nowhere/engine-0", f"--handshake-address={frontend.address}"]
    with python("-m", "smg.mock", *argv, "--fault=die after_adds=1") as run:
        frontend.admit(0)
        frontend.add("a")
        assert run.wait(10) == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--worker-url=tcp://x"], "ipc://"),
        (["--ranks=0"], "--ranks 0"),
        (["--step-ms=-1"], "--step-ms"),
        (["--output-tokens=9-3"], "--output-tokens"),
        (["--registration=[]"], "--registration"),
        (["--fault=die rank"], "KEY=VALUE"),
        (["--start-index=65536"], "--start-index"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--worker-url=ipc:///nowhere/engine-0", *argv]) == 2
    assert said in capsys.readouterr().err


def test_the_help_lists_every_operation_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(f"\n  {name}" in said for name in operations())
    assert all(operation.__doc__ for operation in RANK_OPERATIONS.values())


def test_settings_survive_the_way_through_a_command_line() -> None:
    settings = smg.mock.Settings(
        worker_url="ipc:///a b/c", step_ms=0.5, withhold=("ready", "hello"), fault=("die rank=1",), hold=True,
        seed=-3, registration=json.dumps({"a": "x y"}), output_tokens="3-4",
    )  # fmt: skip
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert smg.mock.Settings.from_args(parser.parse_args(settings.to_argv())) == settings
