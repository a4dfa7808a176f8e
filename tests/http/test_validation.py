"""What is refused, with which status, code and field, and that nothing of it reaches an engine."""

import json

import pytest

from smg.engine.group import EngineGroup

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
USER = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

BASE = {
    CHAT: {"messages": USER, "max_tokens": 4},
    TEXT: {"prompt": "Hello", "max_tokens": 4},
    GENERATE: {"text": "Hello"},
}

BOTH = [
    *({"temperature": value} for value in (-0.1, 2.1, "1")),
    *({"top_p": value} for value in (0, 1.01, -1)),
    *({"top_k": value} for value in (0, -2, 1.5)),
    *({"min_p": value} for value in (-0.1, 1.1)),
    *({"frequency_penalty": value} for value in (-2.1, 2.1)),
    *({"presence_penalty": value} for value in (-2.1, 2.1)),
    *({"repetition_penalty": value} for value in (0, 2.1)),
    {"n": 0},
    {"n": 129},
    {"stop": ["a", "b", "c", "d", "e"]},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": "x" * 5000},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": ["a"]},
    {"seed": -1},
    {"seed": 2**64},
    {"logit_bias": {"5": 101}},
    {"logit_bias": {"99999999": 1}},
    {"logit_bias": {"-1": 1}},
    {"stop_token_ids": [5, 99999999]},
    {"min_tokens": 5},
    {"priority": 1},
    {"max_tokens": -1},
    {"regex": 5},
    {"rid": ""},
    {"stream": "yes"},
]

RANGES = [
    *((path, change, next(iter(change))) for change in BOTH for path in (CHAT, TEXT)),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"n": 11}, "n"),
    (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    (CHAT, {"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
    (CHAT, {"top_logprobs": 1}, "top_logprobs"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (TEXT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (TEXT, {"logprobs": 6}, "logprobs"),
    (TEXT, {"logprobs": 2}, "logprobs"),
    (TEXT, {"best_of": 1, "n": 2}, "best_of"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    (CHAT, {"continue_final_message": True}, "continue_final_message"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tool_choice": "auto"}, "tool_choice"),
    (CHAT, {"function_call": "auto"}, "function_call"),
    *(
        (CHAT, {"chat_template_kwargs": {name: None}}, f"chat_template_kwargs.{name}")
        for name in ("messages", "tools", "add_generation_prompt", "continue_final_message")
    ),
    (CHAT, {"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    (CHAT, {"response_format": {"type": "yaml"}}, "response_format.type"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"response_format": {"type": "json_object"}, "regex": "a+"}, "response_format"),
    (CHAT, {"response_format": {"type": "json_object"}, "json_schema": "{}"}, "response_format"),
    (TEXT, {"regex": "a+", "ebnf": "root ::= x"}, "regex"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "prompt"),
    (TEXT, {"prompt": ["a", 1]}, "prompt"),
    (TEXT, {"prompt": [1 << 20]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": [[1, 2], [1 << 31]]}, "prompt"),
    (TEXT, {"prompt": ["a"] * 20, "n": 100}, "n"),
    (GENERATE, {"input_ids": [1]}, "text"),
    (GENERATE, {"text": None}, "text"),
    (GENERATE, {"text": None, "input_ids": [99999]}, "input_ids"),
    (GENERATE, {"sampling_params": {"temperature": 3}}, "sampling_params.temperature"),
    (GENERATE, {"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    (GENERATE, {"sampling_params": {"sampling_seed": -1}}, "sampling_params.sampling_seed"),
    (GENERATE, {"return_logprob": True, "top_logprobs_num": 2}, "top_logprobs_num"),
    (GENERATE, {"return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
    (GENERATE, {"rid": ["a", "b"]}, "rid"),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [{}, {"top_k": 0}]}, "top_k"),
]

UNSUPPORTED = [
    (CHAT, {"tools": [TOOL]}, "tools"),
    (CHAT, {"tools": [TOOL], "tool_choice": "auto"}, "tools"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tools"),
    (CHAT, {"functions": [TOOL["function"]]}, "functions"),
    (CHAT, {"audio": {"voice": "x"}}, "audio"),
    (CHAT, {"modalities": ["audio"]}, "modalities"),
    (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"lora_path": "x"}, "lora_path"),
    (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    (TEXT, {"best_of": 3}, "best_of"),
    (TEXT, {"echo": True, "logprobs": 1}, "logprobs"),
    (TEXT, {"thinking_budget": 5}, "thinking_budget"),
    *((path, {"guided_json": {"type": "object"}}, "guided_json") for path in (CHAT, TEXT)),
    (CHAT, {"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
    (GENERATE, {"image_data": "x"}, "image_data"),
    (GENERATE, {"token_ids_logprob": [1]}, "token_ids_logprob"),
    (GENERATE, {"return_hidden_states": True}, "return_hidden_states"),
    (GENERATE, {"sampling_params": {"stop_regex": "x"}}, "stop_regex"),
    (GENERATE, {"sampling_params": {"custom_params": {"a": 1}}}, "custom_params"),
]


def refused(served, path, change):
    before = served.group.counters["requests"]
    answer = served.ask(path, BASE[path] | change)
    assert served.group.counters["requests"] == before, "a refused request was sent"
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["X-SMG-Error-Code"] == error["code"]
    return answer.status, error


def short(value):
    return json.dumps(value)[:60]


@pytest.mark.parametrize(("path", "change", "param"), RANGES, ids=short)
def test_a_value_out_of_range_is_refused_by_name(served, path, change, param):
    status, error = refused(served, path, change)
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_value"), error
    assert error["param"].split("[")[0] == param.split("[")[0], error
    assert param.split(".")[-1].split("[")[0] in error["message"]


@pytest.mark.parametrize(("path", "change", "param"), UNSUPPORTED, ids=short)
def test_what_nothing_here_can_do_is_refused_by_name(served, path, change, param):
    status, error = refused(served, path, change)
    assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", param)
    assert param in error["message"]


def test_a_named_function_must_exist(served):
    choice = {"type": "function", "function": {"name": "nonexistent_function"}}
    status, error = refused(served, CHAT, {"tools": [TOOL], "tool_choice": choice})
    assert status == 400
    assert "function 'nonexistent_function' not found in 'tools'" in error["message"]


def test_a_named_function_needs_its_name(served):
    status, error = refused(served, CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}})
    assert status == 400
    assert "name" in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT, GENERATE, "/v1/tokenize", "/v1/detokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b'{"a": }', b"\xff\xfe", b'{"model": "\xff"}'])
def test_a_body_that_is_not_json_is_refused(served, path, body):
    answer = served.ask(path, body, method="POST")
    assert answer.status == 400
    assert answer.json["error"]["code"] == "json_parse_error"
    assert answer.json["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [CHAT, TEXT, GENERATE, "/v1/tokenize", "/v1/detokenize"])
@pytest.mark.parametrize("body", [b"[]", b"5", b"null", b'"x"', b"{}"])
def test_a_body_of_another_kind_is_refused(served, path, body):
    answer = served.ask(path, body)
    assert answer.status == 400
    assert answer.json["error"]["code"] == "invalid_value"


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 50_000, b'{"messages":[{"role":"user","content":' + b"[" * 70 + b"]" * 70]
)
def test_a_body_that_nests_too_deep_is_refused(served, body):
    answer = served.ask(CHAT, body)
    assert (answer.status, answer.json["error"]["code"]) == (400, "json_too_deep")


def test_a_number_beyond_all_numbers_is_refused(served):
    body = b'{"messages":[{"role":"user","content":"x"}],"temperature":1e999}'
    answer = served.ask(CHAT, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, "temperature")


def test_an_unknown_model_is_not_found(served):
    answer = served.chat(model="gpt-9")
    assert answer.status == 404
    assert answer.json["error"]["code"] == "model_not_found"
    assert answer.json["error"]["param"] == "model"


def test_unknown_fields_are_accepted_and_counted(served):
    before = served.front.counts.unknown_fields["no_such_field"]
    assert served.chat(no_such_field={"x": 1}).status == 200
    assert served.front.counts.unknown_fields["no_such_field"] == before + 1
    assert 'smg_http_unknown_fields_total{field="no_such_field"}' in served.metrics()


def test_null_means_not_given(served):
    nulls = dict.fromkeys(
        ["temperature", "top_p", "n", "stop", "seed", "logprobs", "tools", "tool_choice", "response_format", "user"]
    )
    assert served.chat(**nulls).status == 200


def test_a_prompt_beyond_the_context_is_refused_before_anything_is_sent(serve):
    served = serve(mock={"max_model_len": 32})
    for path, body, param in (
        (CHAT, {"messages": [{"role": "user", "content": "word " * 40}]}, "messages"),
        (TEXT, {"prompt": "word " * 40}, "prompt"),
        (TEXT, {"prompt": ["x", "word " * 40]}, "prompt"),
        (GENERATE, {"input_ids": [5] * 32}, "input_ids"),
    ):
        answer = served.ask(path, body)
        assert answer.status == 400
        assert answer.json["error"]["code"] == "context_length_exceeded"
        assert answer.json["error"]["param"] == param
    assert served.group.counters["requests"] == [0, 0]


def test_the_models_own_context_counts_where_engines_report_none(serve, monkeypatch):
    served = serve()
    monkeypatch.setattr(EngineGroup, "max_model_len", None)
    served.front.model.context = 16
    assert served.ask("/v1/models").json["data"][0]["max_model_len"] == 16
    answer = served.ask(TEXT, {"prompt": [5] * 16, "max_tokens": 4})
    assert answer.json["error"]["code"] == "context_length_exceeded"
    assert served.ask(TEXT, {"prompt": [5] * 15, "max_tokens": 4}).status == 200
    assert sum(served.group.counters["requests"]) == 1


def test_variables_for_the_template_may_have_any_other_name(served):
    variables = {"self": 1, "template": 2, "context": 3, "enable_thinking": False, "no name": 4, "bos_token": "x"}
    assert served.chat(chat_template_kwargs=variables).status == 200


def test_a_template_error_is_the_clients_with_its_message(served):
    answer = served.ask(CHAT, {"messages": [{"role": "wizard", "content": "x"}], "max_tokens": 1})
    assert answer.status == 400
    assert "Unknown role: wizard" in answer.json["error"]["message"]
    assert answer.json["error"]["code"] == "chat_template_error"


def test_paths_and_methods(served):
    assert served.ask("/nope").json["error"]["code"] == "not_found"
    wrong = served.ask(CHAT)
    assert (wrong.status, wrong.headers["Allow"]) == (405, "POST")
    assert served.ask("/health", b"{}").status == 405
    assert served.ask("/health", method="HEAD").body == b""
