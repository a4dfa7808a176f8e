"""A group of two ranks whose transport is TokenSpeed's own, over real sockets, in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from tokenspeed_driver import Rank

import smg
from smg import Output, RankDied, SamplingParams

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

Live = tuple[smg.EngineGroup, list[Rank]]
MakeGroup = Callable[..., smg.EngineGroup]
StartRank = Callable[[], Rank]
PROMPT = [1, 2, 3]
PATIENCE = 60.0


def rid_of(rank: Rank) -> str:
    """The wire id of the request that the rank receives next."""
    rid: str = rank.next("request")["fields"]["rid"]
    return rid


def read(outputs: Iterator[Output]) -> tuple[list[int], Output]:
    """All tokens of a stream, and its last output."""
    tokens = []
    for out in outputs:
        tokens += out.token_ids
    return tokens, out


def assert_serves(group: smg.EngineGroup, rank: Rank, index: int) -> None:
    """One request goes to the rank and its answer comes back."""
    stream = group.submit(PROMPT, rank=index)
    rank.send({"rid": rid_of(rank), "tokens": [9], "completion": 1, "finish": ["stop", 9]})
    tokens, last = read(stream.blocking(PATIENCE))
    assert (tokens, last.finish_reason, last.rank) == ([9], "stop", index)


def test_ranks_register_what_the_engine_reports(live: Live) -> None:
    group, _ = live
    assert [(rank.state, rank.engine, rank.max_model_len) for rank in group.ranks] == [
        ("live", "tokenspeed-0.1.1", 4096)
    ] * 2
    assert group.max_model_len == 4096


def test_a_request_arrives_at_its_rank_only_with_its_values(live: Live) -> None:
    group, ranks = live
    params = SamplingParams(max_tokens=5, temperature=0.5, top_k=7, stop_token_ids=[4, 2], logprobs=0, seed=11)
    streams = [group.submit([10 + index] * 3, params, rank=index) for index in (0, 1)]
    for index, (rank, stream) in enumerate(zip(ranks, streams, strict=True)):
        request = rank.next("request")
        fields, sampling = request["fields"], request["sampling"]
        assert stream.rank == index
        assert fields["input_ids"] == [10 + index] * 3
        assert (fields["return_logprob"], fields["stream"], fields["validation_error"]) == (True, True, None)
        assert sampling["is_normalized"]
        assert {name: sampling[name] for name in ("max_new_tokens", "temperature", "top_k", "seed")} == {
            "max_new_tokens": 5,
            "temperature": 0.5,
            "top_k": 7,
            "seed": 11,
        }
        assert sampling["stop_token_ids"] == [2, 4]


def test_a_request_without_max_tokens_may_fill_the_context_that_was_registered(live: Live) -> None:
    group, ranks = live
    stream = group.submit(PROMPT, rank=0)
    assert ranks[0].next("request")["sampling"]["max_new_tokens"] == 4096 - len(PROMPT)
    stream.abort()


def test_outputs_reach_their_streams_with_reasons_counts_and_logprobs(live: Live) -> None:
    group, ranks = live
    first, second, third = (group.submit(PROMPT, SamplingParams(logprobs=0), rank=0) for _ in range(3))
    rids = [rid_of(ranks[0]) for _ in range(3)]
    readers = [stream.blocking(PATIENCE) for stream in (first, second, third)]
    ranks[0].send(
        {"rid": rids[0], "tokens": [5], "completion": 1, "prompt": 3, "cached": 2, "logprobs": [-0.25]},
        {"rid": rids[1], "tokens": [70_000, 6], "completion": 2, "prompt": 3, "logprobs": [-1.5, -2.5]},
    )
    out = next(readers[0])
    assert (out.token_ids, out.finish_reason, out.rank) == ([5], None, 0)
    assert (out.prompt_tokens, out.completion_tokens, out.cached_tokens) == (3, 1, 2)
    assert out.logprobs == [(5, -0.25, [])]
    out = next(readers[1])
    assert (out.token_ids, out.completion_tokens) == ([70_000, 6], 2)
    assert out.logprobs == [(70_000, -1.5, []), (6, -2.5, [])]
    ranks[0].send(
        {"rid": rids[1], "tokens": [], "completion": 2, "finish": ["length", 2]},
        {"rid": rids[2], "tokens": [], "completion": 0, "finish": ["abort", "no"]},
        {"rid": rids[0], "tokens": [8], "completion": 2, "finish": ["stop", 8], "logprobs": [-0.5]},
    )
    ends = [read(reader) for reader in readers]
    assert [(tokens, last.finish_reason, last.completion_tokens) for tokens, last in ends] == [
        ([8], "stop", 2),
        ([], "length", 2),
        ([], "abort", 0),
    ]
    assert ends[0][1].logprobs == [(8, -0.5, [])]
    assert group.in_flight.tolist() == [0, 0]
    assert group.counters["undecodable"] == [0, 0]


def test_both_ranks_stream_at_once_into_one_event_loop(live: Live) -> None:
    group, ranks = live

    async def collect(stream: smg.Stream) -> tuple[int, list[int]]:
        return stream.rank, [token async for out in stream for token in out.token_ids]

    async def main() -> list[tuple[int, list[int]]]:
        streams = [group.submit(PROMPT, rank=index % 2) for index in range(6)]
        tasks = [asyncio.create_task(collect(stream)) for stream in streams]
        for index, rank in enumerate(ranks):
            rids = [await asyncio.to_thread(rid_of, rank) for _ in range(3)]
            for step in range(1, 5):
                rows = [
                    {"rid": rid, "tokens": [100 * index + 10 * at + step], "completion": step}
                    | ({"finish": ["length", 4]} if step == 4 else {})
                    for at, rid in enumerate(rids)
                ]
                await asyncio.to_thread(rank.send, *rows)
        return await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)

    assert asyncio.run(main()) == [
        (index % 2, [100 * (index % 2) + 10 * (index // 2) + step for step in range(1, 5)]) for index in range(6)
    ]


def test_the_load_that_rides_on_outputs_is_the_groups(live: Live) -> None:
    group, ranks = live
    assert group.load["reported"].tolist() == [False, False]
    stream = group.submit(PROMPT, rank=1)
    rid = rid_of(ranks[1])
    reader = stream.blocking(PATIENCE)
    ranks[1].send({"rid": rid, "tokens": [5], "completion": 1}, load=(7, 3, 16, 64))
    next(reader)
    assert group.load.tolist()[1] == (7, 3, 0.25, True)
    assert group.load["reported"].tolist() == [False, True]
    assert group.submit(PROMPT).rank == 0


def test_an_abort_arrives_once_under_its_own_id_and_nothing_else_does(live: Live) -> None:
    group, ranks = live
    kept, aborted = (group.submit(PROMPT, rank=0) for _ in range(2))
    rid_kept, rid_aborted = (rid_of(ranks[0]) for _ in range(2))
    aborted.abort()
    aborted.abort()
    assert ranks[0].next("abort")["rid"] == rid_aborted
    # a frame that was under way, and the end of another request, which is not to be aborted
    ranks[0].send(
        {"rid": rid_aborted, "tokens": [5], "completion": 1},
        {"rid": rid_kept, "tokens": [6], "completion": 1, "finish": ["stop", 6]},
    )
    assert read(kept.blocking(PATIENCE))[0] == [6]
    assert group.counters["late"] == [1, 0]
    assert_serves(group, ranks[0], 0)  # the next that the rank hears is a request
    assert group.in_flight.tolist() == [0, 0]


def test_leaving_the_loop_early_aborts_the_request(live: Live) -> None:
    group, ranks = live

    async def main() -> str:
        stream = group.submit(PROMPT, rank=1)
        rid = await asyncio.to_thread(rid_of, ranks[1])
        await asyncio.to_thread(ranks[1].send, {"rid": rid, "tokens": [5], "completion": 1})
        async for _ in stream:
            break
        return rid

    rid = asyncio.run(main())
    assert ranks[1].next("abort")["rid"] == rid
    assert_serves(group, ranks[1], 1)


def test_the_sentinel_kills_its_own_rank_only_after_what_came_before_it(live: Live) -> None:
    group, ranks = live
    doomed, other = (group.submit(PROMPT, rank=index) for index in (0, 1))
    rids = [rid_of(rank) for rank in ranks]
    ranks[0].send({"rid": rids[0], "tokens": [5, 6], "completion": 2})
    ranks[0].leave("stop")
    tokens: list[int] = []
    with pytest.raises(RankDied) as died:
        for out in doomed.blocking(PATIENCE):
            tokens += out.token_ids
    assert (tokens, died.value.rank) == ([5, 6], 0)
    ranks[1].send({"rid": rids[1], "tokens": [7], "completion": 1, "finish": ["stop", 7]})
    assert read(other.blocking(PATIENCE))[0] == [7]
    assert_serves(group, ranks[1], 1)
    assert [group.submit(PROMPT).rank for _ in range(4)] == [1] * 4


@pytest.mark.parametrize("how", ["stop", "hang_up", "kill"])
def test_a_second_dial_in_serves_as_the_next_incarnation(live: Live, start_rank: StartRank, how: str) -> None:
    group, ranks = live
    doomed = group.submit(PROMPT, rank=0)
    rid_of(ranks[0])
    if how == "kill":
        ranks[0].kill()
    else:
        ranks[0].leave(how)
    with pytest.raises(RankDied):
        read(doomed.blocking(PATIENCE))
    successor = start_rank()
    successor.dial(group, 0, max_model_len=2048)
    successor.next("dialed")
    group.wait_ready(PATIENCE, ranks=2)
    assert [(rank.state, rank.incarnation) for rank in group.ranks] == [("live", 2), ("live", 1)]
    assert group.max_model_len == 2048
    assert_serves(group, successor, 0)
    assert_serves(group, ranks[1], 1)


def test_the_same_process_may_dial_in_again(live: Live) -> None:
    group, ranks = live
    for incarnation in (2, 3, 4):
        doomed = group.submit(PROMPT, rank=1)
        rid_of(ranks[1])
        ranks[1].leave("stop")
        with pytest.raises(RankDied):
            read(doomed.blocking(PATIENCE))
        ranks[1].dial(group, 1)
        ranks[1].next("dialed")
        group.wait_ready(PATIENCE, ranks=2)
        assert group.ranks[1].incarnation == incarnation
        assert_serves(group, ranks[1], 1)


def test_a_second_process_of_a_living_rank_waits_for_its_death(live: Live, start_rank: StartRank) -> None:
    group, ranks = live
    successor = start_rank()
    successor.dial(group, 0)
    while not group.ranks[0].duplicate_hello:  # told by no event
        assert_serves(group, ranks[0], 0)
    doomed = group.submit(PROMPT, rank=0)
    rid_of(ranks[0])
    ranks[0].kill()
    with pytest.raises(RankDied):
        read(doomed.blocking(PATIENCE))
    successor.next("dialed")
    group.wait_ready(PATIENCE, ranks=2)
    assert group.ranks[0].incarnation == 2
    assert_serves(group, successor, 0)


def test_ranks_that_dialed_before_the_router_was_there_are_served(make_group: MakeGroup, start_rank: StartRank) -> None:
    probe = make_group()
    address = probe.handshake_address
    probe.close()
    rank = start_rank()
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    rank.tell("dial", host=host, port=int(port), index=0, max_model_len=4096)
    with smg.EngineGroup(probe.url, backend="tokenspeed", handshake_address=address) as group:
        rank.next("dialed")
        group.wait_ready(PATIENCE)
        assert_serves(group, rank, 0)


def test_an_engine_is_never_blocked_by_a_slow_consumer(live: Live) -> None:
    """Its PUSH holds 1,000 messages and then blocks its scheduler: every one has to be taken off its hands."""
    group, ranks = live
    stream = group.submit(PROMPT, rank=0)
    count = 10_000
    ranks[0].tell("send_many", rid=rid_of(ranks[0]), count=count)
    ranks[0].next("sent")  # although nobody reads the stream
    tokens, last = read(stream.blocking(PATIENCE))
    assert tokens == list(range(count))
    assert (last.finish_reason, last.completion_tokens) == ("length", count)


def test_a_refused_request_ends_with_the_engines_abort(live: Live) -> None:
    """A token id beyond the vocabulary in logit_bias: only the engine knows how many there are."""
    group, ranks = live
    stream = group.submit(PROMPT, SamplingParams(logit_bias={1000: 1.0}), rank=0)
    request = ranks[0].next("request")
    assert "logit_bias" in request["fields"]["validation_error"]
    ranks[0].send({"rid": request["fields"]["rid"], "tokens": [], "completion": 0, "finish": ["abort", "logit_bias"]})
    tokens, last = read(stream.blocking(PATIENCE))
    assert (tokens, last.finish_reason) == ([], "abort")
