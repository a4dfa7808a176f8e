"""Whatever happens on the wires between a router and its ranks, each request ends once, with what reached it.

What may be seen under each fault:

    delay, or another order among ranks    nothing of it
    an output dropped                      its tokens are missing; without its end, the deadline or a death ends it
    an output twice                        its tokens twice, unless the first was the end: then the second is late
    an output cut short, or garbled        if it still decodes, what it says now; else nothing, and of three such
                                           frames in a row the rank dies
    a request dropped                      its deadline ends it
    a request twice                        what the engine makes of that, and one end
    the rank's output or input closed      RankDied for all that it had, after what had come
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

import smg
from smg.errors import DecodeError
from smg.mock import Simulator
from smg.protocol import tokenspeed
from tests.chaos.zmq_proxy import Link, Proxy, wait_for

RANKS = 2
SHORT, LONG = 0.3, 60.0  # seconds, deadlines
ranks = st.integers(0, RANKS - 1)


class Request:
    """What the model knows of one request."""

    def __init__(self, stream: smg.Stream, seed: int, wanted: int, deadline: float, began: float) -> None:
        self.stream, self.seed, self.wanted = stream, seed, wanted
        self.outputs = stream.blocking(timeout=0)
        self.rank = stream.rank
        self.incarnation = 0
        self.rid = ""  # on the wire, once it was seen there
        self.expected: list[int] = []  # tokens of the rows that reached the router for it
        self.seen: list[int] = []  # tokens that its reader got
        self.end: str | type[smg.Error] | None = None  # finish reason, or the error that is due
        self.told: str | type[smg.Error] | None = None  # how it ended for its reader
        self.clean = True  # nothing was done to its messages
        self.expires = deadline == SHORT
        self.began = began

    @property
    def live(self) -> bool:
        return self.end is None


class Wires(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="smg-"))
        self.group = smg.EngineGroup(
            f"ipc://{self.directory}/g",
            backend="tokenspeed",
            ranks=RANKS,
            handshake_address="tcp://127.0.0.1:0",
            stall_timeout=0,
        )
        self.proxy = Proxy(self.group, self.directory)
        self.mock = Simulator(
            self.group.url, ranks=RANKS, handshake_address=self.proxy.address, hold=True, step_ms=0, no_sentinel=True
        ).start()
        self.all: list[Request] = []
        self.seeds = 0
        self.dead: set[int] = set()
        self.bad_in_row = [0] * RANKS
        self.told_router = [0] * RANKS  # frames, over all incarnations
        self.told_engine = [0] * RANKS  # messages, of this incarnation
        self.proxy.wait_for(lambda: self.group.live == RANKS)
        self.incarnations = [info.incarnation for info in self.group.ranks]

    def teardown(self) -> None:
        if not hasattr(self, "mock"):
            return
        try:
            self.everything_ends()
        finally:
            self.mock.close()
            self.proxy.close()
            self.group.close()
            shutil.rmtree(self.directory)

    # ------------------------------------------------------------ consumers

    @rule(
        target=requests,
        wanted=st.integers(1, 6),
        deadline=st.sampled_from([LONG, LONG, LONG, SHORT]),
        pinned=st.none() | ranks,
    )
    def submit(self, wanted: int, deadline: float, pinned: int | None) -> object:
        self.seeds += 1
        params, began = smg.SamplingParams(max_tokens=wanted, seed=self.seeds), time.monotonic()
        try:
            stream = self.group.submit([1, 2, 3], params, deadline=deadline, rank=pinned)
        except (smg.NoRank, smg.InvalidRank):
            assert self.dead if pinned is None else pinned in self.dead
            return multiple()
        request = Request(stream, self.seeds, wanted, deadline, began)
        assert request.rank not in self.dead
        request.incarnation = self.incarnations[request.rank]
        self.all.append(request)
        self.proxy.wait_for(lambda: self.identify(request) or (request.expires and self.expired(request)))
        return request

    def identify(self, request: Request) -> bool:
        """Whether its ADD has come to the proxy, and under which id."""
        for kind, payload, *_ in self.link(request.rank).requests:
            if kind == tokenspeed.ADD and (add := tokenspeed.decode_request(payload)).sampling["seed"] == request.seed:
                request.rid = add.rid
                return True
        return False

    def expired(self, request: Request) -> bool:
        return time.monotonic() - request.began >= SHORT

    @rule(request=requests)
    def read(self, request: Request) -> None:
        """Everything that there is for the reader."""
        while True:
            try:
                out = next(request.outputs)
            except TimeoutError:
                assert request.told is None
                assert request.live
                assert request.seen == request.expected
                return
            except StopIteration:
                assert request.told is not None, "it just stopped"
                return
            except smg.StreamError as error:
                self.failed(request, error)
                continue
            assert request.told is None, "an output after the end"
            assert out.rank == request.rank
            request.seen += out.token_ids
            assert request.seen == request.expected[: len(request.seen)]
            if out.finish_reason is not None:
                assert out.finish_reason == request.end
                assert request.seen == request.expected
                request.told = out.finish_reason

    def failed(self, request: Request, error: smg.StreamError) -> None:
        assert request.told is None, "a second end"
        if isinstance(error, smg.DeadlineExceeded) and request.expires:
            assert self.expired(request)
            assert request.seen == request.expected[: len(request.seen)]
            request.end = smg.DeadlineExceeded
        else:
            assert type(error) is request.end
            assert request.seen == request.expected or request.expires
        request.told = type(error)

    @rule(request=requests)
    def abort(self, request: Request) -> None:
        request.stream.abort()
        if request.live:
            request.end = smg.Aborted

    # ------------------------------------------------------------ requests on their way

    def link(self, rank: int) -> Link:
        return self.proxy.links[rank]

    @rule(rank=ranks, how=st.sampled_from(["deliver", "deliver", "deliver", "drop", "twice"]))
    def pass_request(self, rank: int, how: str) -> None:
        """What the router sent first, of what is held for the rank."""
        self.proxy.pump()
        if rank in self.dead or not self.link(rank).requests:
            return
        message = self.link(rank).requests.popleft()
        if how != "deliver":
            for request in self.all:
                request.clean = request.clean and request.rid.encode() not in message[1]
        for _ in range({"deliver": 1, "drop": 0, "twice": 2}[how]):
            self.link(rank).tell_rank(message)
            self.told_engine[rank] += 1
        wait_for(lambda: self.engine_took(rank) == self.told_engine[rank])

    def engine_took(self, rank: int) -> int:
        stats = self.mock.stats(rank)
        return stats["adds"] + stats["aborts"]

    # ------------------------------------------------------------ outputs on their way

    @rule(rank=ranks, count=st.integers(1, 3))
    def step(self, rank: int, count: int) -> None:
        """The engine makes steps; what it puts out is held."""
        if rank in self.dead:
            return
        self.mock.step(count, rank)
        frames = self.mock.stats(rank)["frames"]
        self.proxy.wait_for(lambda: self.link(rank).outputs_seen == frames)

    @rule(rank=ranks, how=st.sampled_from(["deliver"] * 6 + ["drop", "twice"]))
    def pass_output(self, rank: int, how: str) -> None:
        if rank in self.dead or not self.link(rank).outputs:
            return
        frame = self.link(rank).outputs.popleft()
        if how != "deliver":
            self.spoilt(frame)
        for _ in range({"deliver": 1, "drop": 0, "twice": 2}[how]):
            self.tell_router(rank, frame)

    @rule(rank=ranks, data=st.data())
    def garble_output(self, rank: int, data: st.DataObject) -> None:
        """Cut short, or with some bytes exchanged."""
        if rank in self.dead or not self.link(rank).outputs:
            return
        frame = bytearray(self.link(rank).outputs.popleft())
        self.spoilt(bytes(frame))
        places = st.integers(0, len(frame) - 1)
        if data.draw(st.booleans()):
            del frame[data.draw(places) :]
        else:
            for at, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=3)):
                frame[at] = byte
        self.tell_router(rank, bytes(frame))

    @rule(rank=ranks)
    def pass_everything(self, rank: int) -> None:
        while rank not in self.dead and self.link(rank).outputs:
            self.tell_router(rank, self.link(rank).outputs.popleft())

    def spoilt(self, frame: bytes) -> None:
        """Something is done to this frame of the engine's: its requests need not get their own reply."""
        rids = {row.rid for row in tokenspeed.decode_outputs(frame).rows}
        for request in self.all:
            request.clean = request.clean and request.rid not in rids

    def tell_router(self, rank: int, frame: bytes) -> None:
        """Send a frame on, apply it to the model, and wait until the router has applied it."""
        if rank in self.dead:
            return
        try:
            rows = tokenspeed.decode_outputs(frame).rows
        except DecodeError:
            rows = []
            self.bad_in_row[rank] += 1
        else:
            self.bad_in_row[rank] = 0
        for row in rows:
            for request in self.all:
                if request.live and request.rid == row.rid and self.present(request, rank):
                    request.expected += row.token_ids
                    request.clean = request.clean and request.expected == self.reply(request)[: len(request.expected)]
                    request.end = row.finish_reason or None
        self.link(rank).tell_router(frame)
        self.told_router[rank] += 1
        counters = ("frames", "undecodable")
        wait_for(lambda: sum(self.group.counters[name][rank] for name in counters) == self.told_router[rank])
        if self.bad_in_row[rank] == 3:
            self.died(rank)

    def present(self, request: Request, rank: int) -> bool:
        return (request.rank, request.incarnation) == (rank, self.incarnations[rank])

    def reply(self, request: Request) -> list[int]:
        return self.mock.reply(request.seed, request.wanted)

    # ------------------------------------------------------------ lives

    @rule(rank=ranks, end=st.sampled_from(["output", "input", "both"]))
    def close_wire(self, rank: int, end: str) -> None:
        if rank in self.dead:
            return
        if end != "input":
            self.link(rank).close_output()
        if end != "output":
            self.link(rank).close_input()
        if end == "input":
            # Nobody misses it until something is sent: a rank that only speaks is found by the next request.
            wait_for(lambda: self.send_in_vain(rank))
        self.died(rank)

    def send_in_vain(self, rank: int) -> bool:
        """Whether a rank that hears nothing is given up, after one more request for it."""
        try:
            stream = self.group.submit([1], smg.SamplingParams(max_tokens=1), rank=rank, deadline=0.05)
        except smg.InvalidRank:
            return True
        with pytest.raises((smg.RankDied, smg.DeadlineExceeded)):
            list(stream.blocking(timeout=5))
        return False

    def died(self, rank: int) -> None:
        wait_for(lambda: self.group.ranks[rank].state == "dead")
        for request in self.all:
            if request.live and self.present(request, rank):
                request.end = smg.RankDied
        self.dead.add(rank)

    @rule(rank=ranks)
    def revive(self, rank: int) -> None:
        """The engine dials again, whether or not it is dead to the router."""
        if rank not in self.dead:
            return
        self.mock.restart(rank)
        self.proxy.wait_for(lambda: self.group.ranks[rank].state == "live")
        assert self.group.ranks[rank].incarnation == self.incarnations[rank] + 1
        self.incarnations[rank] += 1
        self.bad_in_row[rank] = self.told_engine[rank] = 0
        self.dead.discard(rank)

    # ------------------------------------------------------------ what must hold

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "mock"):
            return
        for rank in range(RANKS):
            mine = [request for request in self.all if request.live and request.rank == rank]
            sure = sum(not request.expires for request in mine)
            assert sure <= self.group.in_flight[rank] <= len(mine)

    def everything_ends(self) -> None:
        """What is held comes through; what was lost is ended by its deadline, or by the death of its rank."""
        for rank in range(RANKS):
            while rank not in self.dead and (self.link(rank).requests or self.link(rank).outputs):
                self.pass_request(rank, "deliver")
                self.pass_everything(rank)
            if rank not in self.dead:
                self.step(rank, 100)
                self.pass_everything(rank)
        for request in self.all:
            if request.live and request.expires:
                wait_for(lambda request=request: self.read(request) or request.told is not None)
        for rank in range(RANKS):
            if any(request.live and request.rank == rank for request in self.all):
                self.close_wire(rank, "output")
        for request in self.all:
            self.read(request)
            self.read(request)
            assert request.told is not None, "it never ended"
            if request.clean and request.told == "length":
                assert request.seen == self.reply(request)
        assert self.group.in_flight.tolist() == [0] * RANKS
        _, _, live, untaken = self.group._core.slots
        assert (live, untaken) == (0, 0)


TestWires = Wires.TestCase
TestWires.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestWiresForLong(Wires.TestCase):
    settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
