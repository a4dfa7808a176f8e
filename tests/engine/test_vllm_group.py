"""A group of vLLM ranks, simulated: requests, what the router never sends, utilities, waves, deaths."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import smg
from smg.protocol.vllm import Model

EOS = 31999  # the simulator's last id
MODEL = Model(eos_token_ids=(EOS,), vocab_size=32000)
FATAL = ("deafening", "deadly", "duplicates", "undecodable")


@pytest.fixture
def vllm(make_group):
    def make(ranks=2, group=None, **options):
        return make_group(ranks, {"model": MODEL, **(group or {})}, backend="vllm", **options)

    return make


def collect(stream):
    return list(stream.blocking(10))


def tokens(outputs):
    return [token for output in outputs for token in output.token_ids]


def unharmed(mock):
    """No rank was brought to die or to hear nothing any more."""
    for stats in mock.call("stats"):
        assert stats["state"] == "live", stats
        assert not any(stats[name] for name in FATAL), stats


def stats(mock, rank=0):
    (found,) = mock.call("stats", rank=rank)
    return found


def requests(mock):
    return [request for rank in mock.call("requests") for request in rank]


def settled(condition, seconds=5.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.005)


# ---------------------------------------------------------------- requests


def test_both_ranks_serve_and_counts_are_right(vllm, idle):
    group, mock = vllm(cached_tokens=2)
    streams = [group.submit([1, 2, 3], smg.SamplingParams(max_tokens=5)) for _ in range(20)]
    for stream in streams:
        outputs = collect(stream)
        last = outputs[-1]
        assert len(tokens(outputs)) == last.completion_tokens == 5
        assert (last.prompt_tokens, last.cached_tokens, last.finish_reason) == (3, 2, "length")
    assert [stats["adds"] for stats in mock.call("stats")] == [10, 10]
    idle(group)
    unharmed(mock)


def test_the_engine_is_told_where_a_completion_ends(vllm):
    group, mock = vllm(output_tokens="3")
    (*_, last) = collect(group.submit([1, 2], smg.SamplingParams(max_tokens=50)))
    assert (last.finish_reason, last.stop_reason, last.completion_tokens) == ("stop", None, 3)
    (*_, last) = collect(group.submit([1, 2], smg.SamplingParams(max_tokens=6, ignore_eos=True)))
    assert (last.finish_reason, last.completion_tokens) == ("length", 6)
    sampling = [request["sampling_params"] for request in requests(mock)]
    assert [values["_eos_token_id"] for values in sampling] == [EOS, None]
    unharmed(mock)


def test_a_stop_token_is_named(vllm):
    group, mock = vllm(ranks=1)
    first = tokens(collect(group.submit([1], smg.SamplingParams(max_tokens=9, seed=5))))
    stop = next(token for at, token in enumerate(first) if token not in first[:at] and at >= 3)
    (*_, last) = collect(group.submit([1], smg.SamplingParams(max_tokens=9, seed=5, stop_token_ids=[stop])))
    assert (last.finish_reason, last.stop_reason, last.token_ids[-1]) == ("stop", stop, stop)
    unharmed(mock)


def test_without_a_limit_a_completion_goes_on_to_the_end_of_the_context(vllm):
    group, _ = vllm(ranks=1, max_model_len=40)
    (*_, last) = collect(group.submit([1] * 10))
    assert (last.completion_tokens, last.finish_reason) == (30, "length")


def test_logprobs_are_as_many_as_asked_for(vllm):
    group, _ = vllm(ranks=1)
    wanted = {None: None, 0: 0, 3: 3}
    streams = {top: group.submit([1], smg.SamplingParams(max_tokens=4, logprobs=top)) for top in wanted}
    for top, stream in streams.items():
        outputs = collect(stream)
        found = [entry for output in outputs for entry in output.logprobs or ()]
        if top is None:
            assert not found
            continue
        assert [token for token, _, _ in found] == tokens(outputs)
        assert all(len(likeliest) == top for _, _, likeliest in found)
        assert all(logprob <= 0 for _, logprob, _ in found)


@pytest.mark.parametrize("version", ["0.20.1", "0.24.0", "0.26.0", "0.28.0", "0.32.0"])
def test_every_layout_takes_requests_with_and_without_a_priority(vllm, version):
    group, mock = vllm(ranks=1, vllm_version=version)
    for priority in (0, -5):
        collect(group.submit([1, 2], smg.SamplingParams(max_tokens=2), priority=priority))
    assert [request["priority"] for request in requests(mock)] == [0, -5]
    unharmed(mock)


def test_a_priority_is_refused_when_the_engine_does_not_say_its_version(vllm):
    group, mock = vllm(ranks=1, registration='{"vllm_version": null}')
    with pytest.raises(smg.InvalidRequest, match="priority"):
        group.submit([1], priority=3)
    collect(group.submit([1], smg.SamplingParams(max_tokens=2)))
    unharmed(mock)


def test_an_abort_frees_the_engine_and_ends_the_stream_here(vllm, idle):
    group, mock = vllm(ranks=1, step_ms=5)
    stream = group.submit([1, 2], smg.SamplingParams(max_tokens=5000))
    next(iter(stream.blocking(10)))
    stream.abort()
    settled(lambda: stats(mock)["running"] == 0)
    assert stats(mock)["aborts"] == 1
    idle(group)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([1] * 64, {}, "prompt_token_ids"),
        ([1] * 63 + [32000], {}, "prompt_token_ids"),
        ([], {}, "prompt_token_ids"),
        ([1], {"temperature": 3.0}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ([1], {"presence_penalty": -2.5}, "presence_penalty"),
        ([1], {"logit_bias": {40000: 1.0}}, "logit_bias"),
        ([1], {"logprobs": 21}, "logprobs"),
        ([1], {"json_schema": "{"}, "json_schema"),
        ([1], {"seed": -1}, "seed"),
        ([1], {"extra": {"vllm": {"lora": ["a", 1, "/a"]}}}, "lora"),
    ],
)
def test_what_kills_or_deafens_an_engine_is_refused_by_name_and_never_sent(vllm, prompt, params, field):
    group, mock = vllm(ranks=1, max_model_len=64)
    with pytest.raises(smg.InvalidRequest) as refused:
        group.submit(prompt, smg.SamplingParams(**params))
    assert field in refused.value.field
    collect(group.submit([1] * 63, smg.SamplingParams(max_tokens=1)))
    assert stats(mock)["adds"] == 1
    unharmed(mock)


def test_one_request_id_may_be_in_use_many_times(vllm):
    group, mock = vllm(ranks=1, group={"log_request_ids": True})
    streams = [group.submit([1], smg.SamplingParams(max_tokens=3), request_id="same") for _ in range(5)]
    assert all(len(tokens(collect(stream))) == 3 for stream in streams)
    unharmed(mock)


def test_what_only_vllm_has_is_refused_elsewhere(make_group, ipc_dir):
    with pytest.raises(ValueError, match="vllm"):
        smg.EngineGroup(f"ipc://{ipc_dir}/x", backend="tokenspeed", model=MODEL)
    group, _ = make_group(ranks=1)
    with pytest.raises(smg.InvalidRequest, match="utilities"):
        group.wait_utility("is_sleeping")


# ---------------------------------------------------------------- utilities


def test_utilities_answer_for_one_rank_or_for_all(vllm):
    group, mock = vllm()
    assert group.wait_utility("is_sleeping") == [False, False]
    assert group.wait_utility("reset_prefix_cache", rank=1) is True

    async def ask():
        assert await group.utility("sleep", 1, "abort", timeout=10) == [None, None]
        assert await group.utility("is_sleeping") == [True, True]
        await group.utility("wake_up")
        assert await group.utility("is_sleeping") == [False, False]
        return await group.utility("get_supported_tasks", rank=0)

    assert "generate" in asyncio.run(ask())
    unharmed(mock)


def test_adapters_can_be_loaded_listed_and_unloaded(vllm):
    group, mock = vllm(max_loras=2)
    assert group.wait_utility("add_lora", ["a", 3, "/adapters/a"]) == [True, True]
    assert group.wait_utility("list_loras", rank=0) == [3]
    assert group.wait_utility("remove_lora", 3) == [True, True]
    unharmed(mock)


def test_a_utility_that_fails_says_so_in_the_engines_words(vllm):
    group, mock = vllm(ranks=1)
    with pytest.raises(smg.UtilityError, match="add_lora on rank 0 failed: ") as failed:
        group.wait_utility("add_lora", ["a", 3, "/adapters/a"])
    assert (failed.value.rank, failed.value.method) == (0, "add_lora")
    unharmed(mock)


@pytest.mark.parametrize("method", ["shutdown", "__class__", "add_lora", "handle_fault_tolerance"])
def test_a_utility_that_could_deafen_an_engine_is_refused(vllm, method):
    group, mock = vllm(ranks=1)
    with pytest.raises(smg.InvalidRequest):
        group.wait_utility(method)
    unharmed(mock)


def test_a_utility_without_an_answer_times_out_and_is_forgotten(vllm):
    group, mock = vllm(ranks=1)
    mock.call("stall", rank=0)
    with pytest.raises(smg.UtilityTimeout, match="is_sleeping"):
        group.wait_utility("is_sleeping", timeout=0.05)
    with pytest.raises(smg.UtilityTimeout):
        asyncio.run(group.utility("is_sleeping", timeout=0.05))
    mock.call("resume", rank=0)
    assert group.wait_utility("is_sleeping", timeout=10) == [False]
    assert not group._loop.calls._waiting


@pytest.mark.parametrize("end", ["die", "close"])
def test_calls_of_a_rank_or_group_that_goes_away_fail(vllm, end):
    group, mock = vllm(ranks=1)
    mock.call("stall", rank=0)
    failed = []

    def ask():
        try:
            group.wait_utility("is_sleeping", timeout=10)
        except smg.Error as error:
            failed.append(type(error))

    thread = threading.Thread(target=ask)
    thread.start()
    settled(lambda: group._loop.calls._waiting)
    if end == "die":
        mock.call("die", rank=0)
    else:
        group.close()
    thread.join(10)
    assert failed == [smg.RankDied if end == "die" else smg.Closed]


def test_a_rank_that_hears_is_not_stalled_however_long_a_request_waits(vllm):
    group, mock = vllm(ranks=1, group={"stall_timeout": 0.2})
    mock.call("hold", rank=0)
    stream = group.submit([1], smg.SamplingParams(max_tokens=2))
    settled(lambda: stats(mock)["utilities"] >= 3)
    assert group.ranks[0].state == "live"
    stream.abort()


def test_a_rank_that_does_not_answer_is_stalled_until_it_does(vllm):
    group, mock = vllm(group={"stall_timeout": 0.2})
    mock.call("stall", rank=0)
    held = group.submit([1], smg.SamplingParams(max_tokens=2), rank=0)
    settled(lambda: group.ranks[0].state == "stalled")
    assert {collect(group.submit([1], smg.SamplingParams(max_tokens=2)))[0].rank for _ in range(6)} == {1}
    mock.call("resume", rank=0)
    assert len(tokens(collect(held))) == 2
    settled(lambda: group.ranks[0].state == "live")


def test_a_deaf_rank_is_dead_at_the_next_request_to_it_or_when_it_is_asked(vllm):
    group, mock = vllm(group={"stall_timeout": 0.4})  # a request may be lost in a connection that is just closing
    mock.call("deafen", rank=0)
    with pytest.raises(smg.RankDied):
        collect(group.submit([1], smg.SamplingParams(max_tokens=2), rank=0))
    assert {collect(group.submit([1], smg.SamplingParams(max_tokens=2)))[0].rank for _ in range(6)} == {1}


# ---------------------------------------------------------------- lockstep


def test_a_lockstep_group_serves_on_all_ranks(vllm, idle):
    group, mock = vllm(lockstep=True)
    for _ in range(5):
        streams = [group.submit([1, 2], smg.SamplingParams(max_tokens=4)) for _ in range(6)]
        assert all(len(tokens(collect(stream))) == 4 for stream in streams)
    assert [stats["adds"] for stats in mock.call("stats")] == [15, 15]
    idle(group)
    unharmed(mock)


def test_no_wake_up_is_lost_between_a_submit_and_the_ranks_parking(vllm, idle):
    group, mock = vllm(lockstep=True, ranks=3, step_ms=0.2)
    for number in range(1000):
        (*_, last) = collect(group.submit([1], smg.SamplingParams(max_tokens=1 + number % 5)))
        assert last.finish_reason == "length", number
    idle(group)
    assert group.wait_utility("is_sleeping", timeout=10) == [False] * 3, "a rank waits for others that sleep"
    unharmed(mock)


def test_one_death_fails_the_lockstep_group_and_says_so(vllm, idle):
    group, mock = vllm(lockstep=True, ranks=2, step_ms=5)
    streams = [group.submit([1], smg.SamplingParams(max_tokens=5000), rank=rank) for rank in (0, 1)]
    mock.call("die", rank=0)
    told = []
    for stream in streams:
        with pytest.raises(smg.RankDied) as died:
            collect(stream)
        told.append(str(died.value))
    assert any("lockstep" in text for text in told)
    idle(group)
    with pytest.raises(smg.NoRank):
        group.submit([1])


def test_a_lockstep_group_cannot_be_drained_rank_by_rank(vllm):
    group, _ = vllm(lockstep=True)
    with pytest.raises(smg.InvalidRank, match="step together"):
        group.drain(0)


def test_ranks_with_different_parallel_configs_are_refused(vllm):
    group, mock = vllm(lockstep=True, withhold=("ready",), live=False)
    settled(lambda: all(rank.state == "hello" for rank in group.ranks))
    group._loop.call(lambda: group._loop._config_hashes.update({0: "another"}))
    mock.call("proceed", rank=1)
    settled(lambda: group.ranks[1].refused)
    assert "parallel_config" in group.ranks[1].fault
    assert group.live == 0


def test_requests_go_on_after_a_sleep_of_the_lockstep_group(vllm):
    group, mock = vllm(lockstep=True)
    group.wait_utility("sleep", 1, "abort", timeout=10)
    group.wait_utility("wake_up", timeout=10)
    (*_, last) = collect(group.submit([1], smg.SamplingParams(max_tokens=4)))
    assert last.completion_tokens == 4
    unharmed(mock)
