"""Many requests, some that are given up, and the ranks that they go to."""

import asyncio
import time

import httpx
import pytest

MESSAGES = [{"role": "user", "content": "What makes a good soup?"}]
LONG = {"max_tokens": 400, "stream": True, "extra_body": {"ignore_eos": True}}


async def chat(client, **options):
    given = {"model": "demo", "messages": MESSAGES, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    return await client.chat.completions.create(**{**given, **options})


async def wait_idle(server, seconds=60):
    """Until no request is in flight to any rank."""
    deadline = time.monotonic() + seconds
    async with httpx.AsyncClient() as http:
        while True:
            workers = (await http.get(f"{server.url}/workers")).json()["workers"]
            if not any(rank["in_flight"] for worker in workers for rank in worker["ranks"]):
                return
            assert time.monotonic() < deadline, workers
            await asyncio.sleep(0.02)


async def test_many_at_once_are_all_answered(async_client, server):
    answers = await asyncio.gather(*(chat(async_client) for _ in range(32)))
    assert [answer.usage.completion_tokens for answer in answers] == [8] * 32
    assert len({answer.id for answer in answers}) == 32
    await wait_idle(server)


async def test_many_streams_at_once_each_end_once(async_client):
    async def finishes():
        stream = await chat(async_client, stream=True)
        return [choice.finish_reason async for chunk in stream for choice in chunk.choices if choice.finish_reason]

    assert await asyncio.gather(*(finishes() for _ in range(32))) == [["length"]] * 32


async def test_a_client_that_leaves_gives_its_request_up(async_client, server):
    for _ in range(4):
        stream = await chat(async_client, **LONG)
        async for _ in stream:
            break
        await stream.close()
    await wait_idle(server)
    assert (await chat(async_client)).usage.completion_tokens == 8


async def test_clients_that_leave_do_not_disturb_those_who_stay(async_client, server):
    async def leave():
        stream = await chat(async_client, **LONG)
        await anext(aiter(stream))
        await stream.close()

    async def stay():
        return (await chat(async_client, max_tokens=24)).usage.completion_tokens

    found = await asyncio.gather(*(coroutine() for _ in range(8) for coroutine in (leave, stay)))
    assert [count for count in found if count is not None] == [24] * 8
    await wait_idle(server)


async def test_requests_go_to_every_rank_of_a_group(async_client, lane, server):
    if not lane.grouped:
        pytest.skip("one rank; E2E_ZMQ_ENGINE_COUNT makes more")
    answers = [
        await async_client.chat.completions.with_raw_response.create(model="demo", messages=MESSAGES, **LONG)
        for _ in range(lane.ranks)
    ]
    assert sorted(int(answer.headers["x-smg-rank"]) for answer in answers) == list(range(lane.ranks))
    for answer in answers:
        await answer.parse().close()
    await wait_idle(server)


async def test_n_samples_are_spread_over_the_ranks(async_client, lane):
    answer = await async_client.chat.completions.with_raw_response.create(
        model="demo", messages=MESSAGES, max_tokens=16, n=2 * lane.ranks, extra_body={"ignore_eos": True}
    )
    ranks = answer.headers["x-smg-rank"].split(",")
    assert set(map(int, ranks)) == set(range(lane.ranks))
    assert answer.parse().usage.completion_tokens == 32 * lane.ranks


async def test_every_rank_is_live_and_says_what_it_is(lane, server):
    async with httpx.AsyncClient() as http:
        (worker,) = (await http.get(f"{server.url}/workers")).json()["workers"]
        readiness = await http.get(f"{server.url}/readiness")
    assert [rank["state"] for rank in worker["ranks"]] == ["live"] * lane.ranks
    assert all(rank["engine"] for rank in worker["ranks"])
    assert readiness.status_code == 200
