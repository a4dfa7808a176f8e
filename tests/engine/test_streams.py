"""Streams as a serving app uses them: async, blocking, through outlets; left early, cancelled, overdue."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest
import uvloop

import smg
from smg import SamplingParams

PROMPT = [1, 2, 3]


def params(tokens: int, seed: int = 7) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True)


async def collect(stream):
    outputs = [out async for out in stream]
    return [token for out in outputs for token in out.token_ids], outputs


async def until(condition, timeout=10.0):
    """Wait for what another thread brings about, with a yield of the loop between looks."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0)


async def test_a_stream_brings_every_token_in_order_and_ends_with_the_reason(make_group, idle):
    group, mock = make_group()
    tokens, outputs = await collect(group.submit(PROMPT, params(50)))
    assert tokens == mock.reply(7, 50)
    last = outputs[-1]
    assert (last.finish_reason, last.prompt_tokens, last.completion_tokens) == ("length", 3, 50)
    assert all(out.finish_reason is None for out in outputs[:-1])
    assert last.rank in (0, 1)
    idle(group)


async def test_eight_hundred_streams_at_once_each_get_their_own_tokens(make_group, idle):
    group, mock = make_group(ranks=2, max_running=1024, hold=True)
    streams = [group.submit(PROMPT, params(20, seed)) for seed in range(800)]
    mock.call("release")
    results = await asyncio.gather(*map(collect, streams))
    for seed, (tokens, _) in enumerate(results):
        assert tokens == mock.reply(seed, 20)
    idle(group)
    assert group.counters["finished"] == [400, 400]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_asyncio_and_uvloop_run_the_same_streams_and_a_second_loop_works(make_group, idle, new_loop):
    group, mock = make_group()
    for _ in range(2):  # as asyncio.run twice
        loop = new_loop()
        try:

            async def main():
                return await collect(group.submit(PROMPT, params(9)))

            tokens, _ = loop.run_until_complete(main())
        finally:
            loop.close()
        assert tokens == mock.reply(7, 9)
    idle(group)


async def test_leaving_the_loop_early_sends_exactly_one_abort_and_frees_the_slot(make_group, idle):
    group, mock = make_group(ranks=1)
    async for _ in group.submit(PROMPT, params(1_000_000)):
        break
    gc.collect()
    assert group.requests == 0
    await asyncio.to_thread(mock.wait_for, "abort")
    await until(lambda: group.counters["aborts"] == [1])
    assert mock.stats(0)["aborts"] == 1
    assert group.counters["dropped"] == [1]
    idle(group)


async def test_raising_in_the_loop_aborts(make_group, idle):
    group, mock = make_group(ranks=1)
    with pytest.raises(KeyError):
        async for _ in group.submit(PROMPT, params(1_000_000)):
            raise KeyError
    gc.collect()
    await asyncio.to_thread(mock.wait_for, "abort")
    idle(group)


async def test_cancelling_the_task_aborts(make_group, idle):
    group, mock = make_group(ranks=1, hold=True)
    task = asyncio.create_task(collect(group.submit(PROMPT, params(10))))
    await asyncio.to_thread(mock.wait_for, "add")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    gc.collect()
    await asyncio.to_thread(mock.wait_for, "abort")
    idle(group)


async def test_no_abort_follows_a_terminal_output(make_group):
    group, mock = make_group(ranks=1)
    stream = group.submit(PROMPT, params(5))
    await collect(stream)
    stream.abort()
    del stream
    gc.collect()
    await collect(group.submit(PROMPT, params(5)))  # what would have been sent is there by now
    assert mock.stats(0)["aborts"] == 0
    assert group.counters["aborts"] == [0]


async def test_dropping_the_stream_unread_aborts(make_group, idle):
    group, mock = make_group(ranks=1, hold=True)
    stream = group.submit(PROMPT, params(5))
    await asyncio.to_thread(mock.wait_for, "add")
    del stream
    gc.collect()
    await asyncio.to_thread(mock.wait_for, "abort")
    idle(group)


async def test_abort_wakes_the_consumer_with_aborted(make_group, idle):
    group, mock = make_group(ranks=1, hold=True)
    stream = group.submit(PROMPT, params(5), request_id="mine")
    task = asyncio.create_task(collect(stream))
    await asyncio.to_thread(mock.wait_for, "add")
    stream.abort()
    with pytest.raises(smg.Aborted, match="mine"):
        await task
    await asyncio.to_thread(mock.wait_for, "abort")
    idle(group)


async def test_a_deadline_aborts_and_raises(make_group, idle):
    group, mock = make_group(ranks=1, hold=True)
    with pytest.raises(smg.DeadlineExceeded):
        await collect(group.submit(PROMPT, params(5), deadline=0.02))
    await asyncio.to_thread(mock.wait_for, "abort")
    assert group.counters["deadline"] == [1]
    idle(group)


async def test_a_deadline_that_is_met_changes_nothing(make_group, idle):
    group, mock = make_group(ranks=1)
    tokens, _ = await collect(group.submit(PROMPT, params(5), deadline=60))
    assert tokens == mock.reply(7, 5)
    idle(group)


async def test_wait_for_never_loses_a_token(make_group):
    group, mock = make_group(ranks=1, step_ms=1)
    iterator = group.submit(PROMPT, params(200)).__aiter__()
    tokens, timeouts = [], 0
    while True:
        try:
            out = await asyncio.wait_for(anext(iterator), 0.0005)
        except (asyncio.TimeoutError, TimeoutError):
            timeouts += 1
            continue
        except StopAsyncIteration:
            break
        tokens += out.token_ids
    assert tokens == mock.reply(7, 200)
    assert timeouts


async def test_a_consumer_that_lags_gets_its_tokens_in_one_output(make_group):
    group, mock = make_group(ranks=1, hold=True)
    iterator = group.submit(PROMPT, params(100)).__aiter__()
    await asyncio.to_thread(mock.wait_for, "add")
    mock.step(40, 0)
    await until(lambda: group.counters["tokens"] == [40])
    out = await anext(iterator)
    assert out.token_ids == mock.reply(7, 40)
    assert out.completion_tokens == 40
    assert out.finish_reason is None


async def test_two_iterations_of_one_stream_are_refused(make_group):
    group, _ = make_group(ranks=1)
    stream = group.submit(PROMPT, params(3))
    await collect(stream)
    with pytest.raises(RuntimeError, match="once"):
        await collect(stream)


async def test_a_stream_belongs_to_the_loop_it_was_submitted_in(make_group):
    group, _ = make_group(ranks=1, hold=True)
    stream = group.submit(PROMPT, params(3))

    def elsewhere():
        async def main():
            with pytest.raises(RuntimeError, match="another loop"):
                await collect(stream)

        asyncio.run(main())

    await asyncio.to_thread(elsewhere)
    with pytest.raises(RuntimeError, match="event loop"):
        next(stream.blocking(1))


def test_blocking_streams_run_in_many_threads_at_once(make_group, idle):
    group, mock = make_group(ranks=2)
    results = {}

    def work(seed):
        stream = group.submit(PROMPT, params(30, seed))
        results[seed] = [token for out in stream.blocking(timeout=10) for token in out.token_ids]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {seed: mock.reply(seed, 30) for seed in range(16)}
    idle(group)


def test_a_blocking_timeout_raises_and_the_stream_goes_on(make_group):
    group, mock = make_group(ranks=1, hold=True)
    iterator = group.submit(PROMPT, params(2)).blocking(timeout=0.02)
    with pytest.raises(TimeoutError):
        next(iterator)
    mock.wait_for("add")
    mock.step(2, 0)
    assert [token for out in iterator for token in out.token_ids] == mock.reply(7, 2)


def test_an_outlet_brings_the_outputs_of_many_streams_together(make_group, idle):
    group, mock = make_group(ranks=2)
    outlet = group.outlet()
    for seed in range(100):
        group.submit(PROMPT, params(10, seed), outlet=outlet).data = seed  # the outlet keeps it
    got = {seed: [] for seed in range(100)}
    running = 100
    while running:
        assert outlet.wait_blocking(10)
        for stream, out in outlet.take():
            got[stream.data] += out.token_ids
            running -= out.finish_reason is not None
    assert got == {seed: mock.reply(seed, 10) for seed in range(100)}
    idle(group)


async def test_an_outlet_is_awaited(make_group, idle):
    group, mock = make_group(ranks=1)
    outlet = group.outlet()
    group.submit(PROMPT, params(10), outlet=outlet)
    tokens, reason = [], None
    while reason is None:
        await asyncio.wait_for(outlet.wait(), 10)
        for _, out in outlet.take():
            tokens += out.token_ids
            reason = out.finish_reason
    assert (tokens, reason) == (mock.reply(7, 10), "length")
    idle(group)


async def test_closing_an_outlet_aborts_its_streams(make_group, idle):
    group, mock = make_group(ranks=1, hold=True)
    outlet = group.outlet()
    stream = group.submit(PROMPT, params(10), outlet=outlet)
    await asyncio.to_thread(mock.wait_for, "add")
    with pytest.raises(RuntimeError, match="outlet"):
        stream.__aiter__()
    outlet.close()
    await asyncio.to_thread(mock.wait_for, "abort")
    with pytest.raises(smg.Closed):
        outlet.take()
    idle(group)


async def test_an_aborted_stream_of_an_outlet_brings_nothing_more(make_group, idle):
    group, mock = make_group(ranks=1, hold=True)
    outlet = group.outlet()
    stream = group.submit(PROMPT, params(10), outlet=outlet)
    other = group.submit(PROMPT, params(1), outlet=outlet)
    await asyncio.to_thread(mock.wait_for, "add", count=2)
    mock.step(1, 0)
    await until(lambda: group.counters["tokens"] == [2])
    stream.abort()
    assert [one for one, _ in outlet.take()] == [other]
    idle(group)


async def test_close_ends_streams_and_waiters_typed(make_group):
    group, mock = make_group(ranks=1, hold=True)
    outlet = group.outlet()
    group.submit(PROMPT, params(10), outlet=outlet)
    tasks = [asyncio.create_task(collect(group.submit(PROMPT, params(10)))) for _ in range(3)]
    await asyncio.to_thread(mock.wait_for, "add", count=4)
    await group.aclose()
    group.close()
    for task in tasks:
        with pytest.raises(smg.Closed):
            await task
    assert [type(out) for _, out in outlet.take()] == [smg.Closed]
    with pytest.raises(smg.Closed):
        group.submit(PROMPT)


async def test_two_groups_live_in_one_process(make_group, idle):
    one, mock_one = make_group(ranks=1, seed=1)
    two, mock_two = make_group(ranks=1, seed=2)
    (first, _), (second, _) = await asyncio.gather(
        collect(one.submit(PROMPT, params(10))), collect(two.submit(PROMPT, params(10)))
    )
    assert first == mock_one.reply(7, 10)
    assert second == mock_two.reply(7, 10)
    idle(one)
    idle(two)


async def test_logprobs_come_with_their_tokens(make_group):
    group, mock = make_group(ranks=1, enable_output_logprobs=True)
    stream = group.submit(PROMPT, SamplingParams(max_tokens=6, seed=7, ignore_eos=True, logprobs=0))
    entries, tokens = [], []
    async for out in stream:
        tokens += out.token_ids
        entries += out.logprobs
    assert [entry[0] for entry in entries] == tokens == mock.reply(7, 6)
    assert all(value <= 0 and top == [] for _, value, top in entries)
    assert [out.logprobs async for out in group.submit(PROMPT, params(1))] == [None]


def test_what_an_engine_would_refuse_is_refused_by_name(make_group):
    group, mock = make_group(ranks=1, max_model_len=100)
    for prompt, given, field in [
        ([], None, "prompt_token_ids"),
        ([-1], None, "prompt_token_ids"),
        ([0] * 100, None, "prompt_token_ids"),
        (PROMPT, SamplingParams(temperature=-1), "temperature"),
        (PROMPT, SamplingParams(top_p=float("nan")), "top_p"),
    ]:
        with pytest.raises(smg.InvalidRequest) as refused:
            group.submit(prompt, given)
        assert refused.value.field == field
    with pytest.raises(smg.InvalidRequest, match="deadline"):
        group.submit(PROMPT, deadline=0)
    with pytest.raises(smg.InvalidRequest, match="priority"):
        group.submit(PROMPT, priority=1)
    with pytest.raises(smg.InvalidRank):
        group.submit(PROMPT, rank=1)
    assert group.requests == 0
    assert mock.stats(0)["adds"] == 0


def test_max_tokens_default_to_what_the_context_holds(make_group):
    group, mock = make_group(ranks=1, max_model_len=100, hold=True)
    stream = group.submit(PROMPT)
    mock.wait_for("add")
    assert mock.requests(0)[0]["sampling_params"]["max_new_tokens"] == 97
    assert stream.rank == 0


def test_request_ids_on_the_wire_carry_nothing_external_unless_asked(make_group):
    group, mock = make_group(ranks=1, hold=True)
    stream = group.submit(PROMPT, request_id="secret name")
    rid = mock.wait_for("add")["rid"]
    assert len(rid) == 24
    assert "secret" not in rid
    assert stream.request_id == "secret name"


def test_logged_request_ids_follow_the_wire_id_and_still_route(make_group, idle):
    group, mock = make_group(ranks=1, group={"log_request_ids": True})
    stream = group.submit(PROMPT, params(4), request_id="a/b é" + "x" * 40)
    assert [token for out in stream.blocking(10) for token in out.token_ids] == mock.reply(7, 4)
    rid = mock.wait_for("add")["rid"]
    assert rid[24:] == ("-a_b__" + "x" * 27)
    stream = group.submit(PROMPT, params(1_000_000), request_id="again")
    mock.wait_for("add", count=2)
    stream.abort()
    assert mock.wait_for("abort")["rids"][0].endswith("-again")
    idle(group)


def test_several_requests_may_share_one_external_id(make_group, idle):
    group, mock = make_group(ranks=1)
    streams = [group.submit(PROMPT, params(5, seed), request_id="twin") for seed in (1, 2)]
    for seed, stream in zip((1, 2), streams, strict=True):
        assert [token for out in stream.blocking(10) for token in out.token_ids] == mock.reply(seed, 5)
    idle(group)
