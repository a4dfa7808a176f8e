"""The slot table against a model: in every order of events each request ends once, with its own tokens."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

import smg
from smg._outlets import new_outlet
from tests.engine.rig import Rig

RANKS = 3
LIMIT = 6
tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=4)


class Request:
    """What the model knows of one request."""

    def __init__(self, stream, outlet):
        self.stream = stream
        self.iterator = None if outlet else stream.blocking(timeout=0)
        self.outlet = outlet
        self.rid = stream.request_id
        self.rank = stream.rank
        self.incarnation = 0
        self.expected: list[int] = []  # every token that was applied
        self.seen: list[int] = []  # what came out
        self.end: str | type[Exception] | None = None  # finish reason, or the error that is due
        self.told = False  # the ending came out
        self.wanted = True  # somebody still reads it
        self.sent = False

    @property
    def live(self):
        return self.end is None


class SlotTable(RuleBasedStateMachine):
    requests = Bundle("requests")
    use_epoll = True

    @initialize()
    def start(self):
        self.rig = Rig(RANKS, max_inflight=LIMIT, use_epoll=self.use_epoll)
        self.core = self.rig.core
        self.outlet = new_outlet(self.core)
        self.all: list[Request] = []
        self.dead: set[int] = set()
        self.late = [0] * RANKS
        self.foreign = [0] * RANKS
        self.refused = 0

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        try:
            self.read_everything()
            for request in self.all:
                request.iterator = request.stream = None
            self.outlet.close()
            allocated, free, live, ended = self.core.slots
            assert (live, ended) == (0, 0)
            assert allocated == free
        finally:
            self.rig.close()

    # ------------------------------------------------------------ the caller's side

    def live_on(self, rank):
        return [request for request in self.all if request.live and request.rank == rank]

    @rule(
        target=requests,
        pinned=st.none() | st.integers(0, RANKS - 1),
        outlet=st.booleans(),
        overdue=st.sampled_from([False, False, False, True]),
    )
    def submit(self, pinned, outlet, overdue):
        before = [self.core.in_flight(rank) for rank in range(RANKS)]
        candidates = [rank for rank in range(RANKS) if rank not in self.dead]
        try:
            stream = self.rig.submit(
                rank=-1 if pinned is None else pinned,
                outlet=self.outlet if outlet else None,
                deadline=1e-9 if overdue else 0,
            )
        except smg.InvalidRank:
            assert pinned in self.dead
            return multiple()
        except smg.NoRank:
            assert pinned is None
            assert not candidates
            return multiple()
        except smg.Overloaded:
            assert all(before[rank] >= LIMIT for rank in ([pinned] if pinned is not None else candidates))
            return multiple()
        request = Request(stream, outlet)
        request.incarnation = self.rig.incarnations[stream.rank]
        assert stream.rank not in self.dead
        if pinned is not None:
            assert stream.rank == pinned
        else:
            assert before[stream.rank] == min(before[rank] for rank in candidates)
        self.all.append(request)
        if overdue:
            self.pump()  # it is past already
            request.end = smg.DeadlineExceeded
        return request

    @rule(request=requests)
    def abort(self, request):
        if request.stream is None:
            return
        request.stream.abort()
        if request.live:
            request.end = smg.Aborted
        if request.outlet and not request.told:
            request.wanted = False  # nothing more comes out of the outlet
            request.told = True

    @rule(request=consumes(requests))
    def drop(self, request):
        if request.outlet:
            return  # the outlet keeps it
        request.iterator = request.stream = None
        request.wanted = False
        request.told = True
        request.end = request.end or "dropped"

    @rule(request=requests)
    def read(self, request):
        if request.iterator is None:
            return
        try:
            out = next(request.iterator)
        except TimeoutError:
            assert request.live
            assert request.seen == request.expected
        except StopIteration:
            assert request.told
        except smg.StreamError as error:
            self.ended(request, error)
        else:
            self.got(request, out)

    @rule()
    def take(self):
        by_stream = {id(request.stream): request for request in self.all if request.outlet and request.stream}
        for stream, out in self.outlet.take():
            request = by_stream[id(stream)]
            assert request.wanted
            if isinstance(out, Exception):
                self.ended(request, out)
            else:
                self.got(request, out)
        for request in by_stream.values():
            if request.wanted:
                assert request.seen == request.expected
                assert request.told == (not request.live)

    @rule()
    def replace_outlet(self):
        self.outlet.close()
        for request in self.all:
            if request.outlet and not request.told:
                request.end = request.end or "dropped"
                request.wanted, request.told = False, True
        self.outlet = new_outlet(self.core)

    def got(self, request, out):
        assert not request.told
        request.seen += out.token_ids
        assert request.seen == request.expected[: len(request.seen)]
        assert out.rank == request.rank
        if out.finish_reason is not None:
            assert out.finish_reason == request.end
            assert request.seen == request.expected
            request.told = True

    def ended(self, request, error):
        assert not request.told
        assert request.seen == request.expected
        assert type(error) is request.end
        request.told = True

    def read_everything(self):
        self.take()
        for request in self.all:
            for _ in range(3):
                self.read(request)
            if request.wanted and request.stream is not None:
                assert request.seen == request.expected
                assert request.told == (not request.live)

    # ------------------------------------------------------------ the engine's side

    def pump(self):
        events = self.rig.pump()
        for rank in range(RANKS):
            if self.rig.ranks[rank] is not None:
                for request in self.all:
                    if request.incarnation == self.rig.incarnations[rank] and request.rank == rank:
                        request.sent = request.sent or request.rid in self.rig.ranks[rank].adds
        return events

    @rule()
    def turn(self):
        assert self.pump() == []

    @rule(rank=st.integers(0, RANKS - 1), data=st.data())
    def frame(self, rank, data):
        """A frame with rows for requests of this rank, of others, for ended and invented ones, also twice."""
        if rank in self.dead:
            return
        self.pump()
        rows = []
        known = data.draw(st.lists(st.sampled_from(self.all), max_size=6)) if self.all else []
        finished = set()
        for request in known:
            tokens = data.draw(tokens_lists)
            reason = data.draw(st.sampled_from(["", "", "stop", "length", "abort", "odd"]))
            rows.append((request.rid, tokens, reason, 1))
            mine = request.rank == rank and request.incarnation == self.rig.incarnations[rank]
            if not (mine and request.live and request not in finished):
                self.late[rank] += 1
                continue
            request.expected += tokens
            if reason:
                finished.add(request)
                request.end = reason
        for rid in data.draw(st.lists(st.sampled_from(["", "x", "0" * 24, "ff" * 12, "A" * 24]), max_size=2)):
            rows.append((rid, [1], "stop", 1))
            self.foreign[rank] += 1
        self.rig.emit(rank, rows)
        assert self.pump() == []

    @rule(rank=st.integers(0, RANKS - 1), how=st.sampled_from(["sentinel", "garbage"]))
    def die(self, rank, how):
        if rank in self.dead:
            return
        if how == "sentinel":
            self.rig.send(rank, b"ENGINE_CORE_DEAD")
        else:
            for _ in range(3):
                self.rig.send(rank, b"\xc1")
        kinds = [event[0] for event in self.pump()]
        assert 2 in kinds  # EventKind.DEAD
        for request in self.live_on(rank):
            request.end = smg.RankDied
        self.check_aborts(rank)
        self.rig.bury(rank)
        self.dead.add(rank)

    @rule(rank=st.integers(0, RANKS - 1))
    def return_(self, rank):
        if rank in self.dead:
            self.rig.attach(rank)
            self.dead.discard(rank)

    # ------------------------------------------------------------ what must always hold

    def check_aborts(self, rank):
        self.pump()
        engine = self.rig.ranks[rank]
        by_rid = {request.rid: request for request in self.all}
        assert len(set(engine.aborts)) == len(engine.aborts)
        assert len(set(engine.adds)) == len(engine.adds)
        for rid in engine.aborts:
            assert rid in engine.adds
            assert by_rid[rid].end in (smg.Aborted, smg.DeadlineExceeded, "dropped")

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "rig"):
            return
        live = [len(self.live_on(rank)) for rank in range(RANKS)]
        assert [self.core.in_flight(rank) for rank in range(RANKS)] == live
        allocated, free, in_use, ended = self.core.slots
        assert in_use == sum(live) == self.core.live
        assert allocated == free + in_use + ended
        counters = self.core.counters()
        assert counters["late"] == self.late
        assert counters["foreign"] == self.foreign
        for rank in range(RANKS):
            if rank not in self.dead:
                self.check_aborts(rank)


TestSlotTable = SlotTable.TestCase
TestSlotTable.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
