"""Ranks that come, die, stall, lie and come back: only what failed fails, and everything is counted."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import msgpack
import pytest
import zmq

import smg
from smg import SamplingParams
from smg.mock.simulator import Simulator
from smg.protocol import handshake

PROMPT = [1, 2, 3]
LONG = SamplingParams(max_tokens=1_000_000, seed=7, ignore_eos=True)


def short(seed=7):
    return SamplingParams(max_tokens=5, seed=seed, ignore_eos=True)


def tokens_of(stream):
    return [token for out in stream.blocking(10) for token in out.token_ids]


def wait_until(condition, timeout=10.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0)  # what is waited for is told by no event


def states(group):
    return [rank.state for rank in group.ranks]


@pytest.mark.parametrize("how", ["die", "sentinel"])
def test_a_rank_that_dies_ends_its_own_requests_only(make_group, idle, how):
    group, mock = make_group(ranks=2)
    doomed = [group.submit(PROMPT, LONG, rank=0) for _ in range(5)]
    others = [group.submit(PROMPT, short(seed), rank=1) for seed in range(5)]
    iterators = [stream.blocking(10) for stream in doomed]
    for iterator in iterators:
        next(iterator)
    getattr(mock, how)(0)
    for iterator in iterators:
        with pytest.raises(smg.RankDied) as died:
            for _ in iterator:
                pass
        assert died.value.rank == 0
    assert [tokens_of(stream) for stream in others] == [mock.reply(seed, 5) for seed in range(5)]
    wait_until(lambda: states(group) == ["dead", "live"])
    assert group.counters["died"] == [5, 0]
    assert tokens_of(group.submit(PROMPT, short())) == mock.reply(7, 5)
    with pytest.raises(smg.InvalidRank):
        group.submit(PROMPT, rank=0)
    idle(group)


def test_tokens_that_came_before_a_death_are_delivered_before_the_error(make_group):
    group, mock = make_group(ranks=1, hold=True)
    iterator = group.submit(PROMPT, LONG).blocking(10)
    mock.wait_for("add")
    mock.step(3, 0)
    wait_until(lambda: group.counters["tokens"] == [3])
    mock.die(0)
    wait_until(lambda: states(group) == ["dead"])
    assert next(iterator).token_ids == mock.reply(7, 3)
    with pytest.raises(smg.RankDied):
        next(iterator)


def test_a_restarted_rank_is_taken_in_and_rows_of_its_former_life_reach_nobody(make_group, idle):
    group, mock = make_group(ranks=2)
    stream = group.submit(PROMPT, LONG, rank=0)
    rid = mock.wait_for("add")["rid"]
    mock.restart(0)
    with pytest.raises(smg.RankDied):
        tokens_of(stream)
    group.wait_ready(10)
    assert [rank.incarnation for rank in group.ranks] == [2, 1]
    mock.emit(0, rid, [99], "stop")
    assert tokens_of(group.submit(PROMPT, short(), rank=0)) == mock.reply(7, 5)
    assert group.counters["late"] == [1, 0]
    idle(group)


def test_no_live_rank_means_no_rank(make_group):
    group, mock = make_group(ranks=1)
    mock.die(0)
    wait_until(lambda: states(group) == ["dead"])
    with pytest.raises(smg.NoRank, match="live"):
        group.submit(PROMPT)


def test_the_sentinel_kills_only_as_a_whole_message_of_its_own(make_group, idle):
    group, mock = make_group(ranks=1)
    mock.raw(0, handshake.ENGINE_DEAD, b"aux")
    mock.emit(0, handshake.ENGINE_DEAD.decode(), [1])
    assert tokens_of(group.submit(PROMPT, short())) == mock.reply(7, 5)
    counters = group.counters
    assert states(group) == ["live"]
    assert (counters["undecodable"], counters["extra_parts"], counters["foreign"]) == ([1], [1], [1])
    idle(group)


def test_one_bad_frame_is_survived_and_three_in_a_row_fail_that_rank(make_group, idle, caplog):
    group, mock = make_group(ranks=2)
    with caplog.at_level(logging.WARNING, "smg"):
        for _ in range(3):
            mock.malformed(0, kind="garbage")
            assert tokens_of(group.submit(PROMPT, short(), rank=0)) == mock.reply(7, 5)
        doomed = group.submit(PROMPT, LONG, rank=0)
        mock.hold(0)
        mock.malformed(0, kind="truncated", count=3)
        with pytest.raises(smg.RankDied, match="undecodable"):
            tokens_of(doomed)
    assert group.counters["undecodable"] == [6, 0]
    assert sum("undecodable frame of" in record.message for record in caplog.records) == 1  # once a minute
    assert tokens_of(group.submit(PROMPT, short())) == mock.reply(7, 5)
    idle(group)


@pytest.mark.parametrize("minutes", [0, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(120)])])
def test_undecodable_frames_are_logged_with_their_head_and_size_once_a_minute(make_group, caplog, minutes):
    group, mock = make_group(ranks=1)
    with caplog.at_level(logging.WARNING, "smg"):
        for turn in range(minutes + 1):
            time.sleep(61 * bool(turn))
            for _ in range(2):
                mock.raw(0, b"\xc1" + bytes(range(200)))
                assert tokens_of(group.submit(PROMPT, short())) == mock.reply(7, 5)
        wait_until(lambda: len(caplog.records) == minutes + 1)
    assert group.counters["undecodable"] == [2 * (minutes + 1)]
    for record in caplog.records:
        assert "rank 0 sent an undecodable frame of 201 bytes" in record.getMessage()
        assert "it begins with c1000102030405060708" in record.getMessage()
        assert len(record.getMessage()) < 400


def test_a_wrong_engine_index_is_counted_and_its_rows_are_still_the_sockets(make_group, idle, caplog):
    group, mock = make_group(ranks=2)
    mock.engine_index(1, rank=0)
    with caplog.at_level(logging.WARNING, "smg"):
        for _ in range(2):
            assert tokens_of(group.submit(PROMPT, short(), rank=0)) == mock.reply(7, 5)
    assert group.counters["misattributed"][0] > 0
    assert group.counters["finished"] == [2, 0]
    wait_until(lambda: sum("says that it is rank 1" in record.message for record in caplog.records) == 1)
    idle(group)


def test_a_rank_that_answers_for_another_reaches_nobody(make_group, idle):
    group, mock = make_group(ranks=2, hold=True)
    stream = group.submit(PROMPT, short(), rank=0)
    rid = mock.wait_for("add")["rid"]
    mock.emit(1, rid, [99], "stop")
    wait_until(lambda: group.counters["late"] == [0, 1])
    mock.release()
    assert tokens_of(stream) == mock.reply(7, 5)
    idle(group)


def test_foreign_and_finished_ids_are_counted_and_ignored(make_group, idle):
    group, mock = make_group(ranks=1)
    assert tokens_of(group.submit(PROMPT, short())) == mock.reply(7, 5)
    mine = mock.wait_for("add")["rid"]
    for rid in ("", "x", "z" * 24, "0" * 24, mine[:8] + "ffffffff" + mine[16:], mine + "-", mine.upper()[:23] + "G"):
        mock.emit(0, rid, [5], "stop")
    mock.emit(0, mine, [5], "stop")
    wait_until(lambda: group.counters["rows"][0] >= 13)
    counters = group.counters
    assert (counters["foreign"], counters["late"]) == ([7], [1])
    idle(group)


def test_a_silent_rank_stalls_gets_nothing_new_and_comes_back(make_group, idle):
    group, mock = make_group(ranks=2, group={"stall_timeout": 0.1}, hold=True)
    stuck = group.submit(PROMPT, short(), rank=0)
    wait_until(lambda: states(group) == ["stalled", "live"])
    assert {group.submit(PROMPT, short()).rank for _ in range(6)} == {1}
    mock.release(0)
    assert tokens_of(stuck) == mock.reply(7, 5)
    wait_until(lambda: states(group)[0] == "live")
    mock.release(1)


def test_a_stalled_rank_is_chosen_when_no_other_lives(make_group):
    group, mock = make_group(ranks=1, group={"stall_timeout": 0.1}, hold=True)
    first = group.submit(PROMPT, short())
    wait_until(lambda: states(group) == ["stalled"])
    second = group.submit(PROMPT, short(8))
    mock.release(0)
    assert tokens_of(first) == mock.reply(7, 5)
    assert tokens_of(second) == mock.reply(8, 5)


def test_a_drained_rank_finishes_what_it_has_and_is_let_go(make_group, idle):
    group, mock = make_group(ranks=2, hold=True)
    stream = group.submit(PROMPT, short(), rank=0)
    group.drain(0)
    wait_until(lambda: states(group)[0] == "draining")
    assert group.submit(PROMPT, short()).rank == 1
    assert states(group)[0] == "draining"
    mock.release()
    assert tokens_of(stream) == mock.reply(7, 5)
    wait_until(lambda: states(group)[0] == "absent")
    with pytest.raises(smg.InvalidRank):
        group.submit(PROMPT, rank=0)


def test_submits_beyond_max_inflight_are_refused_at_once(make_group, idle):
    group, mock = make_group(ranks=2, group={"max_inflight": 3}, hold=True)
    streams = [group.submit(PROMPT, short(seed)) for seed in range(6)]
    for rank in (None, 0):
        with pytest.raises(smg.Overloaded):
            group.submit(PROMPT, rank=rank)
    assert group.in_flight.tolist() == [3, 3]
    mock.release()
    for seed, stream in enumerate(streams):
        assert tokens_of(stream) == mock.reply(seed, 5)
    idle(group)


def test_a_rank_that_does_not_read_gets_no_more_than_the_bound(make_group, idle):
    group, mock = make_group(ranks=1, input_hwm=10)
    mock.stall(0)
    accepted = []
    with pytest.raises(smg.Overloaded):
        for seed in range(20_000):
            accepted.append(group.submit([1] * 50, short(seed)))
    assert len(accepted) >= 1024
    mock.resume(0)
    for seed, stream in enumerate(accepted):
        assert tokens_of(stream) == mock.reply(seed, 5)
    assert mock.stats(0)["adds"] == len(accepted)
    assert group.counters["overloaded"] == [1]
    idle(group)


def test_an_add_that_was_dropped_before_it_was_sent_is_never_sent_nor_aborted(make_group, idle):
    group, mock = make_group(ranks=1, input_hwm=10)
    mock.stall(0)
    accepted = []
    with pytest.raises(smg.Overloaded):
        while True:
            accepted.append(group.submit([1] * 50, short()))
    kept = accepted.pop()
    wait_until(lambda: group.counters["requests"][0] > 0)
    for stream in accepted:
        stream.abort()
    del accepted, stream
    mock.resume(0)
    assert tokens_of(kept) == mock.reply(7, 5)
    wait_until(lambda: mock.stats(0)["aborts"] == group.counters["aborts"][0] > 0)
    counters = group.counters
    assert counters["unsent"][0] > 0
    assert counters["requests"][0] == counters["aborts"][0] + 1 == mock.stats(0)["adds"]
    idle(group)


# ---------------------------------------------------------------- handshake


class Dialer:
    """An engine's sockets, used wrongly on purpose."""

    def __init__(self, group, index=0, identity=None):
        self.context = zmq.Context()
        self.group = group
        self.index = index
        self.handshake = self._dealer(identity if identity is not None else handshake.identity(index))
        self.handshake.connect(group.handshake_address)

    def _dealer(self, identity):
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.identity = identity
        return socket

    def hello(self):
        self.handshake.send(handshake.encode_status("HELLO", parallel_config_hash=None))

    def init(self, output=True):
        assert self.handshake.poll(10_000)
        init = handshake.decode_init(self.handshake.recv())
        self.input = self._dealer(handshake.identity(self.index))
        self.input.connect(init.inputs[0])
        self.output = self.context.socket(zmq.PUSH)
        self.output.linger = 0
        self.output_address = init.outputs[0]
        if output:
            self.output.connect(self.output_address)

    def ready(self):
        self.handshake.send(handshake.encode_status("READY", parallel_config_hash=None))

    def register(self, version="tokenspeed-0.1.1"):
        self.input.send(handshake.encode_registration(handshake.Registration(vllm_version=version)))

    def close(self):
        self.context.destroy(0)


@pytest.fixture
def dial():
    dialers = []

    def make(*args, **kwargs):
        dialers.append(Dialer(*args, **kwargs))
        return dialers[-1]

    yield make
    for dialer in dialers:
        dialer.close()


@pytest.fixture
def lone_group(ipc_dir):
    with smg.EngineGroup(
        f"ipc://{ipc_dir}/e", backend="tokenspeed", ranks=2, handshake_address="tcp://127.0.0.1:0"
    ) as group:
        yield group


@pytest.mark.parametrize("order", ["ready first", "registration first"])
def test_ready_and_registration_come_in_either_order(lone_group, dial, order):
    dialers = [dial(lone_group, index) for index in (1, 0)]
    for dialer in dialers:
        dialer.hello()
    for dialer in dialers:
        dialer.init()
        steps = [dialer.ready, dialer.register]
        for step in steps if order == "ready first" else reversed(steps):
            step()
    lone_group.wait_ready(10)
    assert states(lone_group) == ["live", "live"]
    assert lone_group.ranks[0].engine == "tokenspeed-0.1.1"


def test_bad_dialers_are_refused_and_counted_and_the_others_form_the_group(ipc_dir, lone_group, dial):
    bad = dial(lone_group, 0)
    bad.handshake.send(b"\xc1garbage")
    bad.handshake.send_multipart([handshake.encode_status("HELLO"), b"more"])
    bad.handshake.send(handshake.encode_status("GOODBYE"))
    for identity in (handshake.identity(2), b"\x01", b"\xff\xff\xff"):
        dial(lone_group, identity=identity).hello()
    wait_until(lambda: lone_group.ranks[0].refused == 3 and lone_group._loop.refused == 3)
    bad.close()
    with Simulator(lone_group.url, ranks=2, handshake_address=lone_group.handshake_address, step_ms=0) as mock:
        lone_group.wait_ready(10)
        assert tokens_of(lone_group.submit(PROMPT, short())) == mock.reply(7, 5)


def test_a_second_hello_of_a_live_identity_waits_until_the_first_is_gone(make_group, dial, idle):
    group, mock = make_group(ranks=1)
    second = dial(group, 0)
    second.hello()
    wait_until(lambda: group.ranks[0].duplicate_hello == 1)
    assert tokens_of(group.submit(PROMPT, short())) == mock.reply(7, 5)
    assert not second.handshake.poll(0)
    mock.die(0)
    second.init()  # answered now
    second.register()
    second.ready()
    wait_until(lambda: states(group) == ["live"] and group.ranks[0].incarnation == 2)
    idle(group)


def test_an_engine_of_another_family_is_refused_by_name(lone_group, dial):
    wrong = dial(lone_group, 0)
    wrong.hello()
    wrong.init()
    wrong.ready()
    wrong.register("0.32.0")
    wait_until(lambda: "is vllm, but the group's backend is tokenspeed" in lone_group.ranks[0].fault)
    assert states(lone_group) == ["absent", "absent"]


def test_the_ready_timeout_is_one_deadline_and_names_every_ranks_state(lone_group, dial):
    half = dial(lone_group, 1)
    half.hello()
    half.init()
    half.ready()
    wait_until(lambda: states(lone_group)[1] == "hello")
    started = time.monotonic()
    with pytest.raises(smg.NotReady) as failed:
        lone_group.wait_ready(0.1)
    assert time.monotonic() - started < 2
    assert failed.value.states[0].startswith("rank 0: absent")
    assert "rank 1: hello, awaiting REGISTERED" in failed.value.states[1]
    assert "must be restarted" in str(failed.value)


async def test_ready_is_awaited_and_min_ready_is_enough(ipc_dir):
    async with smg.EngineGroup(
        f"ipc://{ipc_dir}/e", backend="tokenspeed", ranks=3, min_ready=1, handshake_address="tcp://127.0.0.1:0"
    ) as group:
        with pytest.raises(smg.NotReady):
            await group.ready(0.01)
        waiting = asyncio.create_task(group.ready(10))
        with Simulator(group.url, ranks=1, start_index=2, handshake_address=group.handshake_address, step_ms=0):
            await waiting
            assert states(group) == ["absent", "absent", "live"]
            assert group.submit(PROMPT, short()).rank == 2


def test_a_dialer_that_makes_no_progress_is_given_up(ipc_dir, dial):
    with smg.EngineGroup(
        f"ipc://{ipc_dir}/e",
        backend="tokenspeed",
        ranks=1,
        handshake_timeout=0.1,
        handshake_address="tcp://127.0.0.1:0",
    ) as group:
        slow = dial(group, 0)
        slow.hello()
        slow.init()
        wait_until(lambda: "no READY and REGISTERED within 0.1 s" in group.ranks[0].fault)
        assert states(group) == ["absent"]
        with Simulator(group.url, ranks=1, handshake_address=group.handshake_address, step_ms=0):
            group.wait_ready(10)


def test_close_unlinks_every_socket_and_joins_the_thread(ipc_dir):
    before = threading.active_count()
    group = smg.EngineGroup(f"ipc://{ipc_dir}/e", backend="tokenspeed", handshake_address="tcp://127.0.0.1:0")
    with Simulator(group.url, handshake_address=group.handshake_address, step_ms=0):
        group.wait_ready(10)
        assert any(name.name.endswith(".sock") for name in ipc_dir.iterdir())
        group.close()
        group.close()
    assert list(ipc_dir.iterdir()) == []
    assert threading.active_count() == before


def test_a_second_group_on_the_same_url_is_refused(lone_group):
    with pytest.raises(smg.AddressError, match="another group"):
        smg.EngineGroup(lone_group.url, backend="tokenspeed", handshake_address="tcp://127.0.0.1:0")


def test_a_handshake_port_in_use_is_one_clear_error(ipc_dir, lone_group):
    with pytest.raises(smg.AddressError, match="another router may listen there"):
        smg.EngineGroup(f"ipc://{ipc_dir}/other", backend="tokenspeed", handshake_address=lone_group.handshake_address)
    assert not list(ipc_dir.glob("other*"))


def test_waiting_with_poll_works_as_with_epoll(make_group, idle):
    group, mock = make_group(ranks=2, group={"use_epoll": False})
    streams = [group.submit(PROMPT, short(seed)) for seed in range(50)]
    for seed, stream in enumerate(streams):
        assert tokens_of(stream) == mock.reply(seed, 5)
    mock.restart(0)
    wait_until(lambda: group.ranks[0].incarnation == 2)
    group.wait_ready(10)
    assert tokens_of(group.submit(PROMPT, short(), rank=0)) == mock.reply(7, 5)
    idle(group)


def test_an_abort_names_the_request_and_goes_to_the_rank_that_holds_it(make_group):
    group, mock = make_group(ranks=2, hold=True)
    stream = group.submit(PROMPT, LONG, rank=1)
    rid = mock.wait_for("add")["rid"]
    stream.abort()
    assert mock.wait_for("abort") == {"event": "abort", "rank": 1, "incarnation": 1, "rids": [rid]}
    assert msgpack.packb([rid])  # the id is plain text on the wire


def test_a_rank_takes_no_work_before_its_output_is_connected_since_its_death_would_not_be_seen(lone_group, dial):
    engine = dial(lone_group, 0)
    engine.hello()
    engine.init(output=False)
    engine.ready()
    engine.register()
    wait_until(lambda: lone_group._loop._early)
    assert lone_group.ranks[0].state == "hello"
    engine.output.connect(engine.output_address)
    wait_until(lambda: lone_group.ranks[0].state == "live")
    stream = lone_group.submit([1])
    engine.close()
    with pytest.raises(smg.RankDied):
        next(iter(stream.blocking(10)))


def test_a_live_rank_leaves_the_pump_nothing_to_come_back_for(lone_group, dial):
    """Each time it does, it waits for the GIL, which a collection in the host may hold for most of a second."""
    engine = dial(lone_group, 0)
    engine.hello()
    engine.init()
    engine.register()
    wait_until(lambda: 0 in lone_group._loop._ready_by)  # READY may go unheard, so there is an end to waiting for it
    engine.ready()
    wait_until(lambda: lone_group.ranks[0].state == "live")
    wait_until(lambda: not lone_group._loop._ready_by, timeout=2)
