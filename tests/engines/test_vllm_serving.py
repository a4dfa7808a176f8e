"""Groups of real vLLM engines, dense and in lockstep, through the HTTP front and embedded.

vLLM's own OpenAI server on the same weights is asked the same questions first.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer
from vllm_driver import CONTEXT, PATIENCE, Engines, Server, free_port, wait_until
from vllm_questions import (
    BODIES,
    CHAT,
    EOS,
    FIELDS,
    GREEDY,
    PROMPT,
    SCHEMA,
    TEXT,
    Reference,
    ask_reference,
    difference,
    told,
)
from vllm_served import Front, at_once, pieced_together, wait_live

import smg
from smg import InvalidRequest, SamplingParams

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
SHORT = SamplingParams(**GREEDY)


class Set(NamedTuple):
    """Engines that are started once for all tests of this file."""

    model: str
    ranks: int
    lockstep: bool


SETS = {
    "dense 1": Set("llama", 1, False),
    "dense 2": Set("llama", 2, False),
    "lockstep 2": Set("moe", 2, True),
}


class Served(NamedTuple):
    front: Front
    reference: Reference
    ranks: int
    lockstep: bool
    tokenizer: Tokenizer

    @property
    def group(self) -> smg.EngineGroup:
        return self.front.group


@pytest.fixture(scope="module")
def reference(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """What vLLM's own server says, which is up only while it is asked."""
    known: dict[str, Reference] = {}

    def ask(model: str) -> Reference:
        if model not in known:
            log = tmp_path_factory.mktemp("reference") / "log"
            with closing(Server(log, tiny_models / model, free_port())) as server:
                server.wait_ready()
                known[model] = ask_reference(server)
        return known[model]

    return ask


@pytest.fixture(scope="module", params=SETS.values(), ids=SETS)
def served(
    request: pytest.FixtureRequest,
    reference: Callable[[str], Reference],
    tiny_models: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    model, ranks, lockstep = request.param
    asked = reference(model)
    directory = tmp_path_factory.mktemp("s")
    directory.chmod(0o700)
    with closing(Front(directory, tiny_models / model, ranks)) as front:
        address = front.group.handshake_address
        with closing(Engines(directory / "log", tiny_models / model, ranks, address)) as engines:
            wait_live(front.group, engines)
            tokenizer = Tokenizer.from_file(str(tiny_models / model / "tokenizer.json"))
            yield Served(front, asked, ranks, lockstep, tokenizer)


@pytest.fixture(autouse=True)
def _nothing_is_left(served: Served) -> Iterator[None]:
    """Whatever a test did, its requests end, and every rank hears and steps."""
    yield
    wait_until(lambda: served.group.requests == 0, "no request in flight")
    assert served.group.wait_utility("is_sleeping") == [False] * served.ranks
    assert {rank.state for rank in served.group.ranks} == {"live"}
    assert sum(served.group.counters["undecodable"]) == 0


def outputs_of(stream: smg.Stream) -> list[smg.Output]:
    return list(stream.blocking(PATIENCE))


def tokens_of(stream: smg.Stream) -> list[int]:
    return [token for out in outputs_of(stream) for token in out.token_ids]


# ---------------------------------------------------------- who they are


def test_ranks_register_what_they_are(served: Served) -> None:
    for rank in served.group.ranks:
        assert (rank.state, rank.engine.split("+")[0]) == ("live", "0.32.0")
        assert (rank.max_model_len, rank.incarnation) == (CONTEXT, 1)
    assert served.group.max_model_len == CONTEXT


def test_all_ranks_serve(served: Served) -> None:
    served.group.wait_utility("pause_scheduler", "keep")  # none ends before the last is in
    streams = [served.group.submit(PROMPT, SHORT) for _ in range(4 * served.ranks)]
    ranks = [stream.rank for stream in streams]
    assert sorted(ranks) == sorted([*range(served.ranks)] * 4)
    served.group.wait_utility("resume_scheduler")
    expected = served.reference.told["greedy"].tokens
    assert [tokens_of(stream) for stream in streams] == [expected] * len(streams)
    answers = at_once(*[lambda: served.front.ask(CHAT, BODIES["chat"][1])] * (2 * served.ranks))
    assert {answer.headers["X-SMG-Rank"] for answer in answers} == set(map(str, range(served.ranks)))


# ---------------------------------------------------------- the same as vLLM's own server


@pytest.mark.parametrize("name", FIELDS)
def test_a_completion_is_that_of_vllms_own_server_on_every_rank(served: Served, name: str) -> None:
    streams = [served.group.submit(PROMPT, SamplingParams(**FIELDS[name]), rank=rank) for rank in range(served.ranks)]
    for rank, stream in enumerate(streams):
        outputs = outputs_of(stream)
        assert not told(outputs).unlike(served.reference.told[name])
        assert {out.rank for out in outputs} == {rank}
        counts = [(out.prompt_tokens, out.completion_tokens) for out in outputs]
        assert counts[-1] == (len(PROMPT), len(served.reference.told[name].tokens))


def test_async_iteration_gives_the_same(served: Served) -> None:
    async def collect(stream: smg.Stream) -> list[smg.Output]:
        return [out async for out in stream]

    async def main() -> list[list[smg.Output]]:
        params = SamplingParams(**FIELDS["logprobs"])
        streams = [served.group.submit(PROMPT, params, rank=rank) for rank in range(served.ranks)]
        return await asyncio.gather(*map(collect, streams))

    for outputs in asyncio.run(main()):
        assert not told(outputs).unlike(served.reference.told["logprobs"])


def comparable(path: str, answer: Any) -> Any:
    """An answer without what the router says in other words than vLLM's server."""
    choices = []
    for choice in answer["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        logprobs = choice["logprobs"]
        if logprobs and path == TEXT:
            # vLLM adds the sampled token to the likeliest.
            logprobs = {"tokens": list(map(plain, logprobs["tokens"])), "values": logprobs["token_logprobs"]}
        elif logprobs:
            logprobs = [
                [(plain(top["token"]), top["logprob"]) for top in (entry, *entry["top_logprobs"])]
                for entry in logprobs["content"]
            ]
        # vLLM leaves out a last token that ends within a character.
        choices.append((choice["index"], re.sub(r"[^\0-\x7f]+$", "", text), choice["finish_reason"], logprobs))
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"choices": choices, "usage": usage}


def plain(token: str) -> str | None:
    """A token's text, None for one that may be a part of a character: vLLM says "" until the character is whole."""
    return token if token and token.isascii() else None


ASKED = {**{name: (TEXT, {"prompt": PROMPT, **fields}) for name, fields in FIELDS.items()}, **BODIES}


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_is_that_of_vllms_own_server(served: Served, name: str) -> None:
    path, body = ASKED[name]
    expected = comparable(path, served.reference.answers[name])
    answer = served.front.ask(path, body)
    assert answer.status == 200, answer.body
    found = comparable(path, answer.json)
    assert not difference(found, expected)


@pytest.mark.parametrize("name", BODIES)
def test_a_streamed_answer_is_that_of_vllms_own_server(served: Served, name: str) -> None:
    path, body = BODIES[name]
    expected = comparable(path, served.reference.answers[name])
    answer = served.front.ask(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert answer.status == 200, answer.body
    found = comparable(path, pieced_together(path, answer.events))
    assert not difference(found, expected)


# ---------------------------------------------------------- ends


def test_a_stop_token_ends_a_completion_with_its_id(served: Served) -> None:
    tokens = served.reference.told["greedy"].tokens
    stop = tokens[5]
    fields = GREEDY | {"stop_token_ids": [stop, 9]}
    last = outputs_of(served.group.submit(PROMPT, SamplingParams(**fields)))[-1]
    assert (last.finish_reason, last.stop_reason, last.completion_tokens) == ("stop", stop, tokens.index(stop) + 1)
    held_back = tokens_of(served.group.submit(PROMPT, SamplingParams(**fields, min_tokens=10)))
    assert stop not in held_back[:10]
    assert held_back[: tokens.index(stop)] == tokens[: tokens.index(stop)]


def test_a_stop_string_ends_the_text_and_the_engines_request(served: Served) -> None:
    path, body = BODIES["text"]
    text = served.reference.answers["text"]["choices"][0]["text"]
    stop = text[20:25]
    asked = {**body, "max_tokens": 400, "stop": [stop]}
    assert text.index(stop) == 20
    choice = served.front.ask(path, asked).json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[:20], "stop")
    events = served.front.ask(path, {**asked, "stream": True}).events
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == text[:20]
    assert_freed(served)


def test_a_schema_is_kept_to(served: Served) -> None:
    """With a bias against whitespace, of which random weights would make any amount."""
    blank = [token for token in range(EOS) if served.tokenizer.decode([token]).isspace()]
    fields = {"max_tokens": 60, "temperature": 0, "logit_bias": dict.fromkeys(blank, -100.0)}
    stream = served.group.submit(PROMPT, SamplingParams(**fields, json_schema=json.dumps(SCHEMA)))
    choice = served.front.ask(CHAT, {**BODIES["chat with a schema"][1], **fields}).json["choices"][0]
    for text in (served.tokenizer.decode(tokens_of(stream)), choice["message"]["content"]):
        value = json.loads(text)
        assert value.keys() == {"a", "b"}
        assert value["a"] in ("left", "right")
        assert value["b"] in (True, False)
    assert choice["finish_reason"] == "stop"


def test_only_allowed_tokens_come_and_bad_words_do_not(served: Served) -> None:
    allowed = [11, 700, 4000]
    first = served.reference.told["greedy"].tokens[0]
    for own, wanted in (
        ({"allowed_token_ids": allowed}, lambda tokens: set(tokens) <= set(allowed)),
        ({"bad_words_token_ids": [[first]]}, lambda tokens: first not in tokens),
    ):
        tokens = tokens_of(served.group.submit(PROMPT, SamplingParams(**GREEDY, extra={"vllm": own})))
        assert len(tokens) == GREEDY["max_tokens"]
        assert wanted(tokens)


# ---------------------------------------------------------- aborts


def assert_freed(served: Served) -> None:
    """No rank holds a request's memory: it could not let go of its cache otherwise."""
    wait_until(lambda: all(served.group.wait_utility("reset_prefix_cache")), "the engine's memory is free")


def test_an_abort_frees_the_engines_request(served: Served) -> None:
    streams = [served.group.submit(PROMPT, LONG, rank=rank) for rank in range(served.ranks)]
    readers = [stream.blocking(PATIENCE) for stream in streams]
    for reader in readers:
        next(reader)
    assert served.group.wait_utility("reset_prefix_cache") == [False] * served.ranks
    began = time.monotonic()
    for stream in streams:
        stream.abort()
    assert served.group.in_flight.tolist() == [0] * served.ranks
    assert_freed(served)
    assert time.monotonic() - began < 2, "as long as it would have taken the engine to finish"


def test_leaving_the_loop_early_frees_the_engines_request(served: Served) -> None:
    async def main() -> None:
        async for _ in served.group.submit(PROMPT, LONG):
            break

    asyncio.run(main())
    assert_freed(served)


def test_a_client_that_leaves_frees_the_engines_request(served: Served) -> None:
    connection = served.front.connect()
    body = {**BODIES["chat"][1], "model": "tiny", "max_tokens": 400, "stream": True}
    connection.request("POST", CHAT, json.dumps(body))
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    response.close()
    connection.close()
    wait_until(lambda: served.group.requests == 0, "the router let go of it")
    assert_freed(served)


def test_a_deadline_ends_the_request_on_both_sides(served: Served) -> None:
    with pytest.raises(smg.DeadlineExceeded):
        outputs_of(served.group.submit(PROMPT, LONG, deadline=0.3))
    assert_freed(served)


# ---------------------------------------------------------- what never reaches an engine


def test_a_prompt_one_token_too_long_is_refused_here(served: Served) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        served.group.submit([7] * CONTEXT)
    assert refusal.value.field == "prompt_token_ids"
    answer = served.front.ask(TEXT, {"prompt": [7] * CONTEXT, "max_tokens": 1})
    assert answer.status == 400
    for rank in range(served.ranks):
        outputs = outputs_of(served.group.submit([7] * (CONTEXT - 1), SamplingParams(ignore_eos=True), rank=rank))
        assert (outputs[-1].finish_reason, outputs[-1].completion_tokens) == ("length", 1)


def test_token_ids_outside_of_the_vocabulary_are_refused_here(served: Served) -> None:
    for call in (
        lambda: served.group.submit([8192]),
        lambda: served.group.submit(PROMPT, SamplingParams(stop_token_ids=[8192])),
        lambda: served.group.submit(PROMPT, SamplingParams(logit_bias={8192: 1.0})),
    ):
        with pytest.raises(InvalidRequest):
            call()
    assert served.front.ask(TEXT, {"prompt": [8192], "max_tokens": 1}).status == 400


@pytest.mark.parametrize("fields", [{"temperature": 2.5}, {"top_p": 0}, {"max_tokens": 0}, {"presence_penalty": 3}])
def test_what_deafens_an_engine_is_refused_by_name(served: Served, fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(InvalidRequest) as refusal:
        served.group.submit(PROMPT, SamplingParams(**fields))
    assert refusal.value.field == name
    answer = served.front.ask(CHAT, {**BODIES["chat"][1], **fields})
    assert (answer.status, name in answer.json["error"]["message"]) == (400, True)


def test_requests_of_one_name_do_not_meet_on_the_engine(served: Served) -> None:
    streams = [served.group.submit(PROMPT, SHORT, request_id="the same", rank=0) for _ in range(3)]
    expected = served.reference.told["greedy"].tokens
    assert [tokens_of(stream) for stream in streams] == [expected] * 3


# ---------------------------------------------------------- utilities


def test_utilities_answer_for_every_rank_or_for_one(served: Served) -> None:
    group = served.group
    last = served.ranks - 1
    assert group.wait_utility("is_scheduler_paused") == [False] * served.ranks
    assert group.wait_utility("is_sleeping", rank=last) is False
    assert group.wait_utility("get_supported_tasks", rank=last) == ["generate"]

    async def main() -> Any:
        return await group.utility("reset_prefix_cache")

    assert asyncio.run(main()) == [True] * served.ranks


def test_a_utility_that_fails_says_so_in_the_engines_words(served: Served) -> None:
    with pytest.raises(smg.UtilityError, match="rank 0") as failure:
        served.group.wait_utility("profile", True, rank=0)
    assert failure.value.method == "profile"
    with pytest.raises(InvalidRequest):
        served.group.wait_utility("shutdown")


def test_a_paused_scheduler_keeps_its_requests_until_it_goes_on(served: Served) -> None:
    group = served.group
    streams = [group.submit(PROMPT, SHORT, rank=rank) for rank in range(served.ranks)]
    assert group.wait_utility("pause_scheduler", "keep") == [None] * served.ranks
    assert group.wait_utility("is_scheduler_paused") == [True] * served.ranks
    streams += [group.submit(PROMPT, SHORT, rank=rank) for rank in range(served.ranks)]
    assert group.wait_utility("resume_scheduler") == [None] * served.ranks
    expected = served.reference.told["greedy"].tokens
    assert [tokens_of(stream) for stream in streams] == [expected] * len(streams)


def test_a_sleep_aborts_what_runs_and_ranks_serve_when_they_are_awake(served: Served) -> None:
    group = served.group
    readers = [group.submit(PROMPT, LONG, rank=rank).blocking(PATIENCE) for rank in range(served.ranks)]
    for reader in readers:
        next(reader)
    assert (
        served.front.ask("/sleep", {"level": 1, "mode": "abort"}).json["workers"][0]["results"] == [None] * served.ranks
    )
    assert group.wait_utility("is_sleeping") == [True] * served.ranks
    assert [list(reader)[-1].finish_reason for reader in readers] == ["abort"] * served.ranks
    assert served.front.ask("/wake_up", {}).status == 200
    expected = served.reference.told["greedy"].tokens
    streams = [group.submit(PROMPT, SHORT, rank=rank) for rank in range(served.ranks)]
    assert [tokens_of(stream) for stream in streams] == [expected] * served.ranks


def test_the_admin_routes_ask_every_rank(served: Served) -> None:
    (worker,) = served.front.ask("/flush_cache", {}).json["workers"]
    assert worker == {"url": served.group.url, "results": [True] * served.ranks}


def test_an_adapter_that_an_engine_cannot_load_is_its_answer_and_not_its_end(served: Served) -> None:
    answer = served.front.ask("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere", "lora_int_id": 1})
    assert answer.status >= 400
    assert "add_lora" in answer.json["error"]["message"]


# ---------------------------------------------------------- load


def test_more_requests_than_fit_at_once_all_end_as_they_should(served: Served) -> None:
    """Lengths differ, so that ranks run out of work at different times: in lockstep, they park and are woken."""
    lengths = [1, 40, 2, 9, 24, 3] * 10
    streams = [
        served.group.submit([*PROMPT, 500 + at], SamplingParams(max_tokens=length, ignore_eos=True))
        for at, length in enumerate(lengths)
    ]
    assert [len(tokens_of(stream)) for stream in streams] == lengths
    assert served.group.in_flight.tolist() == [0] * served.ranks
    load = served.group.load
    assert load["reported"].all()


def test_single_requests_after_pauses_are_served_every_time(served: Served) -> None:
    """In lockstep, each finds the group parked, or on its way there."""
    expected = served.reference.told["greedy"].tokens[:3]
    for round_ in range(40):
        stream = served.group.submit(PROMPT, SamplingParams(max_tokens=3, temperature=0), rank=round_ % served.ranks)
        assert tokens_of(stream) == expected
        time.sleep(0.004 * (round_ % 10))  # the ranks' way into the park takes a few steps


def test_many_streamed_chats_at_once(served: Served) -> None:
    body = {**BODIES["chat"][1], "stream": True}
    expected = served.reference.answers["chat"]["choices"][0]["message"]["content"]
    answers = at_once(*[lambda: served.front.ask(CHAT, body)] * 24)
    texts = [pieced_together(CHAT, answer.events)["choices"][0]["text"] for answer in answers]
    assert texts == [expected] * 24
