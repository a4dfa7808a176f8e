"""Simulated vLLM ranks on real sockets: their handshake, utilities, and how they go deaf and die."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from mock_frontend import Sockets

import smg.mock
from smg._codec import decode_vllm
from smg._decoded import DecodedOutputs
from smg.mock import Simulator
from smg.mock.command import main
from smg.mock.vllm import VLLM
from smg.protocol import vllm
from smg.sampling import SamplingParams

DEAD = b"ENGINE_CORE_DEAD"
VERSION = "0.32.0"


class Frontend(Sockets):
    """What it says to vLLM's ranks, and how it reads theirs."""

    def add(self, rid: str, rank: int = 0, *, prompt: int = 3, **sampling: Any) -> None:
        params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **sampling})
        self.send(rank, vllm.ADD, vllm.encode_add(rid, range(prompt), params))

    def add_raw(self, rank: int = 0, **elements: Any) -> None:
        """A request that the router would not let through."""
        given = {"request_id": "raw", "prompt_token_ids": [1], "sampling_params": {}, "arrival_time": 1.5}
        self.send(rank, vllm.ADD, vllm.encode_request({**given, **elements}, VERSION))

    def call(self, call_id: int, method: str, *args: Any, rank: int = 0) -> None:
        self.send(rank, vllm.UTILITY, msgpack.packb([0, call_id, method, args]))

    def start_wave(self, wave: int, *ranks: int) -> None:
        for rank in ranks:
            self.send(rank, vllm.START_DP_WAVE, vllm.encode_wave(wave))

    def output(self, rank: int = 0) -> DecodedOutputs:
        """The next output message."""
        return decode_vllm(self.receive(self.outputs[rank]))

    def reply(self, rank: int = 0) -> Any:
        """The next answer to a utility call, past other messages: [call id, failure, result]."""
        while (utility := self.output(rank).utility) is None:
            pass
        return list(vllm.decode_utility(utility[1]))

    def tokens(self, rid: str, rank: int = 0) -> tuple[list[int], str]:
        """A request's tokens to its end, and how it ended; messages without rows and others' rows are passed over."""
        found: list[int] = []
        while True:
            for row in self.output(rank).rows:
                if row.rid == rid:
                    found += row.token_ids
                    if row.finish_reason:
                        return found, row.finish_reason


@pytest.fixture
def frontend(ipc_dir: Path) -> Iterator[Frontend]:
    end = Frontend(ipc_dir, ranks=3)
    yield end
    end.close()


Start = Callable[..., Simulator]


@pytest.fixture
def start(frontend: Frontend) -> Iterator[Start]:
    """Start a simulator in a thread and, unless told not to, take all its ranks in."""
    with contextlib.ExitStack() as stack:

        def start(admit: bool = True, **options: Any) -> Simulator:
            own = {"backend": "vllm", "record": True, "handshake_address": frontend.address}
            options = {**own, "step_ms": 1.0, "vocab_size": 1000, **options}
            mock = stack.enter_context(Simulator("ipc:///nowhere/engine-0", **options))
            if admit:
                frontend.admit_all(mock)
            return mock

        yield start


# Handshake


def test_the_registration_is_sent_before_ready(
    frontend: Frontend, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    for name in ("hello", "registration", "ready"):
        real = getattr(VLLM, name)
        monkeypatch.setattr(VLLM, name, lambda *args, name=name, real=real: (said.append(name), real(*args))[1])
    start()
    assert said == ["hello", "registration", "ready"]


def test_dense_ranks_register_as_independent(frontend: Frontend, start: Start) -> None:
    start(admit=False, start_index=1)
    dense = frontend.admit(1)
    assert (dense["vllm_version"], dense["data_parallel_size"], dense["data_parallel_rank"]) == (VERSION, 1, 1)


def test_a_withheld_registration_comes_when_told_to_proceed(frontend: Frontend, start: Start) -> None:
    mock = start(admit=False, withhold=("registration",))
    frontend.expect_status("HELLO", 0)
    frontend.send_init(0)
    frontend.expect_status("READY", 0)
    assert mock.stats(0)["state"] == "dialing"
    mock.proceed()
    frontend.registration(0)
    mock.wait_live()


# Requests and outputs


def test_a_request_streams_to_its_end_and_a_report_without_rows_follows(frontend: Frontend, start: Start) -> None:
    mock = start()
    frontend.add("a")
    said = [frontend.output() for _ in range(5)]
    assert [row.token_ids[0] for out in said for row in out.rows] == mock.reply(0, 4)
    assert [row.finish_reason for out in said for row in out.rows] == ["", "", "", "length"]
    assert said[0].rows[0].counts == (3, 0)
    assert [out.load.running for out in said if out.load] == [1, 1, 1, 0, 0]
    assert said[4].rows == []
    mock.wait_for("finish", rid="a", reason="length", completion_tokens=4)
    assert frontend.silent()


def test_a_prefill_step_is_reported_without_rows(frontend: Frontend, start: Start) -> None:
    start(prefill_chunk=2)
    frontend.add("a", prompt=5, max_tokens=1)
    assert [len(frontend.output().rows) for _ in range(4)] == [0, 0, 1, 0]


def test_an_abort_has_no_answer_but_the_report_of_an_empty_step(frontend: Frontend, start: Start) -> None:
    mock = start(hold=True)
    frontend.add("a")
    mock.wait_for("add")
    mock.step()
    assert frontend.output().rows[0].rid == "a"
    frontend.abort("a", "unknown")
    mock.wait_for("abort", rids=["a", "unknown"])
    mock.step()
    out = frontend.output()
    assert (out.rows, out.finished) == ([], [])
    assert mock.stats(0)["aborts"] == 2
    assert frontend.silent()


def test_decoded_requests_are_kept_by_the_engines_names(frontend: Frontend, start: Start) -> None:
    mock = start(ranks=2)
    frontend.add("a", rank=1, top_k=5)
    mock.wait_for("add", rank=1, outcome="queued")
    (request,) = mock.requests()
    assert (request["request_id"], request["prompt_token_ids"], request["rank"]) == ("a", [0, 1, 2], 1)
    assert (request["sampling_params"]["top_k"], request["sampling_params"]["min_p"]) == (5, 0.0)


def test_a_frame_can_be_sent_for_any_request(frontend: Frontend, start: Start) -> None:
    mock = start()
    mock.emit(0, "long-gone", token_ids=[5, 6], finish_reason="stop", prompt_tokens=9)
    (row,) = frontend.output().rows
    assert (row.rid, row.token_ids, row.finish_reason, row.counts) == ("long-gone", [5, 6], "stop", (9, 0))


def test_a_rank_can_claim_to_be_another(frontend: Frontend, start: Start) -> None:
    mock = start()
    mock.engine_index(7, 0)
    frontend.add("a", max_tokens=1)
    assert frontend.output().engine_index == 7


def test_malformed_frames_leave_the_running_requests_alone(frontend: Frontend, start: Start) -> None:
    mock = start(hold=True)
    frontend.add("a")
    mock.wait_for("add")
    mock.ragged("new_token_ids", 0)
    assert msgpack.unpackb(frontend.raw_output()[0])[1][0][1] is True
    mock.step()
    assert frontend.output().rows[0].counts == (3, 0)


# Deaf and dead


def test_after_an_undecodable_message_a_rank_finishes_what_it_has_and_hears_no_other(
    frontend: Frontend, start: Start
) -> None:
    mock = start(hold=True)
    frontend.add("a")
    mock.wait_for("add", rid="a")
    frontend.add_raw(sampling_params={"temperature": 3.0})
    assert "temperature=3.0" in mock.wait_for("deaf", rank=0)["reason"]
    with contextlib.suppress(zmq.ZMQError):  # once its connection is seen to be gone
        frontend.add("b")
    mock.release()
    assert frontend.tokens("a") == (mock.reply(0, 4), "length")
    stats = mock.stats(0)
    assert (stats["state"], stats["deafening"], stats["deadly"], stats["adds"]) == ("live", 1, 0, 2)
    assert (stats["queued"], stats["finished"]) == (1, {"length": 1})


def test_a_deaf_ranks_input_is_gone(frontend: Frontend, start: Start) -> None:
    mock = start()
    mock.deafen(0)
    mock.wait_for("deaf")
    with pytest.raises(zmq.ZMQError, match="unreachable"):
        for _ in range(10_000):
            frontend.inputs[0].poll(1)
            frontend.call(1, "is_sleeping")
    assert mock.stats(0)["deafening"] == 0  # it was no message's fault


def test_a_duplicate_id_kills_the_rank_with_its_last_word(frontend: Frontend, start: Start) -> None:
    mock = start(ranks=2, hold=True)
    frontend.add("a")
    frontend.add("a")
    assert "in use" in mock.wait_for("crashed", rank=0)["reason"]
    mock.wait_dead(0)
    assert frontend.raw_output() == [DEAD]
    assert mock.stats(0)["deadly"] == 1
    assert mock.stats(1)["state"] == "live"


def test_a_prompt_as_long_as_the_context_kills_the_rank(frontend: Frontend, start: Start) -> None:
    mock = start(max_model_len=16)
    frontend.add("fits", prompt=15)
    assert len(frontend.tokens("fits")[0]) == 1
    frontend.output()
    frontend.add("one-more", prompt=16)
    mock.wait_dead(0)
    assert frontend.raw_output() == [DEAD]


def test_a_second_clients_request_ends_the_output_without_a_word(frontend: Frontend, start: Start) -> None:
    mock = start()
    frontend.add_raw(client_index=1)
    mock.wait_dead(0)
    assert frontend.silent()


def test_a_request_that_cannot_be_prepared_is_answered_with_an_error(frontend: Frontend, start: Start) -> None:
    mock = start()
    frontend.add_raw(sampling_params={"max_tokens": None})
    out = frontend.output()
    assert (out.rows[0].finish_reason, [rid for rid, _ in out.finished], out.load) == ("error", ["raw"], None)
    assert mock.wait_for("add", outcome="rejected")["reason"]
    assert mock.stats(0)["state"] == "live"


def test_a_dense_rank_ignores_waves(frontend: Frontend, start: Start) -> None:
    mock = start()
    frontend.start_wave(1, 0)
    frontend.call(1, "is_sleeping")
    assert frontend.reply() == [1, None, False]
    stats = mock.stats(0)
    assert (stats["ignored"], stats["waves"], stats["deafening"]) == (1, 0, 0)
    assert "wave" not in stats


def test_an_engine_that_is_told_to_end_aborts_what_runs_and_sends_no_sentinel(frontend: Frontend, start: Start) -> None:
    mock = start(ranks=2, hold=True)
    frontend.add("a")
    mock.wait_for("add")
    mock.close()
    out = frontend.output()
    assert ([row.finish_reason for row in out.rows], [rid for rid, _ in out.finished]) == (["abort"], ["a"])
    assert frontend.silent(0)
    assert frontend.silent(1)


def test_a_restarted_rank_hears_again(frontend: Frontend, start: Start) -> None:
    mock = start()
    frontend.send(0, b"\x09", b"")
    mock.wait_for("deaf")
    frontend.open(0, incarnation=2)
    mock.restart(0)
    frontend.admit(0)
    mock.wait_live(0)
    frontend.add("a", max_tokens=1)
    assert frontend.tokens("a")[1] == "length"
    assert mock.stats(0)["deafening"] == 0


# Utilities


@pytest.mark.parametrize(
    ("method", "args", "result"),
    [
        ("get_supported_tasks", [], ["generate"]),
        ("is_sleeping", [], False),
        ("is_scheduler_paused", [], False),
        ("reset_prefix_cache", [], True),
        ("reset_prefix_cache", [True, True], True),
        ("reset_mm_cache", [], None),
        ("reset_encoder_cache", [], None),
        ("execute_dummy_batch", [], None),
        ("add_lora", [["x", 3, "/x"]], True),
        ("remove_lora", [9], False),
        ("list_loras", [], []),
        ("profile", [], None),
        ("profile", [True, "x"], None),
        ("collective_rpc", ["check_health"], [None]),
        ("get_weight_version", [], "default"),
        ("wake_up", [], True),
        ("resume_scheduler", [], None),
    ],
)
def test_a_method_answers_as_the_engines_own_does(
    method: str, args: list[Any], result: Any, frontend: Frontend, start: Start
) -> None:
    mock = start(max_loras=1)
    frontend.call(2**63 - 1, method, *args)
    assert frontend.reply() == [2**63 - 1, None, result]
    mock.wait_for("utility", method=method)
    assert mock.stats(0)["utilities"] == 1


@pytest.mark.parametrize(
    ("method", "args", "words"),
    [
        ("no_such_method", [], "has no attribute 'no_such_method'"),
        ("put", [1, 2, 3], "has no attribute"),
        (5, [], "has no attribute 5"),
        ("is_sleeping", [1], "argument"),
        ("add_lora", [["x", 0, "/x"]], "the id 0"),
        ("add_lora", [["x"]], "shorter"),
        ("pin_lora", [4], "not registered"),
        ("sleep", [1, "somehow"], "Invalid pause mode: somehow"),
        ("profile", None, "argument"),
    ],
)
def test_a_methods_failure_is_told_in_the_engines_words(
    method: Any, args: Any, words: str, frontend: Frontend, start: Start
) -> None:
    start(max_loras=1)
    frontend.send(0, vllm.UTILITY, msgpack.packb([0, 1, method, args]))
    call_id, failure, result = frontend.reply()
    assert (call_id, result) == (1, None)
    assert failure.startswith(f"Call to {method} method failed: ")
    assert words in failure


def test_adapters_come_and_go_where_there_are_any(frontend: Frontend, start: Start) -> None:
    mock = start(ranks=2)
    mock.die(0)
    frontend.call(1, "list_loras", rank=1)
    assert "LoRA is not enabled" in frontend.reply(1)[1]
    frontend.open(0, incarnation=2)
    start(max_loras=1, admit=False)
    frontend.admit(0)
    for call_id, (method, *args) in enumerate(
        [("add_lora", ["b", 7, "/b"]), ("add_lora", ["a", 2, "/a"]), ("pin_lora", 7), ("remove_lora", 2)]
    ):
        frontend.call(call_id, method, *args)
        assert frontend.reply() == [call_id, None, True]
    frontend.call(9, "list_loras")
    assert frontend.reply() == [9, None, [7]]


def test_calls_wait_for_the_step_under_way_unless_it_is_on_hold(frontend: Frontend, start: Start) -> None:
    mock = start(step_ms=60_000, hold=True)
    frontend.add("a")
    mock.wait_for("add")
    mock.step()
    frontend.output()
    mock.release()
    frontend.call(1, "is_sleeping")
    mock.wait_for("utility")
    assert mock.stats(0)["frames"] == 1
    mock.step()
    assert frontend.output().rows[0].rid == "a"
    assert frontend.reply() == [1, None, False]
    mock.hold()
    frontend.call(2, "is_sleeping")
    assert frontend.reply() == [2, None, False]


def test_sleep_aborts_what_runs_and_requests_wait_until_wake_up(frontend: Frontend, start: Start) -> None:
    mock = start(hold=True)
    frontend.add("a")
    mock.wait_for("add")
    frontend.call(1, "sleep")
    out = frontend.output()
    assert ([row.finish_reason for row in out.rows], [rid for rid, _ in out.finished]) == (["abort"], ["a"])
    assert frontend.reply() == [1, None, None]
    mock.release()
    frontend.add("b")
    mock.wait_for("add", rid="b")
    frontend.call(2, "is_sleeping")
    assert frontend.reply() == [2, None, True]
    frontend.call(3, "wake_up", ["weights"])
    assert frontend.reply() == [3, None, False]
    assert mock.stats(0)["waiting"] == 1
    frontend.call(4, "wake_up")
    assert frontend.reply() == [4, None, True]
    assert frontend.tokens("b")[1] == "length"


def test_a_pause_that_waits_is_answered_when_the_last_request_is_done(frontend: Frontend, start: Start) -> None:
    mock = start(hold=True)
    frontend.add("a", max_tokens=2)
    mock.wait_for("add")
    mock.step()
    frontend.call(1, "pause_scheduler", "wait")
    mock.wait_for("utility")
    frontend.add("b")
    mock.wait_for("add", rid="b")
    frontend.output()
    assert frontend.silent()
    mock.step(5)
    assert frontend.output().rows[0].finish_reason == "length"
    assert frontend.reply() == [1, None, None]
    frontend.call(2, "resume_scheduler")
    assert frontend.reply() == [2, None, None]
    mock.release()
    assert frontend.tokens("b")[1] == "length"


def test_a_pause_that_keeps_requests_stands_still_between_two_tokens(frontend: Frontend, start: Start) -> None:
    mock = start(hold=True)
    frontend.add("a")
    mock.wait_for("add")
    mock.step()
    frontend.call(1, "pause_scheduler", "keep")
    frontend.output()
    assert frontend.reply() == [1, None, None]
    mock.release()
    frontend.call(2, "is_scheduler_paused")
    assert frontend.reply() == [2, None, True]
    assert mock.stats(0)["steps"] == 1
    frontend.call(3, "resume_scheduler")
    assert frontend.reply() == [3, None, None]
    assert frontend.tokens("a") == (mock.reply(0, 4)[1:], "length")


def test_the_prefix_cache_is_not_reset_under_running_requests_unless_they_start_over(
    frontend: Frontend, start: Start
) -> None:
    mock = start(hold=True)
    frontend.add("a")
    mock.wait_for("add")
    mock.step()
    frontend.call(1, "reset_prefix_cache")
    assert frontend.reply() == [1, None, False]
    frontend.call(2, "reset_prefix_cache", True)
    assert frontend.reply() == [2, None, True]
    mock.release()
    assert frontend.tokens("a") == (mock.reply(0, 4)[1:], "length")
    assert mock.stats(0)["preempted"] == 1


# Command line


def test_the_backend_is_an_option_of_a_process_too(frontend: Frontend) -> None:
    address = frontend.address
    with smg.mock.spawn("ipc:///nowhere/engine-0", backend="vllm", handshake_address=address, vocab_size=1000) as mock:
        frontend.admit_all(mock)
        frontend.add("a", logit_bias={5: 1.0})
        assert frontend.tokens("a") == (mock.reply(0, 4), "length")
        assert mock.requests(0)[0]["request_id"] == "a"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--backend=vllm", "--vllm-version=0.11"], "--vllm-version 0.11"),
        (["--backend=vllm", "--lockstep"], "--lockstep"),
        (["--lockstep", "--ranks=2"], "--lockstep"),
        (["--backend=vllm", "--lockstep", "--ranks=2", "--data-parallel-size=4"], "--lockstep"),
        (["--backend=sglang"], "--backend"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["--worker-url=ipc:///nowhere/engine-0", *argv])
    except SystemExit as end:  # argparse's own
        status = end.code
    assert status == 2
    assert said in capsys.readouterr().err
