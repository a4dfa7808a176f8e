"""Chat templates with the constructs that published models' templates are made of, one model family each.

The templates are written for these tests. What they expect of their surroundings is what transformers gives them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg.http.templates import ChatTemplate, TemplateError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": " Hi! "}
SAID = {"role": "assistant", "content": "Hello."}
CHAT = [SYSTEM, USER, SAID, {"role": "user", "content": "Bye."}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "It's <b>sunny</b>: 日本", "parameters": {"type": "object"}},
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call12345", "content": "21"}

FILES = Path(__file__).parent / "chat_templates"
CHATML, LLAMA, QWEN, MISTRAL, GEMMA, DEEPSEEK, PHI, PARTS = (
    (FILES / f"{name}.jinja").read_text(encoding="utf-8")
    for name in ("chatml", "llama", "qwen", "mistral", "gemma", "deepseek", "phi", "parts")
)


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(source, TOKENS).render(messages, **options)


# One family each


def test_chatml() -> None:
    text = render(CHATML, CHAT)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi! <|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text == render(CHATML, CHAT, add_generation_prompt=False) + "<|im_start|>assistant\n"


def test_llama_with_date_and_tools() -> None:
    text = render(LLAMA, CHAT, day="01 Jan 2026")
    assert text.startswith("<s><|head|>system<|/head|>\n\nIt is 01 Jan 2026.\n\nBe brief.<|eot|>")
    assert "<|head|>user<|/head|>\n\nHi!<|eot|>" in text  # trimmed
    assert text.endswith("<|head|>assistant<|/head|>\n\n")
    assert re.search(r"It is \d\d [A-Z][a-z]{2} 20\d\d\.\n", render(LLAMA, CHAT))
    text = render(LLAMA, [USER, CALL, RESULT], tools=[WEATHER])
    assert json.dumps(WEATHER, indent=4, ensure_ascii=False) + "\n\n" in text
    assert '{"name": "weather", "parameters": {"city": "Köln"}}<|eot|>' in text
    assert '<|head|>result<|/head|>\n\n"21"<|eot|>' in text
    with pytest.raises(TemplateError, match=r"^One call in a turn, please!$"):
        render(LLAMA, [USER, {**CALL, "tool_calls": CALL["tool_calls"] * 2}])


def test_qwen_with_tools_and_thinking() -> None:
    text = render(QWEN, [SYSTEM, USER, CALL, RESULT, RESULT], tools=[WEATHER], enable_thinking=False)
    assert text == (
        "<|im_start|>system\nBe brief.\n\nCallable:\n<tools>\n"
        + json.dumps(WEATHER, ensure_ascii=False)
        + "\n</tools><|im_end|>\n<|im_start|>user\n Hi! <|im_end|>\n<|im_start|>assistant\n"
        '<call>{"name": "weather", "arguments": {"city": "Köln"}}</call><|im_end|>\n'
        "<|im_start|>user\n<result>21</result>\n<result>21</result><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."}
    assert "hm" not in render(QWEN, [USER, thought, USER])
    assert render(QWEN, [USER, thought], add_generation_prompt=False).endswith(
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\nHello.<|im_end|>\n"
    )


def test_mistral_with_tools_and_alternation() -> None:
    assert render(MISTRAL, CHAT) == "<s>[INST]  Hi! [/INST] Hello.</s>[INST] Be brief.\n\nBye.[/INST]"
    assert render(MISTRAL, [USER, CALL, RESULT], tools=[WEATHER]) == (
        '<s>[TOOLS] [{"name": "weather", "description": '
        '"It\'s <b>sunny</b>: 日本", "parameters": {"type": "object"}}][/TOOLS][INST]  Hi! [/INST]'
        '[CALLS] [{"name": "weather", "arguments": {"city": "Köln"}, "id": "call12345"}]</s>'
        '[RESULT] {"content": 21, "id": "call12345"}[/RESULT]'
    )
    with pytest.raises(TemplateError, match="take turns, and the user begins"):
        render(MISTRAL, [USER, USER])
    with pytest.raises(TemplateError, match="An id has nine characters"):
        render(MISTRAL, [USER, {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "id": "x"}]}])


def test_gemma_refuses_a_system_message() -> None:
    assert render(GEMMA, [USER, SAID, USER]) == (
        "<s><turn>user\nHi!<end>\n<turn>model\nHello.<end>\n<turn>user\nHi!<end>\n<turn>model\n"
    )
    with pytest.raises(TemplateError, match=r"^No system turns here$"):
        render(GEMMA, CHAT)


def test_deepseek_drops_earlier_thoughts() -> None:
    thought = {"role": "assistant", "content": "<think>hm</think>Hello."}
    assert render(DEEPSEEK, [SYSTEM, USER, thought, USER]) == (
        "<s>Be brief.<|User|> Hi! <|Assistant|>Hello.<|end|><|User|> Hi! <|Assistant|><think>\n"
    )
    assert render(DEEPSEEK, [USER, CALL, RESULT]) == (
        '<s><|User|> Hi! <|Assistant|><calls>function<sep>weather\n{"city": "Köln"}</calls><out>21</out>'
    )


def test_phi_with_generation_marks() -> None:
    assert render(PHI, CHAT, add_generation_prompt=False) == (
        "<|system|>\nBe brief.<|end|>\n<|user|>\n Hi! <|end|>\n"
        "<|assistant|>\nHello.<|end|>\n<|user|>\nBye.<|end|>\n</s>"
    )


# Conventions


def test_blocks_are_trimmed_and_loops_controlled() -> None:
    source = """
{% for message in messages %}
    {% if loop.index0 == 1 %}{% continue %}{% endif %}
    {% if loop.index0 == 3 %}{% break %}{% endif %}
    {{ message.content }}
{% endfor %}
"""
    assert render(source, CHAT) == "\n    Be brief.\n    Hello.\n"


def test_tojson_is_plain_json() -> None:
    assert render("{{ messages | tojson }}", [{"role": "user", "content": "<&'>日本"}]) == (
        '[{"role": "user", "content": "<&\'>日本"}]'
    )
    source = "{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}"
    assert render(source, CHAT) == r'{"a":"\u00e9","b":1}'


def test_documents_and_the_requests_own_variables_are_there() -> None:
    source = "{{ documents is none }} {{ tools is none }} {{ mood is defined }} {{ mood }}"
    assert render(source, CHAT) == "True True False "
    assert render(source, CHAT, documents=[{"title": "t"}], mood="calm") == "False True True calm"


def test_one_rendering_leaves_nothing_to_the_next() -> None:
    template = ChatTemplate("{{ mood }}{% set mood = 'set' %}{% set bos_token = 'x' %}", TOKENS)
    assert template.render(CHAT, mood="first") == "first"
    assert template.render(CHAT) == ""


def test_the_callers_messages_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, CALL, SAID]
    before = json.dumps(messages)
    render(QWEN, messages, continue_final_message=True)
    render(PARTS, [messages[0]], continue_final_message=True)
    assert json.dumps(messages) == before


# Content in parts


PARTS_MESSAGE = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}


@pytest.mark.parametrize("source", [CHATML, LLAMA, QWEN, MISTRAL, GEMMA, DEEPSEEK, PHI])
def test_parts_become_one_text_for_templates_that_want_text(source: str) -> None:
    assert "one\ntwo" in render(source, [PARTS_MESSAGE])


@pytest.mark.parametrize(
    "source",
    [
        PARTS,
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content | list %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}",
        "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
        "{% for part in content %}[{{ part.text }}]{% endfor %}{% endif %}{% endmacro %}"
        "{% for m in messages %}{{ show(m['content']) }}{% endfor %}",
        "{% for m in messages %}{% set c = m.content if m.content is not string else [{'text': m.content}] %}"
        "{% for part in c %}[{{ part.text }}]{% endfor %}{% endfor %}",
    ],
)
def test_parts_stay_parts_for_templates_that_go_through_them(source: str) -> None:
    assert "[one][two]" in render(source, [PARTS_MESSAGE])
    assert "Hello." in render(source, [SAID])


def test_text_becomes_a_part_for_templates_that_know_nothing_else() -> None:
    source = "{% for m in messages %}{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endfor %}"
    assert render(source, [SAID, PARTS_MESSAGE]) == "[Hello.][one][two]"
    assert render(source, [PARTS_MESSAGE, SAID], continue_final_message=True) == "[one][two][Hello."


def test_parts_may_be_refusals_and_bare_strings_but_no_images() -> None:
    parts = ["a", {"type": "input_text", "text": "b"}, {"type": "refusal", "refusal": "c"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb\nc"
    for source in ("{{ messages[0].content }}", PARTS):
        with pytest.raises(TemplateError, match=r"'image_url'.*text only"):
            render(source, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


# Tool calls


def test_arguments_that_are_no_json_object_stay_as_they_are() -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    for arguments, shown in [("", "{}"), ("{broken", '"{broken"'), ("[1]", '"[1]"'), ({"x": 1}, '{"x": 1}')]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        assert render(source, [{"role": "assistant", "tool_calls": [call]}]) == shown


# Going on with the last message


@pytest.mark.parametrize("source", [CHATML, LLAMA, QWEN, GEMMA, DEEPSEEK, PHI, PARTS])
def test_a_final_message_is_continued_at_its_end(source: str) -> None:
    text = render(source, [USER, {"role": "assistant", "content": '{"name": "'}], continue_final_message=True)
    assert text.endswith('{"name": "')
    assert "CONTINUE" not in text


@given(
    content=st.text(max_size=20).filter(str.strip)
    | st.sampled_from(["assistant", "end", "<|im_end|>", "user\n", "a", "Hi!", "x "])
)
def test_any_text_is_continued_as_it_is(content: str) -> None:
    text = render(CHATML, [USER, {"role": "assistant", "content": content}], continue_final_message=True)
    assert text == render(CHATML, [USER], add_generation_prompt=True) + content


def test_a_template_that_trims_trims_what_is_continued() -> None:
    said = {"role": "assistant", "content": " So  "}
    assert render(GEMMA, [USER, said], continue_final_message=True).endswith("model\nSo")


def test_what_cannot_be_continued_is_refused() -> None:
    for content in (None, "", "  ", []):
        with pytest.raises(TemplateError, match="no text to continue"):
            render(CHATML, [USER, {"role": "assistant", "content": content}], continue_final_message=True)
    with pytest.raises(TemplateError, match="leaves the last message's text out"):
        render("{{ messages | length }}", [USER, SAID], continue_final_message=True)


# Errors and limits


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[9].content }}", "has no element 9"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ raise_exception('Nein: ä') }}", "^Nein: ä$"),
        ("{{ messages.append(1) }}", "immutable|unsafe|not safely callable"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include 'x' %}", "chat template"),
    ],
)
def test_a_failing_template_says_why(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render(source, CHAT)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x | nofilter }}", "{% endfor %}", "{{"])
def test_what_is_no_template_is_refused_at_once(source: str) -> None:
    with pytest.raises(ValueError, match="chat template, line 1"):
        ChatTemplate(source)


def test_a_rendering_out_of_all_bounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smg.http.templates.MAX_RENDERED", 10)
    assert render("{{ 'x' * 10 }}", CHAT) == "x" * 10
    with pytest.raises(TemplateError, match="more than 10 characters"):
        render("{{ 'x' * 11 }}", CHAT)
