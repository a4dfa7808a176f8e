"""Who dials in wrongly, twice, half or not at all: the group forms, and real ranks keep their traffic.

Garbage, unknown identities and a HELLO of a live identity are in tests/engine/test_ranks.py, noise on an input
socket in tests/engine/test_embedded.py, whole interleavings in tests/unit/test_lifecycle.py.
"""

from __future__ import annotations

import logging

import pytest
import zmq

import smg
from smg import SamplingParams
from smg.mock import Simulator
from smg.protocol import handshake
from tests.drills.fleet import wait_until
from tests.engine.test_ranks import Dialer

PROMPT = [1, 2, 3]
LONG = SamplingParams(max_tokens=1_000_000, seed=7, ignore_eos=True)


def short(seed=7, tokens=5):
    return SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True)


def tokens_of(stream):
    return [token for out in stream.blocking(10) for token in out.token_ids]


def states(group):
    return [rank.state for rank in group.ranks]


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
def open_group(ipc_dir):
    """A group nobody has dialed yet: `open_group(ranks=2, ...)`."""
    made = []

    def make(**options):
        made.append(
            smg.EngineGroup(
                f"ipc://{ipc_dir}/e", backend="tokenspeed", handshake_address="tcp://127.0.0.1:0", **options
            )
        )
        return made[-1]

    yield make
    for group in made:
        group.close()


def simulate(group, **options):
    return Simulator(group.url, handshake_address=group.handshake_address, step_ms=0, **options)


@pytest.mark.parametrize("step", ["before INIT", "after INIT", "after READY"])
def test_a_rank_that_vanishes_in_its_handshake_holds_up_nobody(open_group, dial, step):
    group = open_group(ranks=2, min_ready=1)  # a model may take its 600 s to load; who has hung up does not
    gone = dial(group, 0)
    gone.hello()
    if step != "before INIT":
        gone.init()
    if step == "after READY":
        gone.ready()
    wait_until(lambda: group.ranks[0].incarnation == 1)
    with simulate(group, ranks=1, start_index=1) as other:
        group.wait_ready(10)
        assert tokens_of(group.submit(PROMPT, short())) == other.reply(7, 5)
        gone.close()
        wait_until(lambda: states(group) == ["absent", "live"])
        assert group.ranks[0].fault
        with simulate(group, ranks=1, data_parallel_size=2) as successor:
            group.wait_ready(10, ranks=2)
            assert group.ranks[0].incarnation == 2
            assert tokens_of(group.submit(PROMPT, short(), rank=0)) == successor.reply(7, 5)


def test_a_rank_that_goes_before_it_connects_its_output_makes_way_for_its_successor(open_group, dial):
    group = open_group(ranks=1)
    gone = dial(group, 0)
    gone.hello()
    init = handshake.decode_init(gone.handshake.recv())
    gone.input = gone._dealer(handshake.identity(0))
    gone.input.connect(init.inputs[0])
    gone.register()
    gone.ready()
    wait_until(lambda: group._loop._early)
    gone.close()
    with simulate(group, ranks=1) as successor:
        wait_until(lambda: (group.ranks[0].incarnation, states(group)) == (2, ["live"]))
        assert tokens_of(group.submit(PROMPT, short())) == successor.reply(7, 5)


@pytest.mark.parametrize("taker_goes", ["before its INIT", "after its INIT", "in silence"])
def test_a_dialer_that_waits_gets_in_though_a_later_one_took_its_place_and_went(open_group, dial, taker_goes):
    """libzmq lets a ROUTER reach only the last that has connected with an identity."""
    group = open_group(ranks=1)
    with simulate(group, ranks=1):
        group.wait_ready(10)
        waiting = dial(group, 0)
        waiting.hello()
        wait_until(lambda: group.ranks[0].duplicate_hello == 1)
        taker = dial(group, 0)
        wait_until(lambda: group._loop._connections.greeted == 3)
        place = max(group._loop._connections.open)
        if taker_goes != "in silence":
            taker.hello()
            wait_until(lambda: group.ranks[0].duplicate_hello == 2)
        if taker_goes != "after its INIT":
            taker.close()
            wait_until(lambda: place not in group._loop._connections.open)
    if taker_goes == "after its INIT":
        assert taker.handshake.poll(10_000)
        taker.close()
    waiting.init()
    waiting.ready()
    waiting.register()
    wait_until(lambda: states(group) == ["live"])
    stream = group.submit(PROMPT, short())
    assert stream.request_id.encode() in waiting.input.recv_multipart()[1]


def test_a_rank_that_is_ready_and_hangs_up_there_is_awaited(open_group, dial):
    group = open_group(ranks=1)
    rank = dial(group, 0)
    rank.hello()
    rank.init()
    rank.ready()
    rank.handshake.close(1000)  # as engines do; what they have said is still sent
    wait_until(lambda: "awaiting REGISTERED" in group._loop.lives[0].describe())
    rank.register()
    group.wait_ready(10)
    assert group.ranks[0].incarnation == 1


def test_a_rank_that_says_everything_twice_is_one_rank(open_group, dial):
    group = open_group(ranks=1)
    twice = dial(group, 0)
    twice.hello()
    twice.init()
    for _ in range(2):
        twice.ready()
        twice.register()
    group.wait_ready(10)
    twice.hello()
    wait_until(lambda: group.ranks[0].duplicate_hello == 1)
    wait_until(lambda: group._loop.lives[0].unexpected == 2)
    assert (states(group), group.ranks[0].incarnation) == (["live"], 1)
    stream = group.submit(PROMPT, short())
    asked, (kind, payload) = sorted((twice.input.recv_multipart() for _ in range(2)), reverse=True)
    assert asked == [b"\x01", b"\x90"]  # an ABORT of nobody, to see that it is there
    assert kind == b"\x00"
    assert stream.request_id.encode() in payload
    assert not twice.input.poll(0)


def test_a_rank_that_never_comes_is_named_and_the_others_serve(open_group):
    group = open_group(ranks=3, min_ready=2)
    with simulate(group, ranks=2, data_parallel_size=3):
        group.wait_ready(10)
        assert {group.submit(PROMPT, short()).rank for _ in range(4)} == {0, 1}
        with pytest.raises(smg.NotReady, match="2 of 3 ranks") as late:
            group.wait_ready(0.05, ranks=3)
        assert late.value.states[2].startswith("rank 2: absent")


def test_a_second_dialer_during_the_handshake_waits_and_the_first_becomes_the_rank(open_group, dial):
    group = open_group(ranks=1)
    first = dial(group, 0)
    first.hello()
    first.init()
    second = dial(group, 0)
    second.hello()
    wait_until(lambda: group.ranks[0].duplicate_hello == 1)
    first.register()
    first.ready()
    group.wait_ready(10)
    assert group.ranks[0].incarnation == 1
    stream = group.submit(PROMPT, short())
    assert stream.request_id.encode() in first.input.recv_multipart()[1]
    assert not second.handshake.poll(0)


def test_a_stranger_on_a_live_ranks_input_gets_nothing_and_takes_nothing(make_group, dial, idle):
    group, mock = make_group(ranks=1, hold=True)
    iterator = group.submit(PROMPT, short(3)).blocking(10)
    mock.wait_for("add")
    stranger = dial(group, 0)
    silent = stranger._dealer(handshake.identity(0))  # says nothing
    silent.connect(f"ipc://{group.url[6:]}-in-0-1.sock")
    loud = stranger._dealer(handshake.identity(0))  # claims to be the rank
    loud.connect(f"ipc://{group.url[6:]}-in-0-1.sock")
    monitor = silent.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    loud.send(handshake.encode_registration(handshake.Registration(vllm_version="tokenspeed-0.1.1")))
    more = [group.submit(PROMPT, short(seed)) for seed in range(20)]
    mock.wait_for("add", count=21)
    mock.release()
    assert [token for out in iterator for token in out.token_ids] == mock.reply(3, 5)
    assert [tokens_of(stream) for stream in more] == [mock.reply(seed, 5) for seed in range(20)]
    assert not silent.poll(0)
    assert not loud.poll(0)
    silent.disable_monitor()
    monitor.close(0)
    loud.close(0)
    silent.close(0)
    assert tokens_of(group.submit(PROMPT, short())) == mock.reply(7, 5)
    assert states(group) == ["live"]
    idle(group)


def test_strangers_fill_no_rank_and_do_not_fill_the_log(open_group, dial, caplog):
    group = open_group(ranks=2)
    noise = [b"", b"\x00", b"\x02\x00", b"\xff\xff", b"rank 0", b"\x00" * 255]
    with caplog.at_level(logging.WARNING, "smg"):
        for identity in noise:
            if not identity:
                continue  # a DEALER without one gets a random one
            loud = dial(group, identity=identity)
            for _ in range(50):
                loud.hello()
                loud.handshake.send(b"\xc1")
        wait_until(lambda: group._loop.refused == 50 * 2 * (len(noise) - 1))
    assert states(group) == ["absent", "absent"]
    assert len(caplog.records) <= len(noise)
    with simulate(group, ranks=2) as mock:
        group.wait_ready(10)
        assert tokens_of(group.submit(PROMPT, short())) == mock.reply(7, 5)


def test_garbage_in_the_middle_of_a_handshake_turns_its_dialer_away_and_no_other(open_group, dial):
    group = open_group(ranks=2, min_ready=1)
    bad, good = dial(group, 0), dial(group, 1)
    for dialer in (bad, good):
        dialer.hello()
        dialer.init()
    bad.handshake.send(b"\xc1")
    wait_until(lambda: states(group) == ["absent", "hello"])
    good.ready()
    good.register()
    group.wait_ready(10)
    assert states(group) == ["absent", "live"]
    assert group.ranks[0].refused == 1


def test_a_router_that_restarts_while_engines_live_says_which_must_be_restarted(make_fleet, ipc_dir):
    fleet = make_fleet(2)
    old = fleet.group
    url, address = old.url, old.handshake_address
    running = [old.submit(PROMPT, LONG, rank=rank).blocking(10) for rank in (0, 1)]
    for iterator in running:
        next(iterator)
    earlier = old.submit(PROMPT, LONG, rank=0)
    old.close()
    with smg.EngineGroup(url, backend="tokenspeed", ranks=2, handshake_address=address) as group:
        with pytest.raises(smg.NotReady, match="must be restarted") as failed:
            group.wait_ready(0.2)
        assert [state.split(",")[0] for state in failed.value.states] == ["rank 0: absent", "rank 1: absent"]
        with pytest.raises(smg.NoRank):
            group.submit(PROMPT)
        fleet.kill(1)
        fleet.group = group
        fleet.start(1)
        wait_until(lambda: states(group) == ["absent", "live"])
        assert tokens_of(group.submit(PROMPT, short())) == fleet.reply(7, 5)
        # Rank 0's process still computes for the router that is gone; nothing of that comes here.
        counters = group.counters
        assert (counters["frames"][0], sum(counters["foreign"]), sum(counters["late"])) == (0, 0, 0)
        fleet.kill(0)
        fleet.start(0)
        group.wait_ready(10)
        assert tokens_of(group.submit(PROMPT, short(), rank=0)) == fleet.reply(7, 5)
    for iterator in running:
        with pytest.raises(smg.Closed):
            for _ in iterator:
                pass
    with pytest.raises(smg.Closed):
        tokens_of(earlier)


def test_rows_of_an_earlier_routers_request_reach_no_stream(make_group, idle):
    """A rank that dials the new router and still puts out rows of the old one's requests."""
    old, engine = make_group(ranks=1, hold=True)
    kept = old.submit(PROMPT, LONG)
    before = engine.wait_for("add")["rid"]
    group, mock = make_group(ranks=1, hold=True)
    stream = group.submit(PROMPT, short())
    mine = mock.wait_for("add")["rid"]
    assert kept.request_id == before
    assert before[:8] != mine[:8]
    assert before[8:] == mine[8:]  # the same slot and generation, so that the epoch alone tells them apart
    mock.emit(0, before, [99], "stop")
    mock.release()
    assert tokens_of(stream) == mock.reply(7, 5)
    assert group.counters["foreign"] == [1]
    idle(group)


@pytest.mark.parametrize(
    ("how", "dies"),
    [
        (lambda mock: mock.raw(0, handshake.ENGINE_DEAD), True),
        (lambda mock: mock.raw(0, handshake.ENGINE_DEAD, b""), False),
        (lambda mock: mock.raw(0, handshake.ENGINE_DEAD, b"\x90"), False),
        (lambda mock: mock.raw(0, handshake.ENGINE_DEAD + b"\n"), False),
        (lambda mock: mock.emit(0, handshake.ENGINE_DEAD.decode(), [1]), False),
    ],
    ids=["alone", "frame 0 of 2, the other empty", "frame 0 of 2", "with a tail", "inside a request id"],
)
def test_only_a_sentinel_that_is_the_whole_message_is_a_death(make_group, idle, how, dies):
    group, mock = make_group(ranks=2, hold=True)
    streams = [group.submit(PROMPT, short(seed), rank=seed) for seed in (0, 1)]
    mock.wait_for("add", count=2)
    how(mock)
    mock.release(1)
    if dies:
        with pytest.raises(smg.RankDied):
            tokens_of(streams[0])
    else:
        mock.release(0)
        assert tokens_of(streams[0]) == mock.reply(0, 5)
    assert tokens_of(streams[1]) == mock.reply(1, 5)
    assert states(group) == (["dead", "live"] if dies else ["live", "live"])
    idle(group)
