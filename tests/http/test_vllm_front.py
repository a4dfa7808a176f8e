"""The HTTP front before simulated vLLM ranks: answers, the fields only vLLM has, and the admin routes."""

from __future__ import annotations

import pytest
from scripted import MODEL
from serving import CHAT, TEXT, Served

from smg.http import tokenizer

EOS = next(iter(tokenizer.load(str(MODEL)).end_ids))


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    directory = tmp_path_factory.mktemp("v", numbered=True)
    directory.chmod(0o700)
    served = Served(directory, {"backend": "vllm"}, 2, {"backend": "vllm", "max_loras": 1, "max_model_len": 4096})
    yield served
    served.close()


def asked(vllm):
    """The last request that a rank was sent."""
    found = [request for rank in vllm.mock.call("requests") for request in rank]
    return max(found, key=lambda request: request["arrival_time"])


def test_chat_is_answered_streamed_and_not(vllm):
    whole = vllm.chat(max_tokens=6, temperature=0)
    streamed = vllm.chat(max_tokens=6, temperature=0, stream=True)
    choice = whole.json["choices"][0]
    assert (whole.status, choice["finish_reason"]) == (200, "length")
    assert whole.json["usage"]["completion_tokens"] == 6
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in streamed.events[:-1])
    assert text == choice["message"]["content"]
    assert asked(vllm)["sampling_params"]["_eos_token_id"] == EOS


def test_logprobs_have_the_likeliest_tokens(vllm):
    entries = vllm.chat(max_tokens=3, logprobs=True, top_logprobs=4).json["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [4] * 3
    found = vllm.ask(TEXT, {"prompt": "Hi", "max_tokens": 3, "logprobs": 2}).json["choices"][0]["logprobs"]
    assert [len(top) for top in found["top_logprobs"]] == [2] * 3


def test_bad_words_become_token_ids_as_they_stand_alone_and_after_a_space(vllm):
    model = vllm.front.model
    assert vllm.chat(bad_words=["hello"]).status == 200
    spelled = [model.encode("hello", False), model.encode(" hello", False)]
    sent = asked(vllm)["sampling_params"]["_bad_words_token_ids"]
    assert sent[0] == spelled[0]
    assert all(ids in spelled for ids in sent)


def test_allowed_token_ids_and_priority_reach_the_engine(vllm):
    assert vllm.chat(allowed_token_ids=[5, 6], priority=3).status == 200
    request = asked(vllm)
    assert (request["sampling_params"]["allowed_token_ids"], request["priority"]) == ([5, 6], 3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": [f"word{i}" for i in range(200)]}, "bad_words"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5] * 2000}, "allowed_token_ids"),
        ({"lora_path": "a"}, "lora_path"),
        ({"seed": -5}, "seed"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format"),
    ],
)
def test_what_the_engine_would_not_survive_is_a_400_that_names_the_field(vllm, fields, param):
    answer = vllm.chat(**fields)
    assert answer.status == 400
    assert answer.json["error"]["param"].startswith(param)


def test_a_prompt_that_fills_the_context_is_refused(vllm):
    answer = vllm.ask(TEXT, {"prompt": [5] * 4096, "max_tokens": 1})
    assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")


def test_admin_routes_ask_every_rank(vllm):
    def results(path, body=None, method="POST"):
        answer = vllm.ask(path, body, method=method)
        assert answer.status == 200, answer.body
        return answer.json["workers"][0]["results"]

    assert results("/flush_cache") == [True, True]
    assert results("/is_sleeping", method="GET") == [False, False]
    assert results("/sleep", {"level": 1}) == [None, None]
    assert results("/is_sleeping", method="GET") == [True, True]
    results("/wake_up", {})
    assert results("/is_sleeping", method="GET") == [False, False]
    results("/start_profile")
    results("/stop_profile")
    adapter = {"lora_name": "a", "lora_path": "/adapters/a", "lora_int_id": 4}
    assert results("/v1/load_lora_adapter", adapter) == [True, True]
    assert results("/v1/lora_adapters", method="GET") == [[4], [4]]
    assert results("/v1/unload_lora_adapter", {"lora_int_id": 4}) == [True, True]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/sleep", {"level": 7}, "level"),
        ("/sleep", {"mode": "deep"}, "mode"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a", "lora_int_id": 0}, "lora_int_id"),
        ("/v1/unload_lora_adapter", {}, "lora_int_id"),
    ],
)
def test_an_admin_route_refuses_what_the_engine_would(vllm, path, body, param):
    answer = vllm.ask(path, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


def test_other_engines_have_no_admin_routes(served):
    answer = served.ask("/flush_cache", {})
    assert (answer.status, answer.json["error"]["code"]) == (501, "not_supported")
    assert served.ask(CHAT, {"messages": [{"role": "user", "content": "a"}], "bad_words": ["a"]}).status == 400


def test_no_rank_was_harmed(vllm):
    for stats in vllm.mock.call("stats"):
        assert (stats["state"], stats["deafening"], stats["duplicates"], stats["undecodable"]) == ("live", 0, 0, 0)
