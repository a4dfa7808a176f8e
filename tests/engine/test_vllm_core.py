"""vLLM's messages through a group's core: rows, counts, stops, logprobs, lost ids, utilities and waves."""

from __future__ import annotations

import msgpack
import pytest
from rig import Rig
from vllm_messages import STATS, array, logprobs, message, pack, row

import smg
from smg import _fastpath
from smg.protocol import vllm


@pytest.fixture
def rig():
    rig = Rig(backend="vllm")
    yield rig
    rig.close()


@pytest.fixture
def lockstep():
    rig = Rig(ranks=3, backend="vllm")
    rig.core.step_together()
    yield rig
    rig.close()


def started(rig, **options):
    """An outlet's stream on rank 0, its id on the wire, and the outlet."""
    outlet = smg._outlets.new_outlet(rig.core)
    stream = rig.submit(rank=0, outlet=outlet, **options)
    rig.pump()
    return stream, rig.ranks[0].adds[-1], outlet


def outputs(rig, outlet):
    rig.pump()
    return [output for _, output in outlet.take()]


def test_new_tokens_add_up_and_the_first_output_brings_the_prompts_counts(rig):
    _, rid, outlet = started(rig, prompt_tokens=3)
    prefill = {"num_prompt_tokens": 9, "num_cached_tokens": 4}
    rig.send(0, message(row(request_id=rid, new_token_ids=[7, 8], prefill_stats=prefill), engine_index=0))
    (first,) = outputs(rig, outlet)
    rig.send(0, message(row(request_id=rid, new_token_ids=[9], finish_reason=1), engine_index=0))
    (last,) = outputs(rig, outlet)
    assert (first.token_ids, first.prompt_tokens, first.cached_tokens, first.completion_tokens) == ([7, 8], 9, 4, 2)
    assert (last.token_ids, last.prompt_tokens, last.cached_tokens, last.completion_tokens) == ([9], 9, 4, 3)
    assert (last.finish_reason, last.stop_reason) == ("length", None)


def test_before_the_engine_says_so_the_prompt_is_as_long_as_submitted(rig):
    _, rid, outlet = started(rig, prompt_tokens=3)
    rig.send(0, message(row(request_id=rid), engine_index=0))
    assert outputs(rig, outlet)[0].prompt_tokens == 3


@pytest.mark.parametrize(
    ("said", "reason", "stop"),
    [
        ({"finish_reason": 0, "stop_reason": 42}, "stop", 42),
        ({"finish_reason": 0, "stop_reason": None}, "stop", None),
        ({"finish_reason": 4, "stop_reason": "repetition_detected"}, "repetition", "repetition_detected"),
        ({"finish_reason": 0, "stop_reason": "é" * 40}, "stop", "é" * 11 + "\ufffd"),
        ({"finish_reason": 3}, "error", None),
        ({"finish_reason": 9}, "error", None),
    ],
)
def test_what_was_matched_comes_with_the_last_output(rig, said, reason, stop):
    _, rid, outlet = started(rig)
    rig.send(0, message(row(request_id="other"), row(request_id=rid, **said), engine_index=0))
    (output,) = outputs(rig, outlet)
    assert (output.finish_reason, output.stop_reason) == (reason, stop)


def test_a_slots_stop_is_not_the_next_requests(rig):
    for expected in (42, None):
        _, rid, outlet = started(rig)
        rig.send(0, message(row(request_id=rid, finish_reason=0, stop_reason=expected), engine_index=0))
        assert outputs(rig, outlet)[0].stop_reason == expected
        outlet.close()


@pytest.mark.parametrize("aux", [False, True])
@pytest.mark.parametrize("top", [0, 1, None])
def test_logprobs_come_inline_or_in_parts_of_their_own_cut_to_what_was_asked(rig, aux, top):
    _, rid, outlet = started(rig, logprobs=top)
    found = logprobs()
    parts = []
    if aux:
        parts = [found[at][2].data for at in (0, 1, 2)]
        numbers = ("<i4", ((5, 6), (7, 8))), ("<f4", ((-0.5, -1.0), (-2.0, -3.0))), ("<i8", (1, 2))
        found = [array(code, values, part=at) for at, (code, values) in enumerate(numbers, 1)] + [None]
    rig.send(0, message(row(request_id=rid, new_token_ids=[5, 7], new_logprobs=found), engine_index=0), *parts)
    (output,) = outputs(rig, outlet)
    likeliest = [[(6, -1.0)], [(8, -3.0)]] if top != 0 else [[], []]
    assert output.logprobs == [(5, -0.5, likeliest[0]), (7, -2.0, likeliest[1])]
    assert rig.core.counters()["extra_parts"][0] == len(parts)


def test_a_message_of_many_short_parts_is_read_as_a_whole(rig):
    _, rid, outlet = started(rig)
    rows, parts = [], []
    for token in range(40):
        at = len(parts) + 1
        found = [array("<i4", ((token,),), part=at), array("<f4", ((-0.5,),), part=at + 1), array("<i8", (1,)), None]
        rows.append(row(request_id=rid, new_token_ids=[token], new_logprobs=found))
        parts += [array("<i4", ((token,),))[2].data, array("<f4", ((-0.5,),))[2].data]
    rig.send(0, message(*rows, engine_index=0), *parts)
    (output,) = outputs(rig, outlet)
    assert [token for token, _, _ in output.logprobs] == output.token_ids == list(range(40))


def test_a_message_that_lacks_a_part_changes_nothing(rig):
    _, rid, outlet = started(rig)
    found = [array("<i4", ((5,),), part=1), array("<f4", ((-0.5,),)), array("<i8", (1,)), None]
    rig.send(0, message(row(request_id=rid, new_logprobs=found), engine_index=0))
    assert outputs(rig, outlet) == []
    assert rig.core.counters()["undecodable"][0] == 1


def test_a_request_the_engine_is_done_with_ends_with_an_error_if_no_output_said_so(rig):
    _, rid, outlet = started(rig)
    other = rig.submit(rank=0, outlet=outlet)
    rig.pump()
    rig.send(0, message(row(request_id=rid, finish_reason=1), finished_requests=[rid], engine_index=0))
    assert [output.finish_reason for output in outputs(rig, outlet)] == ["length"]
    rig.send(0, message(finished_requests=[rid, rig.ranks[0].adds[-1], "somebody's"], engine_index=0))
    (error,) = outputs(rig, outlet)
    assert isinstance(error, smg.StreamError)
    assert other.request_id in str(error)
    counters = rig.core.counters()
    assert (counters["forgotten"][0], counters["finished"][0], rig.core.live) == (1, 1, 0)
    assert rig.ranks[0].aborts == []


def test_a_load_report_without_outputs_counts(rig):
    kept = started(rig)
    rig.send(0, message(scheduler_stats=STATS, engine_index=0))
    rig.pump()
    load, in_flight = [None, None], [0, 0]
    rig.core.snapshot(in_flight, load)
    assert load[0] == (2, 7, 0.25, True)
    assert kept[0].rank == 0


def test_a_utility_goes_to_its_rank_and_its_reply_comes_back_as_an_event(rig):
    assert rig.core.call(1, vllm.encode_utility(5, "is_sleeping"))
    rig.pump()
    assert rig.ranks[1].calls == [[0, 5, "is_sleeping", []]]
    rig.send(1, message(utility_output=[5, None, [None, False]], engine_index=1))
    ((kind, rank, _, detail, data, _),) = rig.pump()
    assert (kind, rank, detail) == (_fastpath.EventKind.UTILITY, 1, 5)
    assert vllm.decode_utility(data) == (5, None, False)
    assert rig.core.counters()["requests"] == [0, 0]


def test_a_dead_rank_takes_no_utility(rig):
    rig.send(1, b"ENGINE_CORE_DEAD")
    rig.pump()
    assert not rig.core.call(1, vllm.encode_utility(5, "is_sleeping"))


def test_a_silent_rank_is_asked_once_before_it_counts_as_stalled():
    rig = Rig(backend="vllm", stall_timeout=0.2)
    stream, kinds = rig.submit(rank=0), []
    while _fastpath.EventKind.STALLED not in kinds:
        assert rig.core.run(5)
        kinds += [event[0] for event in rig.core.events()]
    assert kinds == [_fastpath.EventKind.SILENT, _fastpath.EventKind.STALLED]
    stream.abort()
    rig.close()


# ---------------------------------------------------------------- waves


def test_each_submit_starts_a_wave_on_every_rank_after_its_own_add(lockstep):
    streams = [lockstep.submit(rank=1)]
    lockstep.pump()
    streams.append(lockstep.submit(rank=2))
    lockstep.pump()
    assert [rank.waves for rank in lockstep.ranks] == [[1, 2]] * 3
    kinds = []
    streams.append(lockstep.submit(rank=1))
    lockstep.core.run(0)
    while lockstep.ranks[1].dealer.poll(0):
        kinds.append(lockstep.ranks[1].dealer.recv_multipart()[0])
    assert kinds == [vllm.ADD, vllm.START_DP_WAVE]


def test_starts_that_wait_to_be_sent_are_one_with_the_latest_wave(lockstep):
    streams = [lockstep.submit(rank=0) for _ in range(500)]
    lockstep.pump()
    assert lockstep.ranks[1].waves == [500]
    assert lockstep.ranks[0].waves == list(range(1, 501))
    assert len(streams) == len(lockstep.ranks[0].adds)


def test_independent_ranks_never_get_a_wave(rig):
    rig.submit()
    rig.send(0, message(wave_complete=4, engine_index=0))
    rig.pump()
    rig.submit()
    rig.pump()
    assert [rank.waves for rank in rig.ranks] == [[], []]


def test_the_clock_passes_what_ranks_have_completed_and_never_goes_back(lockstep):
    for number, following in ((7, 9), (3, 10), (8, 11)):
        for index in range(3):
            lockstep.send(index, message(wave_complete=number, engine_index=index))
        lockstep.pump()
        lockstep.submit()
        lockstep.pump()
        assert lockstep.ranks[0].waves[-1] == following
    assert len(lockstep.ranks[0].waves) == 3


def parked(lockstep, *waves):
    """All ranks have parked, each after that wave."""
    for index, wave in enumerate(waves):
        lockstep.send(index, message(wave_complete=wave, engine_index=index))
        lockstep.pump()
    return [rank.waves for rank in lockstep.ranks]


def test_a_rank_that_used_up_a_start_before_all_parked_is_woken_with_those_that_had_not_read_it(lockstep):
    stream = lockstep.submit(rank=0)
    lockstep.pump()
    assert parked(lockstep, 0, 1, 0) == [[1], [1, 3], [1]]
    assert parked(lockstep, 1, 3, 1) == [[1], [1, 3], [1]], "all have parked, and nobody wakes"
    stream.abort()


@pytest.mark.parametrize("waves", [(0, 0, 0), (1, 1, 1), (1, 2, 5)])
def test_ranks_that_all_wake_or_all_sleep_are_told_nothing(lockstep, waves):
    stream = lockstep.submit(rank=0)
    lockstep.pump()
    assert parked(lockstep, *waves) == [[1]] * 3
    stream.abort()


def test_a_submit_while_ranks_tell_that_they_parked_wakes_all_of_them_once(lockstep):
    streams = [lockstep.submit(rank=0)]
    lockstep.pump()
    lockstep.send(1, message(wave_complete=1, engine_index=1))
    lockstep.pump()
    streams.append(lockstep.submit(rank=2))
    lockstep.pump()
    lockstep.send(0, message(wave_complete=0, engine_index=0))
    lockstep.send(2, message(wave_complete=0, engine_index=2))
    lockstep.pump()
    assert [rank.waves for rank in lockstep.ranks] == [[1, 3]] * 3
    assert len(streams) == 2


def test_a_rank_that_needs_a_wave_gets_it_on_all_ranks(lockstep):
    lockstep.send(1, message(start_wave=5, engine_index=1))
    lockstep.pump()
    assert [rank.waves for rank in lockstep.ranks] == [[6]] * 3


def test_one_death_is_all_ranks_death_and_says_so(lockstep):
    outlet = smg._outlets.new_outlet(lockstep.core)
    for index in range(3):
        lockstep.submit(rank=index, outlet=outlet)
    lockstep.pump()
    lockstep.send(0, message(row(request_id=lockstep.ranks[0].adds[0], finish_reason=1), engine_index=0))
    lockstep.send(1, b"ENGINE_CORE_DEAD")
    events = lockstep.pump()
    assert {(event[0], event[1]) for event in events} == {(_fastpath.EventKind.DEAD, index) for index in range(3)}
    taken = {stream.rank: output for stream, output in outlet.take()}
    assert taken[0].finish_reason == "length", "what a rank had sent before still counts"
    assert "reported that its engine is dead" in str(taken[1])
    assert "lockstep" in str(taken[2])
    assert all(isinstance(taken[index], smg.RankDied) for index in (1, 2))
    with pytest.raises(smg.NoRank):
        lockstep.submit()


def test_a_group_in_lockstep_takes_nothing_while_a_rank_is_missing(lockstep):
    lockstep.core.set_state(2, 1)
    with pytest.raises(smg.NoRank):
        lockstep.submit(rank=0)


def test_a_wave_is_sent_as_the_engine_decodes_it(lockstep):
    lockstep.submit(rank=0)
    lockstep.core.run(0)
    kind, payload = lockstep.ranks[1].dealer.recv_multipart()
    assert (kind, msgpack.unpackb(payload)) == (vllm.START_DP_WAVE, [1, None])
    assert vllm.encode_wave(1) == pack([1, None])
