"""The simulator's engine model under a clock that the test owns."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg.mock.model import Batch, Engine, Load, Request
from smg.mock.replies import Replies, make_replies
from smg.mock.settings import Settings
from smg.mock.tokenspeed import TokenSpeed
from smg.mock.vllm import VLLM

DEFAULTS = {"step_ms": 10.0, "vocab_size": 1000}
REPLIES = make_replies(Settings(**DEFAULTS))


def engine_of(replies: Replies = REPLIES, **options: Any) -> Engine:
    return Engine(Settings(**{**DEFAULTS, **options}), replies, TokenSpeed.ending)


def request(rid: str = "a", prompt: int = 8, **fields: Any) -> Request:
    return Request(rid=rid, prompt_tokens=prompt, **{"max_tokens": 4, **fields})


def run(engine: Engine, until: float = float("inf"), limit: int = 100_000) -> list[tuple[float, Batch]]:
    """Step exactly when due, and give (time, rows) of every step that had rows."""
    seen = []
    for _ in range(limit):
        if engine.due is None or engine.due > until:
            return seen
        now = engine.due
        batch = engine.step(now)
        if batch is not None:
            seen.append((now, batch))
    raise AssertionError("the engine does not come to an end")


def row(batch: Batch, rid: str) -> tuple[Any, ...]:
    place = batch.rids.index(rid)
    return tuple(getattr(batch, f.name)[place] for f in dataclasses.fields(batch) if f.name not in ("rids", "load"))


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(parts))


def test_an_idle_engine_has_nothing_due() -> None:
    engine = engine_of()
    assert engine.due is None
    assert engine.step(1.0) is None
    assert engine.load == Load(0, 0, 0, 20480)


def test_each_step_gives_each_request_one_token_and_the_last_one_its_reason() -> None:
    engine = engine_of()
    engine.add(request(prompt=8, seed=5, max_tokens=3), 1.0)
    frames = run(engine)
    reply = REPLIES.window(REPLIES.start(5), 0, 3)
    assert [row(batch, "a") for _, batch in frames] == [
        ([reply[0]], "", 8, 1, 0, [], []),
        ([reply[1]], "", 8, 2, 0, [], []),
        ([reply[2]], "length", 8, 3, 0, [], []),
    ]
    assert engine.due is None
    assert "a" not in engine


def test_steps_keep_to_an_absolute_schedule_whatever_the_callers_lag() -> None:
    engine = engine_of()
    engine.add(request(max_tokens=100), 0.0)
    engine.step(0.0)
    dues = []
    for k in range(100):
        assert engine.due is not None
        dues.append(engine.due)
        engine.step(engine.due + 0.0001 * (k % 7))
    assert dues == pytest.approx([0.01 * (k + 1) for k in range(100)])
    assert engine.counts.late_steps == 0


def test_a_long_stop_of_the_process_is_not_made_up_for_in_a_burst() -> None:
    engine = engine_of()
    engine.add(request(max_tokens=100), 0.0)
    engine.step(0.0)
    engine.step(5.0)
    assert engine.due == pytest.approx(5.01)
    assert engine.counts.late_steps == 1


def test_steps_without_duration_have_no_schedule_to_fall_behind() -> None:
    engine = engine_of(step_ms=0)
    engine.add(request(max_tokens=10), 0.0)
    for second in range(12):
        engine.step(float(second))
    assert engine.due is None
    assert engine.counts.late_steps == 0


def test_a_step_takes_its_base_time_and_something_for_each_decoding_request() -> None:
    engine = engine_of(step_ms=5, decode_per_req_ms=0.5)
    for rid in "abcd":
        engine.add(request(rid, max_tokens=3), 0.0)
    times = [when for when, _ in run(engine)]
    assert times == pytest.approx([0.005, 0.012, 0.019])  # nobody decodes in the first step, four do later


def test_prompts_are_prefilled_in_chunks_at_their_rate_first_come_first_served() -> None:
    engine = engine_of(step_ms=1, prefill_tps=1000, prefill_chunk=100)
    engine.add(request("a", prompt=150, max_tokens=1), 0.0)
    engine.add(request("b", prompt=30, max_tokens=1), 0.0)
    frames = run(engine)
    # 100 tokens of a; then its other 50 and the 30 of b.
    assert [(when, batch.rids) for when, batch in frames] == [(pytest.approx(0.18), ["a", "b"])]


def test_requests_decode_while_others_prefill() -> None:
    engine = engine_of(step_ms=1, prefill_tps=1000, prefill_chunk=50)
    engine.add(request("a", prompt=10, max_tokens=10), 0.0)
    run(engine, until=0.0105)
    engine.add(request("b", prompt=100, max_tokens=1), 0.0105)
    frames = run(engine)
    # The step under way when b came ends first; then two chunks of 50 ms each carry a on.
    assert [batch.rids for _, batch in frames[:3]] == [["a"], ["a"], ["a", "b"]]
    assert frames[2][0] - frames[0][0] == pytest.approx(0.1)


def test_cached_prompt_tokens_are_reported_and_not_prefilled() -> None:
    engine = engine_of(step_ms=0, prefill_tps=1000, cached_tokens=60)
    engine.add(request("a", prompt=100, max_tokens=1), 0.0)
    engine.add(request("b", prompt=10, max_tokens=1), 0.0)
    ((when, batch),) = run(engine)
    assert when == pytest.approx(0.041)  # 40 of a, and of b the one token that is never taken from the cache
    assert batch.cached_tokens == [60, 9]


def test_who_finds_no_place_waits_in_order() -> None:
    engine = engine_of(max_running=2)
    for rid in "abcd":
        engine.add(request(rid, max_tokens=2), 0.0)
    frames = run(engine)
    assert [(b.rids, b.load.running, b.load.waiting) for _, b in frames] == [
        (["a", "b"], 2, 2),
        (["a", "b"], 2, 2),
        (["c", "d"], 2, 0),
        (["c", "d"], 2, 0),
    ]


def test_the_load_in_a_row_is_the_one_its_step_was_planned_with() -> None:
    engine = engine_of(page_size=4, kv_pages=100)
    engine.add(request(prompt=7, max_tokens=3), 0.0)
    engine.step(0.0)
    assert engine.load == Load(1, 0, 2, 100)
    frames = run(engine)
    # 7 + 1 tokens are two pages; the second token opens the third. The last frame still counts its request.
    assert [batch.load for _, batch in frames] == [Load(1, 0, 2, 100), Load(1, 0, 3, 100), Load(1, 0, 3, 100)]
    assert engine.load == Load(0, 0, 0, 100)


def test_admission_waits_for_kv_pages() -> None:
    engine = engine_of(page_size=4, kv_pages=8)
    engine.add(request("a", prompt=19, max_tokens=4), 0.0)
    engine.add(request("b", prompt=13, max_tokens=2), 0.0)
    frames = run(engine)
    assert [batch.rids for _, batch in frames] == [["a"]] * 4 + [["b"]] * 2
    assert engine.counts.preempted == 0


def test_when_pages_run_out_the_newest_goes_back_and_loses_no_token() -> None:
    engine = engine_of(page_size=1, kv_pages=30)
    engine.add(request("a", prompt=8, max_tokens=12, seed=1), 0.0)
    engine.add(request("b", prompt=8, max_tokens=12, seed=2), 0.0)
    frames = run(engine)
    assert engine.counts.preempted > 0
    for rid, seed in (("a", 1), ("b", 2)):
        rows = [row(batch, rid) for _, batch in frames if rid in batch.rids]
        assert joined(r[0] for r in rows) == REPLIES.window(REPLIES.start(seed), 0, 12)
        assert [r[3] for r in rows] == list(range(1, 13))
    assert max(batch.load.kv_active_pages for _, batch in frames) <= 30


def test_who_was_sent_back_comes_before_those_who_wait() -> None:
    engine = engine_of(page_size=1, kv_pages=30, max_running=2)
    for rid in "abc":
        engine.add(request(rid, prompt=8, max_tokens=12), 0.0)
    frames = [batch for _, batch in run(engine)]
    assert engine.counts.preempted > 0
    # The pages that b gave back would do for c, but c is not let past b.
    first_of_c = next(place for place, batch in enumerate(frames) if "c" in batch.rids)
    last_of_a = max(place for place, batch in enumerate(frames) if "a" in batch.rids)
    assert first_of_c > last_of_a


def test_a_prompt_the_cache_can_never_hold_is_refused() -> None:
    engine = engine_of(page_size=4, kv_pages=8)
    assert engine.holds(30)
    assert not engine.holds(31)
    with pytest.raises(ValueError, match="31 prompt tokens"):
        engine.add(request(prompt=31), 0.0)


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding"])
def test_an_aborted_request_is_gone_at_once_and_silently(state: str) -> None:
    engine = engine_of(max_running=1, prefill_tps=1000, prefill_chunk=4)
    engine.add(request("a", prompt=8), 0.0)
    engine.add(request("b", prompt=8), 0.0)
    victim = "b" if state == "waiting" else "a"
    run(engine, until={"waiting": 0.0, "prefilling": 0.0, "decoding": 0.025}[state])
    assert engine.abort(victim)
    assert not engine.abort(victim)
    rids = {rid for _, batch in run(engine) for rid in batch.rids}
    assert rids == {"a", "b"} - {victim}
    assert engine.load == Load(0, 0, 0, 20480)


def test_an_abort_of_one_of_many_leaves_the_others_rows_alone() -> None:
    engine = engine_of()
    for seed, rid in enumerate("abcdef"):
        engine.add(request(rid, seed=seed, max_tokens=6), 0.0)
    early = run(engine, until=0.035)
    engine.abort("c")
    frames = early + run(engine)
    for seed, rid in enumerate("abdef"):
        seed += rid > "c"
        tokens = joined(row(batch, rid)[0] for _, batch in frames if rid in batch.rids)
        assert tokens == REPLIES.window(REPLIES.start(seed), 0, 6)


def lengths(interval: int, phase: int, total: int, **options: Any) -> list[int]:
    engine = engine_of(**options)
    engine.add(request(max_tokens=total, interval=interval, phase=phase), 0.0)
    return [row(batch, "a")[3] for _, batch in run(engine)]


def test_a_request_that_does_not_stream_has_rows_at_1_at_each_50_and_at_its_end() -> None:
    assert lengths(50, 0, 120) == [1, 50, 100, 120]
    assert lengths(50, 0, 100) == [1, 50, 100]
    assert lengths(50, 0, 1) == [1]


def test_a_stream_interval_gives_a_row_every_so_many_tokens_after_the_first() -> None:
    assert lengths(4, 1, 11) == [1, 5, 9, 11]


def test_several_tokens_per_step_come_in_one_row_and_the_last_row_is_cut_to_length() -> None:
    assert lengths(1, 0, 10, tokens_per_step=4) == [1, 5, 9, 10]
    engine = engine_of(tokens_per_step=4)
    engine.add(request(max_tokens=10, seed=3), 0.0)
    tokens = [row(batch, "a")[0] for _, batch in run(engine)]
    assert joined(tokens) == REPLIES.window(REPLIES.start(3), 0, 10)
    assert [len(part) for part in tokens] == [1, 4, 4, 1]


def test_logprobs_are_parallel_to_the_tokens_and_follow_from_the_seed() -> None:
    engine = engine_of(tokens_per_step=2)
    engine.add(request(max_tokens=4, seed=3, return_logprob=True), 0.0)
    engine.add(request("b", max_tokens=4), 0.0)
    start = REPLIES.start(3)
    rows = [row(batch, "a") for _, batch in run(engine)]
    assert joined(r[5] for r in rows) == REPLIES.logprob_window(start, 0, 4)
    assert [r[6] for r in rows] == [r[0] for r in rows]
    assert all(-4 <= value <= 0 for value in REPLIES.logprob_window(start, 0, 4))


def test_without_a_limit_a_reply_goes_on_to_the_end_of_the_context() -> None:
    assert lengths(50, 0, 10**9, max_model_len=200)[-1] == 190  # 200 - 2 - 8
    engine = engine_of(max_model_len=200)
    engine.add(request(max_tokens=None), 0.0)
    assert row(run(engine)[-1][1], "a")[1:4] == ("length", 8, 190)


def test_a_limit_of_nothing_and_a_prompt_as_long_as_the_context_still_give_one_token() -> None:
    assert lengths(1, 0, 0) == [1]
    engine = engine_of(max_model_len=10)
    engine.add(request(prompt=10), 0.0)
    assert row(run(engine)[-1][1], "a")[1:4] == ("length", 10, 1)


def ending(engine: Engine, **fields: Any) -> tuple[str, list[int]]:
    """Finish reason and all tokens of one request."""
    engine.add(request(**fields), 0.0)
    rows = [row(batch, "a") for _, batch in run(engine)]
    return rows[-1][1], joined(r[0] for r in rows)


def test_a_generated_stop_id_ends_the_reply_and_is_part_of_it() -> None:
    reply = REPLIES.window(REPLIES.start(1), 0, 50)
    place = next(i for i in range(5, 50) if reply.index(reply[i]) == i)
    wanted = frozenset({reply[place]})
    assert ending(engine_of(), seed=1, max_tokens=50, stop_token_ids=wanted) == ("stop", reply[: place + 1])
    assert ending(engine_of(), seed=1, max_tokens=place, stop_token_ids=wanted) == ("length", reply[:place])
    # At the same length the limit is looked at first.
    assert ending(engine_of(), seed=1, max_tokens=place + 1, stop_token_ids=wanted)[0] == "length"
    assert ending(engine_of(), seed=1, max_tokens=50, stop_token_ids=wanted, ignore_eos=True)[0] == "length"


def test_min_tokens_keeps_an_early_stop_id_from_ending_the_reply() -> None:
    reply = REPLIES.window(REPLIES.start(1), 0, 50)
    stop = frozenset({reply[2]})
    assert reply[2] not in reply[3:30]
    assert ending(engine_of(), seed=1, max_tokens=30, stop_token_ids=stop)[1] == reply[:3]
    assert ending(engine_of(), seed=1, max_tokens=30, stop_token_ids=stop, min_tokens=3)[1] == reply[:3]
    assert ending(engine_of(), seed=1, max_tokens=30, stop_token_ids=stop, min_tokens=4)[0] == "length"


def test_replies_that_end_by_themselves_have_drawn_lengths_and_end_with_the_eos_id() -> None:
    settings = Settings(**DEFAULTS, output_tokens="5-9")
    replies = make_replies(settings)
    seen = set()
    for seed in range(60):
        reason, tokens = ending(Engine(settings, replies, TokenSpeed.ending), seed=seed, max_tokens=100)
        assert (reason, tokens[-1]) == ("stop", 999)
        assert len(tokens) == replies.natural_length(seed)
        seen.add(len(tokens))
    assert seen == {5, 6, 7, 8, 9}
    assert ending(Engine(settings, replies, TokenSpeed.ending), seed=1, max_tokens=100, min_tokens=40)[1][-1] == 999
    assert ending(Engine(settings, replies, TokenSpeed.ending), seed=1, max_tokens=100, ignore_eos=True) == (
        "length",
        replies.window(replies.start(1), 0, 100),
    )


def test_a_request_id_given_twice_runs_twice_and_an_abort_finds_the_newer_one() -> None:
    engine = engine_of()
    engine.add(request("a", seed=1, max_tokens=3), 0.0)
    engine.add(request("a", seed=2, max_tokens=3), 0.0)
    assert engine.abort("a")
    tokens = [batch.token_ids for _, batch in run(engine)]
    assert joined(part for frame in tokens for part in frame) == REPLIES.window(REPLIES.start(1), 0, 3)


def test_residents_are_the_running_requests_with_their_true_lengths() -> None:
    engine = engine_of(max_running=2)
    for rid in "abc":
        engine.add(request(rid, max_tokens=9), 0.0)
    run(engine, until=0.035)
    batch = engine.residents()
    assert (batch.rids, batch.completion_tokens, batch.token_ids) == (["a", "b"], [3, 3], [[], []])


@st.composite
def scripts(draw: st.DrawFn) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    options = {
        "tokens_per_step": draw(st.integers(1, 5)),
        "page_size": draw(st.integers(1, 6)),
        "kv_pages": draw(st.integers(20, 60)),
        "max_running": draw(st.integers(1, 6)),
        "prefill_chunk": draw(st.integers(1, 40)),
        "cached_tokens": draw(st.integers(0, 5)),
        "max_model_len": draw(st.integers(3, 100)),
    }
    add = st.tuples(
        st.just("add"),
        st.integers(0, 14),
        st.integers(0, 30),
        st.integers(1, 4),
        st.booleans(),
        st.integers(0, 99),
    )
    abort = st.tuples(st.just("abort"), st.integers(0, 30))
    step = st.tuples(st.just("step"), st.integers(1, 4))
    return options, draw(st.lists(st.one_of(add, add, abort, step, step), max_size=60))


@given(scripts())
def test_every_request_gets_its_whole_reply_once_and_the_load_is_always_true(
    script: tuple[dict[str, Any], list[tuple[Any, ...]]],
) -> None:
    options, steps = script
    engine = engine_of(**options)
    gain, page = options["tokens_per_step"], options["page_size"]
    alive: dict[str, Request] = {}
    got: dict[str, list[int]] = defaultdict(list)

    def check_load() -> None:
        """Count pages and places from the requests themselves."""
        pages = 0
        for r in alive.values():
            if r.state == "prefilling":
                pages += -(-(r.prompt_tokens + r.done + 1) // page)
            elif r.state == "decoding":
                ahead = gain if engine._planned else 0
                pages += -(-(r.prompt_tokens + r.base + gain * engine.tick + ahead) // page)
        states = [r.state for r in alive.values()]
        running = states.count("prefilling") + states.count("decoding")
        assert engine.load == Load(running, states.count("waiting"), pages, options["kv_pages"])
        assert running <= options["max_running"]
        assert pages <= options["kv_pages"]

    def step() -> None:
        batch = engine.step(engine.due or 0.0)
        for place, rid in enumerate(batch.rids if batch else []):
            assert batch is not None
            tokens, reason = batch.token_ids[place], batch.finish_reasons[place]
            got[rid] += tokens
            assert batch.completion_tokens[place] == len(got[rid])
            assert tokens or reason
            r = alive[rid]
            assert got[rid] == REPLIES.window(r.start, 0, len(got[rid]))
            assert bool(reason) == (len(got[rid]) == r.finish_at)
            if reason:
                assert reason == r.finish_reason
                del alive[rid]

    added = 0
    for action, *values in steps:
        if action == "add":
            prompt, limit, interval, logprob, seed = values
            if engine.holds(prompt):
                r = Request(
                    f"r{added}",
                    prompt,
                    seed=seed,
                    max_tokens=limit,
                    interval=interval,
                    return_logprob=logprob,
                )
                alive[r.rid] = r
                engine.add(r, engine.due or 0.0)
                added += 1
        elif action == "abort":
            assert engine.abort(f"r{values[0]}") == (f"r{values[0]}" in alive)
            alive.pop(f"r{values[0]}", None)
        else:
            for _ in range(values[0]):
                step()
        check_load()
    for _ in range(20_000):
        if engine.due is None:
            break
        step()
    assert not alive
    check_load()
    assert not engine._events


# What vLLM's engines do differently, or can be told


def vllm_engine(**options: Any) -> Engine:
    return Engine(Settings(**{**DEFAULTS, **options}), REPLIES, VLLM.ending)


def how_it_ends(engine: Engine, **fields: Any) -> tuple[int, str]:
    """(tokens, reason) of a request alone on an engine."""
    engine.add(request(**fields), 0.0)
    last = run(engine)[-1][1]
    return last.completion_tokens[0], last.finish_reasons[0]


def test_a_stop_that_comes_with_the_last_token_allowed_counts_as_the_engine_has_it() -> None:
    stop = frozenset(REPLIES.window(REPLIES.start(5), 3, 4))
    assert how_it_ends(engine_of(), seed=5, stop_token_ids=stop) == (4, "length")
    assert how_it_ends(vllm_engine(), seed=5, stop_token_ids=stop) == (4, "stop")


def test_vllm_fills_its_context_and_tokenspeed_leaves_two_places() -> None:
    assert how_it_ends(engine_of(max_model_len=20), prompt=8, max_tokens=None) == (10, "length")
    assert how_it_ends(vllm_engine(max_model_len=20), prompt=8, max_tokens=None) == (12, "length")


def test_without_knowing_eos_a_reply_goes_on_and_stop_ids_still_end_it() -> None:
    replies = make_replies(Settings(**DEFAULTS, output_tokens="3"))
    engine = Engine(Settings(**DEFAULTS), replies, VLLM.ending)
    assert how_it_ends(engine, max_tokens=9) == (3, "stop")
    assert how_it_ends(engine, max_tokens=9, knows_eos=False) == (9, "length")
    stop = frozenset(replies.window(replies.start(5), 6, 7))
    assert how_it_ends(engine, seed=5, max_tokens=9, knows_eos=False, stop_token_ids=stop) == (7, "stop")


def test_a_halt_stops_between_two_tokens_and_go_goes_on() -> None:
    engine = engine_of()
    engine.add(request(seed=5), 0.0)
    run(engine, until=0.01)
    assert (engine.counts.steps, engine.unfinished, engine.stepping) == (1, 1, True)
    engine.halt()
    engine.add(request("b"), 0.02)
    assert (engine.due, engine.unfinished, engine.stepping) == (None, 0, False)
    engine.go(5.0)
    assert engine.due == 5.0
    frames = run(engine)
    assert row(frames[0][1], "a")[3] == 2
    assert joined(batch.rids for _, batch in frames).count("b") == 4


def test_requests_wait_while_none_is_admitted_and_those_that_run_go_on() -> None:
    engine = engine_of()
    engine.add(request("a"), 0.0)
    run(engine, until=0.01)
    engine.admitting = False
    engine.add(request("b"), 0.015)
    assert set(joined(batch.rids for _, batch in run(engine))) == {"a"}
    assert (engine.unfinished, len(engine._waiting)) == (0, 1)
    engine.add(request("c"), 1.0)
    assert engine.due is None
    engine.go(2.0)
    assert set(joined(batch.rids for _, batch in run(engine))) == {"b", "c"}


def test_preempted_requests_go_on_in_their_order_with_the_tokens_they_have() -> None:
    engine = engine_of()
    for rid in "abc":
        engine.add(request(rid, seed=5), 0.0)
    seen = run(engine, until=0.02)
    engine.preempt_all()
    assert engine.load == Load(0, 3, 0, 20480)
    seen += run(engine)
    for rid in "abc":
        tokens = [row(batch, rid)[0] for _, batch in seen if rid in batch.rids]
        assert joined(tokens) == REPLIES.window(REPLIES.start(5), 0, 4)
    assert seen[-1][1].rids == ["a", "b", "c"]
    assert engine.counts.preempted == 3
