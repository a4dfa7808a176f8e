"""Simulated ranks that step together: how they park, what wakes them, and what hangs when they are not woken."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from mock_frontend import TIMEOUT_MS, Sockets

from smg._codec import decode_vllm
from smg._decoded import DecodedOutputs
from smg.mock import Simulator
from smg.mock.lockstep import SYNC_INTERVAL, Lockstep, Member
from smg.mock.model import Engine, Request
from smg.mock.replies import make_replies
from smg.mock.settings import Settings
from smg.mock.vllm import VLLM
from smg.protocol import vllm
from smg.sampling import SamplingParams

DEAD = b"ENGINE_CORE_DEAD"


class Group(Sockets):
    """The frontend of a lockstep group, and its simulator."""

    mock: Simulator

    def add(self, rid: str, rank: int, **sampling: Any) -> None:
        params = SamplingParams(**{"max_tokens": 2, "temperature": 0.0, **sampling})
        self.send(rank, vllm.ADD, vllm.encode_add(rid, [1, 2, 3], params))

    def start_wave(self, wave: int, *ranks: int, exclude: int | None = None) -> None:
        for rank in ranks or self.mock.indexes:
            self.send(rank, vllm.START_DP_WAVE, msgpack.packb([wave, exclude]))

    def call(self, call_id: int, method: str, *args: Any, rank: int) -> None:
        self.send(rank, vllm.UTILITY, msgpack.packb([0, call_id, method, args]))

    def output(self, rank: int) -> DecodedOutputs:
        return decode_vllm(self.receive(self.outputs[rank]))

    def finish(self, rid: str, rank: int) -> list[int]:
        """A request's tokens to its end, past messages of other kinds."""
        tokens: list[int] = []
        while True:
            for row in self.output(rank).rows:
                if row.rid == rid:
                    tokens += row.token_ids
                    if row.finish_reason:
                        return tokens

    def completed(self, rank: int) -> int:
        """The next wave that a rank says is complete, past messages of other kinds."""
        while (wave := self.output(rank).wave) is None:
            pass
        assert wave[0] == "complete"
        return wave[1]

    def reply(self, rank: int) -> Any:
        while (utility := self.output(rank).utility) is None:
            pass
        return list(vllm.decode_utility(utility[1]))

    def state(self, rank: int) -> tuple[int, bool]:
        """(wave, whether it is parked)."""
        stats = self.mock.stats(rank)
        return stats["wave"], stats["parked"]


@pytest.fixture
def start(ipc_dir: Path) -> Iterator[Callable[..., Group]]:
    with contextlib.ExitStack() as stack:

        def start(ranks: int = 2, **options: Any) -> Group:
            group = Group(ipc_dir, ranks)
            stack.callback(group.close)
            own = {"backend": "vllm", "lockstep": True, "ranks": ranks, "record": True, "vocab_size": 1000}
            options = {**own, "step_ms": 0.0, "handshake_address": group.address, **options}
            group.mock = stack.enter_context(Simulator("ipc:///nowhere/engine-0", **options))
            group.admit_all(group.mock)
            return group

        yield start


Start = Callable[..., Group]


def test_ranks_register_the_size_of_their_group_and_ready_has_a_hash(ipc_dir: Path) -> None:
    group = Group(ipc_dir, 2)
    options: dict[str, Any] = {"backend": "vllm", "lockstep": True, "handshake_address": group.address}
    try:
        with Simulator("ipc:///nowhere/engine-0", ranks=2, **options):
            hashes = []
            while len(hashes) < 2:
                identity, payload = group.receive(group.handshake)
                said = msgpack.unpackb(payload)
                if said["status"] == "HELLO":
                    assert "parallel_config_hash" not in said
                    group.send_init(identity[0])
                else:
                    hashes.append(said["parallel_config_hash"])
            assert hashes[0] == hashes[1]
            for rank in (0, 1):
                registered = group.registration(rank)
                assert (registered["data_parallel_size"], registered["data_parallel_rank"]) == (2, rank)
    finally:
        group.close()


def test_a_request_hangs_until_every_rank_is_woken(start: Start) -> None:
    group = start(ranks=3)
    group.add("a", 1)
    group.mock.wait_for("add", rid="a")
    group.start_wave(1, 0, 1)
    group.mock.wait_for("wave", count=2)
    assert [group.state(rank) for rank in range(3)] == [(1, False), (1, False), (0, True)]
    assert group.mock.stats(1)["steps"] == 0
    assert all(group.silent(rank) for rank in range(3))
    group.start_wave(1, 2)
    assert group.finish("a", 1) == group.mock.reply(0, 2)


def test_a_rank_that_stands_in_a_step_does_not_answer_calls_and_a_parked_one_does(start: Start) -> None:
    group = start()
    group.add("a", 0)
    group.mock.wait_for("add")
    for rank in (0, 1):
        group.call(rank, "is_sleeping", rank=rank)
    assert group.reply(1) == [1, None, False]
    group.mock.wait_for("utility", count=2)
    assert group.mock.stats(0)["frames"] == 0
    group.start_wave(1, 1)
    assert group.reply(0) == [0, None, False]


def test_every_rank_tells_the_end_of_a_wave_and_counts_on(start: Start) -> None:
    group = start()
    group.add("a", 0)
    group.start_wave(5)
    for rank in (0, 1):
        assert group.completed(rank) == 5
        group.mock.wait_for("parked", rank=rank, wave=5)
        assert group.state(rank) == (6, True)
        assert group.silent(rank)


def test_a_group_parks_at_the_next_agreement_after_its_last_token(start: Start) -> None:
    group = start(hold=True)
    group.add("a", 0, max_tokens=3)
    group.start_wave(1)
    group.mock.wait_for("wave", count=2)
    for step in range(SYNC_INTERVAL):
        assert group.state(0) == group.state(1) == (1, False), step
        group.mock.step()
    assert group.state(0) == group.state(1) == (2, True)
    assert group.mock.stats(0)["steps"] == 3
    assert group.mock.stats(1)["steps"] == 0  # all of them without requests, and without output
    assert group.output(1).wave == ("complete", 1)


def test_a_wake_up_without_a_request_costs_one_step(start: Start) -> None:
    group = start(hold=True)
    group.start_wave(3)
    group.mock.wait_for("wave", count=2)
    group.mock.step()
    assert group.state(0) == group.state(1) == (4, True)


def test_a_stale_wave_is_not_heeded_and_its_request_hangs(start: Start) -> None:
    group = start()
    group.start_wave(1)
    assert group.completed(0) == group.completed(1) == 1
    group.add("a", 0)
    group.start_wave(1)
    group.mock.wait_for("wave", count=4)
    assert group.state(0) == group.state(1) == (2, True)
    assert [group.mock.stats(rank)["stale"] for rank in (0, 1)] == [1, 1]
    assert group.mock.stats(0)["steps"] == 0
    group.start_wave(2)
    assert group.finish("a", 0) == group.mock.reply(0, 2)


def test_the_excluded_rank_is_not_woken_by_a_wave(start: Start) -> None:
    group = start()
    group.start_wave(1, exclude=1)
    group.mock.wait_for("wave", count=2)
    assert [group.state(rank) for rank in (0, 1)] == [(1, False), (0, True)]


def test_a_wave_that_comes_to_one_rank_alone_holds_it_until_the_others_come(start: Start) -> None:
    group = start()
    group.start_wave(1, 0)
    group.mock.wait_for("wave", rank=0)
    assert group.state(0) == (1, False)
    group.add("a", 1)  # the other one enters with its request
    assert group.finish("a", 1) == group.mock.reply(0, 2)


def test_one_rank_on_hold_stops_the_group(start: Start) -> None:
    group = start()
    group.mock.hold(1)
    group.add("a", 0)
    group.start_wave(1)
    group.mock.wait_for("wave", count=2)
    assert group.mock.stats(0)["steps"] == 0
    group.mock.step(rank=1)
    assert group.output(0).rows[0].token_ids == group.mock.reply(0, 1)
    assert group.mock.stats(0)["steps"] == 1
    group.mock.release(1)
    assert group.finish("a", 0) == group.mock.reply(0, 2)[1:]


def test_steps_asked_of_one_rank_wait_for_the_others_to_be_asked(start: Start) -> None:
    group = start(hold=True)
    group.add("a", 0)
    group.start_wave(1)
    group.mock.wait_for("wave", count=2)
    group.mock.step(2, rank=0)
    assert group.mock.stats(0)["steps"] == 0
    group.mock.step(1, rank=1)
    assert group.mock.stats(0)["steps"] == 1
    group.mock.hold(0)  # forgets the other one
    group.mock.step(5, rank=1)
    assert group.mock.stats(0)["steps"] == 1


@dataclass
class Stub:
    """A peer without sockets."""

    engine: Engine
    member: Member = field(default_factory=Member)
    incarnation: int = 1
    state: str = "live"
    hurries: bool = False

    @property
    def enters(self) -> bool:
        return self.member.running or self.engine.due is not None

    def complete_step(self, now: float) -> None:
        self.engine.step(now)

    def attend(self) -> None:
        pass

    def lose(self) -> None:
        self.state = "dead"


def test_the_longest_part_of_a_step_is_its_length() -> None:
    settings = Settings(backend="vllm", vocab_size=1000, step_ms=1.0, decode_per_req_ms=1000.0)
    group = Lockstep(settings.step_ms / 1000)
    stubs = [Stub(Engine(settings, make_replies(settings), VLLM.ending)) for _ in range(3)]
    group.peers += stubs
    for count, stub in enumerate(stubs):
        stub.member.start(1)
        for number in range(count):
            stub.engine.add(Request(rid=f"{number}", prompt_tokens=3, max_tokens=3), 0.0)
    now, ends = 0.0, []
    while (due := group.due()) is not None and len(ends) < 4:
        now = max(now, due)
        group.advance(now)
        ends.append(now)
    assert ends == pytest.approx([0.0, 0.001, 2.002, 4.003])  # a prefill, and two steps of two requests
    assert [stub.engine.counts.tokens for stub in stubs] == [0, 3, 6]
    assert [stub.engine.counts.late_steps for stub in stubs] == [0, 0, 0]


def test_the_death_of_one_rank_kills_those_that_step_with_it(start: Start) -> None:
    group = start(ranks=3)
    group.mock.die(2)
    assert group.mock.stats(0)["state"] == "live"  # parked: it needs nobody
    group.add("a", 0)
    assert "peer" in group.mock.wait_for("crashed", rank=0)["reason"]
    assert group.raw_output(0) == [DEAD]
    assert group.mock.stats(1)["state"] == "live"
    group.start_wave(1, 1)
    group.mock.wait_dead(1)
    assert group.raw_output(1) == [DEAD]


def test_a_rank_that_came_back_alone_is_no_peer(start: Start) -> None:
    group = start()
    group.open(1, incarnation=2)
    group.mock.restart(1)
    group.expect_status("HELLO", 1)
    group.send_init(1)
    group.expect_status("READY", 1)
    group.registration(1)
    group.mock.wait_live(1)
    group.start_wave(1)
    group.mock.wait_for("wave", rank=1)
    group.mock.wait_dead(0)
    assert group.state(1) == (1, False)  # it waits for a peer of its own


def test_a_whole_group_that_came_back_starts_anew(start: Start) -> None:
    group = start()
    group.add("a", 0, max_tokens=1000)
    group.start_wave(7)
    group.output(0)
    for rank in (0, 1):
        group.open(rank, incarnation=2)
    group.mock.restart()
    group.admit_all(group.mock)
    assert group.state(0) == group.state(1) == (0, True)
    group.add("b", 1)
    group.start_wave(1)
    assert group.finish("b", 1) == group.mock.reply(0, 2)


def test_a_pause_needs_every_rank_and_waves_are_not_heeded_until_every_rank_resumed(start: Start) -> None:
    group = start()
    group.call(1, "pause_scheduler", rank=0)
    group.mock.wait_for("utility")
    assert group.state(0) == (0, False)
    assert group.silent(0)
    group.call(2, "pause_scheduler", rank=1)
    assert (group.reply(0), group.reply(1)) == ([1, None, None], [2, None, None])
    group.add("a", 0)
    group.start_wave(9)
    group.mock.wait_for("wave", count=2)
    assert group.state(0) == group.state(1) == (1, True)
    group.call(3, "resume_scheduler", rank=1)
    group.mock.wait_for("utility", count=3)
    assert group.mock.stats(1)["frames"] == 2  # the end of the wave, and the pause
    group.call(4, "resume_scheduler", rank=0)
    assert group.reply(1) == [3, None, None]
    assert group.reply(0) == [4, None, None]
    assert group.finish("a", 0) == group.mock.reply(0, 2)  # a request that waits wakes all


def test_a_pause_in_flight_cannot_be_resumed_from(start: Start) -> None:
    group = start()
    group.mock.hold()
    group.call(1, "sleep", rank=0)
    group.call(2, "wake_up", rank=0)
    call_id, failure, _ = group.reply(0)
    assert call_id == 2
    assert "still in flight" in failure


def test_a_member_heeds_waves_from_its_own_on() -> None:
    member = Member(wave=4)
    assert not member.start(3)
    assert not member.running
    assert member.start(4)
    assert member.running
    assert member.start(9)
    member.park()
    assert (member.wave, member.running, member.completed) == (10, False, [9])


# The race of parking and submitting


class Router:
    """What a frontend of a lockstep group has to do.

    It starts a wave for every submit, and again when a rank parks beside a request: on every rank, newer than any.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.clock = 0
        self.poller = zmq.Poller()
        for rank in group.mock.indexes:
            self.poller.register(group.outputs[rank], zmq.POLLIN)
        self.done: set[str] = set()

    def submit(self, rid: str, rank: int, *, wake: bool = True) -> None:
        self.group.add(rid, rank)
        if wake:
            self.wake()

    def run_until(self, rid: str) -> bool:
        """Take outputs until a request is done. False when nothing comes any more."""
        while rid not in self.done:
            ready = self.poller.poll(TIMEOUT_MS)
            if not ready:
                return False
            for socket, _ in ready:
                out = decode_vllm(socket.recv_multipart())
                self.done.update(row.rid for row in out.rows if row.finish_reason)
                if out.wave is not None:
                    self.clock = max(self.clock, out.wave[1] + 1)
                    if rid not in self.done:  # this rank may have parked with the start that was meant for the request
                        self.wake()
        return True

    def wake(self) -> None:
        self.clock += 1
        self.group.start_wave(self.clock)


def test_no_wake_up_is_lost_when_every_submit_starts_a_new_wave(start: Start) -> None:
    router = Router(start())
    draw = random.Random(5)
    for turn in range(300):
        rid = f"{turn:024x}"
        router.submit(rid, draw.randrange(2))
        # Its last token comes up to 15 steps before the group parks: the next submit meets it at any moment.
        assert router.run_until(rid), f"request {turn} hangs"


def test_a_wake_up_that_is_left_out_because_the_group_seems_to_run_is_lost(start: Start) -> None:
    group = start()
    router = Router(group)
    router.submit("a", 0)
    group.mock.wait_for("parked", count=2)
    router.submit("b", 1, wake=False)  # the notices have not been read yet
    group.mock.wait_for("add", rid="b")
    assert (group.mock.stats(1)["waiting"], group.state(0)) == (1, (2, True))
    router.submit("c", 0)
    assert router.run_until("b")
