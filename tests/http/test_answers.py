"""Answers end to end: a real port, real sockets to simulated ranks, the demo tokenizer."""

import itertools
import json

import pytest
from scripted import END, TABLE, TOKENIZER, ids
from serving import CHAT, TEXT

GENERATE = "/generate"


def joined(events, index=0):
    """The text of one choice of a stream, chat or completion."""
    parts = [c for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in parts)


def test_chat(served):
    answer = served.chat("Hello", seed=7, max_tokens=12)
    assert answer.status == 200
    body = answer.json
    assert body["object"] == "chat.completion"
    assert body["model"] == "demo"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["index"] == 0
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"]
    usage = body["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert answer.headers["X-SMG-Rank"] in ("0", "1")


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_says_what_the_answer_in_one_piece_says(served, path):
    body = {"seed": 11, "max_tokens": 40}
    body |= {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    whole = served.ask(path, body).json["choices"][0]
    events = served.ask(path, body | {"stream": True}).events
    assert events[-1] == "[DONE]"
    assert joined(events) == (whole["message"]["content"] if path == CHAT else whole["text"])
    finishes = [c["finish_reason"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
    assert finishes == ["length"]


def test_the_same_seed_says_the_same_and_n_goes_on_from_it(served):
    three = [c["message"]["content"] for c in served.chat(seed=5, n=3).json["choices"]]
    assert len(set(three)) == 3
    assert [served.chat(seed=5 + i).json["choices"][0]["message"]["content"] for i in range(3)] == three


def test_seeds_of_n_go_on_from_the_highest_at_the_lowest(serve):
    served = serve()
    assert served.chat(seed=2**63 - 1, n=2).status == 200
    assert sorted(add["sampling_params"]["seed"] for add in served.mock.requests()) == [0, 2**63 - 1]


def test_n_counts_the_prompt_once_and_every_completion(served):
    one = served.chat(n=1).json["usage"]
    four = served.chat(n=4).json["usage"]
    assert four["prompt_tokens"] == one["prompt_tokens"]
    assert four["completion_tokens"] == 4 * one["completion_tokens"]


def test_n_spreads_over_the_ranks(served):
    assert sorted(served.chat(n=4).headers["X-SMG-Rank"].split(",")) == ["0", "0", "1", "1"]


@pytest.mark.parametrize("n", [1, 3])
def test_a_batch_of_prompts_has_its_indices_in_order(served, n):
    prompts = ["Hello", "The boat", "A map"]
    body = served.text(prompts, n=n, echo=True).json
    assert [c["index"] for c in body["choices"]] == list(range(3 * n))
    for choice in body["choices"]:
        assert choice["text"].startswith(prompts[choice["index"] // n])
    lengths = [len(TOKENIZER.encode(p).ids) for p in prompts]
    assert body["usage"]["prompt_tokens"] == sum(lengths)
    assert body["usage"]["completion_tokens"] == 3 * n * 8


def test_a_streamed_batch_has_one_finish_per_index_and_one_usage(served):
    answer = served.text(["Hello", "The boat"], n=2, stream=True, stream_options={"include_usage": True})
    chunks = answer.events[:-1]
    finished = [c["index"] for e in chunks for c in e["choices"] if c["finish_reason"]]
    assert sorted(finished) == [0, 1, 2, 3]
    usages = [e["usage"] for e in chunks if e.get("usage")]
    assert len(usages) == 1
    assert chunks[-1]["choices"] == []
    assert usages[0]["completion_tokens"] == 32


def test_prompts_as_token_ids(served):
    tokens = TOKENIZER.encode("The boat").ids
    by_ids = served.text(tokens, seed=3).json
    by_text = served.text("The boat", seed=3).json
    assert by_ids["choices"] == by_text["choices"]
    assert by_ids["usage"] == by_text["usage"]
    two = served.text([tokens, tokens], seed=3).json["choices"]
    assert [c["text"] for c in two] == [by_ids["choices"][0]["text"]] * 2
    echoed = served.text(ids("The boat"), echo=True, seed=3).json["choices"][0]["text"]
    assert echoed.startswith("The boat")


def test_echo_and_suffix(served):
    plain = served.text("Hello", seed=4).json["choices"][0]["text"]
    around = served.text("Hello", seed=4, echo=True, suffix="(end)").json["choices"][0]["text"]
    assert around == "Hello" + plain + "(end)"
    events = served.text("Hello", seed=4, echo=True, suffix="(end)", stream=True).events
    assert joined(events) == around


def test_echo_of_the_prompt_alone_asks_no_engine(served):
    before = served.group.counters["requests"]
    body = served.text("Hello", echo=True, max_tokens=0).json
    assert body["choices"][0]["text"] == "Hello"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert served.group.counters["requests"] == before


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_the_engines_work(serve, stream):
    served = serve(mock={"step_ms": 1})
    words = served.chat(seed=9, max_tokens=30).json["choices"][0]["message"]["content"]
    stop = words[len(words) // 2 : len(words) // 2 + 7]
    answer = served.chat(seed=9, max_tokens=5000, stop=[stop, "never said"], stream=stream)
    if stream:
        last = answer.events[-2]["choices"][0]
        text = joined(answer.events)
    else:
        last = answer.json["choices"][0]
        text = last["message"]["content"]
    assert text == words[: words.index(stop)]
    assert last["finish_reason"] == "stop"
    assert last["matched_stop"] == stop
    # One ABORT for it, and nothing is left in flight.
    assert len(served.mock.wait_for("abort", timeout=5)["rids"]) == 1
    assert served.group.in_flight.tolist() == [0, 0]
    assert sum(served.group.counters["aborts"]) == 1


def test_no_stop_trim_leaves_the_stop_in_the_text(served):
    words = served.chat(seed=9, max_tokens=30).json["choices"][0]["message"]["content"]
    stop = words[10:16]
    choice = served.chat(seed=9, max_tokens=30, stop=stop, no_stop_trim=True).json["choices"][0]
    assert choice["message"]["content"] == words[: words.index(stop) + len(stop)]


def test_a_stop_string_of_one_token_goes_to_the_engine_too(serve):
    served = serve()
    served.chat(stop=[" the", " no such single token"], stop_token_ids=[77])
    (add,) = served.mock.requests()
    assert sorted(add["sampling_params"]["stop_token_ids"]) == sorted([77, ids(" the")[0]])


def test_the_end_of_sequence_is_not_in_the_text(serve):
    served = serve(mock={"output_tokens": "5", "eos_token_id": END})
    for special in (True, False):
        choice = served.chat(seed=2, skip_special_tokens=special).json["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert "<|im_end|>" not in choice["message"]["content"]
        assert "matched_stop" not in choice
    kept = served.chat(seed=2, skip_special_tokens=False, no_stop_trim=True).json["choices"][0]
    assert kept["message"]["content"].endswith("<|im_end|>")


def test_chat_logprobs_name_every_token(served):
    choice = served.chat(logprobs=True, top_logprobs=1, seed=3).json["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 8
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    assert all(entry["logprob"] <= 0 for entry in content)
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    assert all([top["token"] for top in entry["top_logprobs"]] == [entry["token"]] for entry in content)


def test_streamed_logprobs_lose_no_token(served):
    events = served.chat(logprobs=True, seed=3, max_tokens=30, stream=True).events[:-1]
    parts = [c["logprobs"] for e in events for c in e["choices"] if c["logprobs"]]
    assert sum(len(part["content"]) for part in parts) == 30


def test_completion_logprobs(served):
    choice = served.text(logprobs=1, seed=3).json["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"][0] == 0
    assert len(logprobs["token_logprobs"]) == 8


def test_sampling_fields_reach_the_engine(serve):
    served = serve(mock={"grammar_backend": True})
    fields = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "seed": 12345,
        "min_tokens": 2,
        "ignore_eos": True,
        "logit_bias": {"100": 5},
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "x": [1]}}}
    assert served.chat(**fields, response_format=wanted).status == 200
    (add,) = served.mock.requests()
    sampling = add["sampling_params"]
    for name in ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "seed"):
        assert sampling[name] == fields[name], name
    assert sampling["repetition_penalty"] == 1.5
    assert sampling["min_new_tokens"] == 2
    assert sampling["max_new_tokens"] == 8
    assert sampling["ignore_eos"] is True
    assert sampling["logit_bias"] == {"100": 5}
    assert json.loads(sampling["json_schema"]) == {"type": "object", "x": [1]}


def test_a_json_object_is_any_object(serve):
    served = serve(mock={"grammar_backend": True})
    served.text(response_format={"type": "json_object"})
    (add,) = served.mock.requests()
    assert json.loads(add["sampling_params"]["json_schema"]) == {"type": "object"}


def test_tools_go_to_the_template_when_none_is_to_be_called(served):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    plain = served.chat().json["usage"]["prompt_tokens"]
    with_tools = served.chat(tools=[tool], tool_choice="none").json["usage"]["prompt_tokens"]
    assert with_tools > plain


def test_content_parts_are_text(served):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    assert served.ask(CHAT, body).status == 200


def test_an_assistants_message_can_be_continued(served):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The boat"}]
    open_end = served.ask(CHAT, {"messages": messages, "max_tokens": 2, "continue_final_message": True})
    closed = served.ask(CHAT, {"messages": messages, "max_tokens": 2})
    assert open_end.status == 200
    assert open_end.json["usage"]["prompt_tokens"] < closed.json["usage"]["prompt_tokens"]


# ------------------------------------------------------------ ids


def test_an_id_in_the_body_is_the_answers_id(served):
    assert served.chat(rid="my-id").json["id"] == "my-id"
    assert served.text(rid="my-id", stream=True).events[0]["id"] == "my-id"


def test_an_id_in_a_header_is_echoed_and_begins_the_answers_id(served):
    for name in ("X-Request-Id", "x-correlation-id"):
        answer = served.chat(headers={name: "corr-abc"})
        assert answer.headers["X-Request-Id"] == "corr-abc"
        assert answer.json["id"].startswith("corr-abc-")


def test_an_id_is_made_where_there_is_none(served):
    first, second = served.chat(), served.chat()
    assert first.headers["X-Request-Id"] == first.json["id"]
    assert first.json["id"] != second.json["id"]
    assert served.ask(GENERATE, {"text": "x"}).headers["X-Request-Id"].startswith("gnt-")
    assert served.ask("/workers").headers["X-Request-Id"].startswith("req-")
    assert served.chat(temperature=9).headers["X-Request-Id"].startswith("chatcmpl-")


def test_a_header_that_is_no_id_is_not_echoed(served):
    answer = served.chat(headers={"X-Request-Id": "a b" * 200})
    assert answer.headers["X-Request-Id"].startswith("chatcmpl-")


# ------------------------------------------------------------ /generate


def test_generate_from_text_and_from_ids(served):
    sampling = {"max_new_tokens": 6, "sampling_seed": 8}
    by_text = served.ask(GENERATE, {"text": "The boat", "sampling_params": sampling}).json
    tokens = TOKENIZER.encode("The boat").ids
    by_ids = served.ask(GENERATE, {"input_ids": tokens, "sampling_params": sampling}).json
    assert by_text["text"] == by_ids["text"]
    meta = by_ids["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["prompt_tokens"] == len(tokens)
    assert meta["completion_tokens"] == 6
    assert len(by_ids["output_ids"]) == 6
    assert TOKENIZER.decode(by_ids["output_ids"]) == by_ids["text"]


def test_generate_streams_the_whole_text_each_time(served):
    sampling = {"max_new_tokens": 6, "sampling_seed": 8}
    events = served.ask(GENERATE, {"text": "The boat", "sampling_params": sampling, "stream": True}).events
    assert events[-1] == "[DONE]"
    texts = [event["text"] for event in events[:-1]]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert [event["meta_info"]["finish_reason"] for event in events[:-2]] == [None] * (len(events) - 2)
    assert events[-2]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    assert len(events[-2]["output_ids"]) == 6


def test_generate_for_several_prompts_is_a_list(served):
    body = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2, "n": 2}, "rid": ["x", "y"]}
    found = served.ask(GENERATE, body).json
    assert [one["meta_info"]["id"] for one in found] == ["x-0", "x-1", "y-0", "y-1"]
    events = served.ask(GENERATE, body | {"stream": True}).events[:-1]
    assert {event["index"] for event in events} == {0, 1, 2, 3}


@pytest.mark.parametrize("stream", [False, True])
def test_generate_may_sample_every_prompt_in_its_own_way(serve, stream):
    served = serve()
    ways = [
        {"max_new_tokens": 2, "temperature": 0.5, "sampling_seed": 1, "n": 2},
        {"max_new_tokens": 0, "n": 2},
        {"max_new_tokens": 4, "top_p": 0.25, "sampling_seed": 7, "n": 2, "stop": "never said", "no_stop_trim": True},
    ]
    answer = served.ask(GENERATE, {"text": ["a", "b", "c"], "sampling_params": ways, "stream": stream})
    found = answer.json if not stream else [{}] * 6
    for event in answer.events[:-1]:
        found[event["index"]] = event
    assert [len(one["output_ids"]) for one in found] == [2, 2, 0, 0, 4, 4]
    sent = {add["sampling_params"]["seed"]: add["sampling_params"] for add in served.mock.requests()}
    assert sorted(sent) == [1, 2, 7, 8]
    assert {(sent[seed]["temperature"], sent[seed]["max_new_tokens"]) for seed in (1, 2)} == {(0.5, 2)}
    assert {(sent[seed]["top_p"], sent[seed]["max_new_tokens"]) for seed in (7, 8)} == {(0.25, 4)}


def test_generate_logprobs(served):
    body = {"text": "a", "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
    found = served.ask(GENERATE, body).json
    logprobs = found["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in logprobs] == found["output_ids"]
    assert [entry[2] for entry in logprobs] == [None] * 3
    with_text = served.ask(GENERATE, body | {"return_text_in_logprobs": True}).json
    assert all(
        entry[2] == TABLE.bytes_of(entry[1]).decode("utf-8", "replace")
        for entry in with_text["meta_info"]["output_token_logprobs"]
    )


# ------------------------------------------------------------ what else is answered


def test_tokenize_and_detokenize(served):
    found = served.ask("/v1/tokenize", {"prompt": "The boat", "add_special_tokens": False}).json
    assert found["tokens"] == ids("The boat")
    assert found["count"] == len(found["tokens"])
    assert served.ask("/v1/detokenize", {"tokens": found["tokens"]}).json == {"text": "The boat"}
    several = served.ask("/v1/tokenize", {"prompt": ["a", "The boat"]}).json
    assert len(several["tokens"]) == 2
    texts = served.ask("/v1/detokenize", {"tokens": several["tokens"]}).json["text"]
    assert texts == ["a", "The boat"]
    assert served.ask("/v1/detokenize", {"tokens": [1 << 30]}).json["error"]["param"] == "tokens"


def test_models(served):
    found = served.ask("/v1/models").json
    assert [model["id"] for model in found["data"]] == ["demo"]
    assert found["data"][0]["max_model_len"] == 131072


def test_health_and_readiness(served):
    assert served.ask("/health").status == 200
    assert served.ask("/liveness").status == 200
    assert served.ask("/readiness").json == {"status": "ready", "healthy_workers": 1, "total_workers": 1}


def test_without_ranks_the_process_is_healthy_and_not_ready(serve):
    served = serve(mock=None)
    assert served.ask("/health").status == 200
    ready = served.ask("/readiness")
    assert (ready.status, ready.json["status"]) == (503, "not ready")
    refused = served.chat()
    assert (refused.status, refused.json["error"]["code"]) == (503, "no_available_workers")
    assert refused.headers["Retry-After"]


def test_workers_and_loads(served):
    served.chat(n=2)
    workers = served.ask("/workers").json
    assert workers["total"] == 1
    (worker,) = workers["workers"]
    assert worker["connection_mode"] == "zmq"
    assert [rank["state"] for rank in worker["ranks"]] == ["live", "live"]
    (loads,) = served.ask("/get_loads").json["workers"]
    assert loads["dp_rank_count"] == 2
    assert [rank["in_flight"] for rank in loads["loads"]] == [0, 0]


def test_server_and_model_info(served):
    assert served.ask("/get_server_info").json["backend"] == "tokenspeed"
    assert served.ask("/get_model_info").json["is_generation"] is True


def test_timings_are_in_usage_when_asked_for(serve):
    served = serve(front={"response_timings": True})
    timings = served.chat().json["usage"]["timings"]
    assert 0 <= timings["queued_ms"] <= timings["first_token_ms"] <= timings["total_ms"]
    events = served.chat(stream=True, stream_options={"include_usage": True}).events
    assert set(events[-2]["usage"]["timings"]) == {"queued_ms", "first_token_ms", "total_ms"}


def test_the_openapi_document_names_every_path(served):
    document = served.ask("/openapi.json").json
    for path in (CHAT, TEXT, GENERATE, "/v1/tokenize", "/workers", "/readiness"):
        assert path in document["paths"]
    assert "/sleep" not in document["paths"], "TokenSpeed has no such thing"
    schema = document["components"]["schemas"]["ChatRequest"]
    assert schema["required"] == ["messages"]
    assert schema["properties"]["temperature"]["anyOf"][0]["maximum"] == 2


def test_one_candidate_is_the_sampled_token_where_the_engine_names_no_others(served):
    found = served.ask(TEXT, {"prompt": "Hi", "max_tokens": 3, "logprobs": 1}).json["choices"][0]["logprobs"]
    assert found["top_logprobs"] == [
        {token: value} for token, value in zip(found["tokens"], found["token_logprobs"], strict=True)
    ]
    native = {"text": "Hi", "sampling_params": {"max_new_tokens": 3}, "return_logprob": True, "top_logprobs_num": 1}
    meta = served.ask("/generate", native).json["meta_info"]
    assert meta["output_top_logprobs"] == [[entry] for entry in meta["output_token_logprobs"]]
