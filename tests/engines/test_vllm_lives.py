"""Real vLLM engines that are killed, stopped and started again, and the command that serves them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from vllm_driver import PATIENCE, Engines, free_port, wait_until
from vllm_questions import BODIES, CHAT, PROMPT, post
from vllm_served import wait_live

import smg
from smg import RankDied, SamplingParams
from smg.protocol.vllm import Model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SHORT = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)


class Life:
    """A group of two ranks, and the engines that one after the other serve it."""

    def __init__(self, directory: Path, model: Path, stack: ExitStack) -> None:
        self.directory, self.model, self.stack = directory, model, stack
        self.starts = 0
        self.group = stack.enter_context(
            smg.EngineGroup(
                f"ipc://{directory}/g",
                backend="vllm",
                ranks=2,
                handshake_address="tcp://127.0.0.1:0",
                model=Model(vocab_size=8192),
            )
        )

    def start(self) -> Engines:
        """Engines that dial the group, which serves when this returns."""
        self.starts += 1
        log = self.directory / f"log-{self.starts}"
        engines = self.stack.enter_context(closing(Engines(log, self.model, 2, self.group.handshake_address)))
        wait_live(self.group, engines)
        return engines

    def states(self) -> list[str]:
        return [rank.state for rank in self.group.ranks]

    def tokens(self, rank: int) -> list[int]:
        stream = self.group.submit(PROMPT, SHORT, rank=rank)
        return [token for out in stream.blocking(PATIENCE) for token in out.token_ids]

    def running(self) -> list[Iterator[smg.Output]]:
        """A request on each rank that has begun to come, held before its end."""
        for _ in range(10):
            readers = [self.group.submit(PROMPT, LONG, rank=rank).blocking(PATIENCE) for rank in (0, 1)]
            for reader in readers:
                next(reader)
            self.group.wait_utility("pause_scheduler", "keep")
            if [rank.in_flight for rank in self.group.ranks] == [1, 1]:
                return readers
            self.group.wait_utility("resume_scheduler")  # this process was slow, and one is at its end
        raise AssertionError("engines are done before they can be held")


@pytest.fixture
def live(request: pytest.FixtureRequest, ipc_dir: Path, tiny_models: Path) -> Iterator[Life]:
    with ExitStack() as stack:
        yield Life(ipc_dir, tiny_models / request.param, stack)


def last_of(reader: Iterator[smg.Output]) -> smg.Output:
    *_, last = reader
    return last


@pytest.mark.parametrize("live", ["llama"], indirect=True)
def test_a_dense_rank_dies_alone_and_a_group_takes_the_engines_of_a_new_start(live: Life) -> None:
    first = live.start()
    expected = live.tokens(0)
    assert live.tokens(1) == expected

    # The launcher would end the other rank too. It is kept from it, as one on another host would be.
    first.signal(signal.SIGSTOP)
    survivor, victim = live.running()
    first.processes()[1].kill()
    with pytest.raises(RankDied) as death:
        last_of(victim)
    assert death.value.rank == 1
    live.group.wait_utility("resume_scheduler", rank=0)
    assert (last_of(survivor).completion_tokens, live.states()) == (400, ["live", "dead"])
    assert [live.group.submit(PROMPT, SHORT).rank for _ in range(4)] == [0] * 4
    with pytest.raises(smg.InvalidRank):
        live.group.submit(PROMPT, SHORT, rank=1)
    assert live.tokens(0) == expected

    first.signal(signal.SIGCONT)
    wait_until(lambda: live.states() == ["dead", "dead"], "the launcher ends the other rank")
    with pytest.raises(smg.NoRank):
        live.group.submit(PROMPT, SHORT)

    second = live.start()
    assert [(rank.state, rank.incarnation) for rank in live.group.ranks] == [("live", 2)] * 2
    assert [live.tokens(rank) for rank in (0, 1)] == [expected] * 2

    # An engine that is asked to stop says how its requests ended.
    stopped, _ = live.running()
    queued = [
        live.group.submit(PROMPT, LONG, rank=0).blocking(PATIENCE) for _ in range(16)
    ]  # more than is done at once
    live.group.wait_utility("is_sleeping", rank=0)  # answered after all of them have been taken in
    second.processes()[0].terminate()
    assert "abort" in {last_of(reader).finish_reason for reader in (stopped, *queued)}
    wait_until(lambda: live.states() == ["dead", "dead"], "both ranks are gone")
    assert live.group.requests == 0


@pytest.mark.parametrize("live", ["moe"], indirect=True)
def test_ranks_in_lockstep_die_together_and_come_back_together(live: Life) -> None:
    first = live.start()
    expected = live.tokens(0)
    readers = live.running()
    first.signal(signal.SIGSTOP)
    first.processes()[1].kill()
    for rank, reader in enumerate(readers):
        with pytest.raises(RankDied) as death:
            last_of(reader)
        assert death.value.rank == rank
    wait_until(lambda: live.states() == ["dead", "dead"], "the group says so")
    with pytest.raises(smg.NoRank):
        live.group.submit(PROMPT, SHORT)
    first.close()

    live.start()
    assert [(rank.state, rank.incarnation) for rank in live.group.ranks] == [("live", 2)] * 2
    assert [live.tokens(rank) for rank in (0, 1, 0)] == [expected] * 3


def test_the_command_serves_engines_that_were_started_before_it(ipc_dir: Path, tiny_models: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    model = tiny_models / "llama"
    command = [sys.executable, "-m", "smg", "launch", "--backend", "vllm", "--model-path", str(model)]
    command += ["--worker-urls", f"ipc://{ipc_dir}/g", "--zmq-handshake-address", address]
    command += ["--port", "0", "--prometheus-port", "0"]
    with (
        closing(Engines(ipc_dir / "log", model, 1, address)),
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as router,
    ):
        try:
            url = said(router, r"answering on (http://\S+),")
            wait_until(lambda: is_ready(url), "the engine is served", PATIENCE)
            choice = post(url + CHAT, BODIES["chat"][1])["choices"][0]
            assert choice["finish_reason"] == "length"
            assert choice["message"]["content"]
            router.send_signal(signal.SIGTERM)
            assert router.wait(30) == 0
        finally:
            router.kill()


def said(process: subprocess.Popen[str], pattern: str) -> str:
    """What the pattern's group matches in the first line that has it."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError(f"it ended with {process.wait()} and never said {pattern}")


def is_ready(url: str) -> Any:
    try:
        with urllib.request.urlopen(f"{url}/readiness", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False
