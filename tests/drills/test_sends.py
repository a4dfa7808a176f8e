"""Ranks that do not read: what cannot be sent is refused at once, and what was taken is delivered.

That a full send queue is bounded, and that what was aborted in it is never sent, is in tests/engine/test_ranks.py.
"""

from __future__ import annotations

import time

import pytest
from serving import wait_until

import smg
from smg import SamplingParams
from smg.mock import Simulator, spawn
from smg.protocol import tokenspeed
from tests.drills.test_dialers import Dialer

PROMPT = [1] * 50
SUBMITTED = 20_000


def params(seed):
    return SamplingParams(max_tokens=1, seed=seed, ignore_eos=True)


def flood(group, count=SUBMITTED):
    """Submit that often without a pause; the streams that were taken, and how many were refused."""
    outlet, taken, refused = group.outlet(), [], 0
    for seed in range(count):
        try:
            stream = group.submit(PROMPT, params(seed), outlet=outlet)
        except smg.Overloaded:
            refused += 1
        else:
            stream.data = seed
            taken.append(stream)
    return outlet, taken, refused


def read(outlet, count):
    """The token of every stream, by seed."""
    tokens = {}
    while len(tokens) < count:
        assert outlet.wait_blocking(20)
        for stream, out in outlet.take():
            assert isinstance(out, smg.Output), out
            assert stream.data not in tokens
            tokens[stream.data] = out.token_ids
    return tokens


def check(group, mock, flooded):
    outlet, taken, refused = flooded
    assert len(taken) + refused == SUBMITTED
    assert len(taken) >= 1024
    assert refused > 0
    tokens = read(outlet, len(taken))
    assert tokens == {stream.data: mock.reply(stream.data, 1) for stream in taken}
    assert mock.stats(0)["adds"] == len(taken)
    counters = group.counters
    assert counters["overloaded"] == [refused]
    assert counters["requests"] == [len(taken)]
    assert counters["finished"] == [len(taken)]
    assert sum(counters["unsent"]) == sum(counters["died"]) == 0


def test_a_rank_with_a_finite_queue_that_never_reads_refuses_and_loses_nothing(make_group, idle):
    group, mock = make_group(ranks=1, input_hwm=10, max_running=100_000, record=False)
    mock.stall(0)
    flooded = flood(group)
    mock.resume(0)
    check(group, mock, flooded)
    idle(group)


def test_a_stopped_engine_process_refuses_and_loses_nothing(ipc_dir, idle):
    with (
        smg.EngineGroup(
            f"ipc://{ipc_dir}/e", backend="tokenspeed", ranks=1, handshake_address="tcp://127.0.0.1:0"
        ) as group,
        spawn(
            group.url, handshake_address=group.handshake_address, record=False, step_ms=0, max_running=100_000
        ) as engine,
    ):
        group.wait_ready(20)
        engine.suspend()
        try:
            flooded = flood(group)
        finally:
            engine.unsuspend()
        check(group, engine, flooded)
        idle(group)


def test_a_rank_that_does_not_read_is_a_429_with_retry_after_over_http(serve):
    served = serve(ranks=1, mock={"input_hwm": 10, "record": False, "step_ms": 0, "max_running": 100_000})
    served.mock.stall(0)
    outlet, taken, _ = flood(served.group, 4000)
    refused = served.chat()
    assert (refused.status, refused.json["error"]["code"]) == (429, "engine_overloaded")
    assert int(refused.headers["Retry-After"]) >= 1
    assert served.ask("/readiness").status == 200
    served.mock.resume(0)
    read(outlet, len(taken))
    assert served.chat().status == 200
    wait_until(lambda: served.group.requests == 0)


@pytest.fixture
def deaf(ipc_dir):
    """A group whose rank 1 has closed its input socket and nothing else: (group, simulator of rank 0, rank 1)."""
    with smg.EngineGroup(
        f"ipc://{ipc_dir}/e", backend="tokenspeed", ranks=2, handshake_address="tcp://127.0.0.1:0"
    ) as group:
        dialer = Dialer(group, 1)
        try:
            with Simulator(group.url, handshake_address=group.handshake_address, ranks=1, step_ms=0) as mock:
                dialer.hello()
                dialer.init()
                dialer.ready()
                dialer.register()
                group.wait_ready(10)
                dialer.input.close(0)
                yield group, mock, dialer
        finally:
            dialer.close()


def test_a_send_to_a_vanished_rank_is_that_ranks_death(deaf, idle):
    group, mock, dialer = deaf
    others = [group.submit(PROMPT, params(seed), rank=0) for seed in range(5)]
    died = [group.submit(PROMPT, params(0), rank=1)]
    while group.ranks[1].state == "live":  # libzmq sees the end of the connection in its own time
        try:
            died.append(group.submit(PROMPT, params(1), rank=1))
        except smg.InvalidRank:
            break
        assert len(died) < SUBMITTED
        time.sleep(0.001)
    for stream in died:  # what was sent too early to fail by itself included
        with pytest.raises(smg.RankDied) as error:
            next(stream.blocking(10))
        assert error.value.rank == 1
    for seed, stream in enumerate(others):
        assert [t for out in stream.blocking(10) for t in out.token_ids] == mock.reply(seed, 1)
    wait_until(lambda: [rank.state for rank in group.ranks] == ["live", "dead"])
    assert group.counters["died"] == [0, len(died)]
    # What it says now goes nowhere: its sockets are closed.
    dialer.output.send(tokenspeed.encode_outputs([died[0].request_id], [[9]], ["stop"], [1], [1], [0]))
    assert group.submit(PROMPT, params(2)).rank == 0
    assert group.counters["frames"][1] == 0
