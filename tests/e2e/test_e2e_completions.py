"""Completions through router and engine, as OpenAI's own client sees them."""

import pytest

SAME = {"temperature": 0, "seed": 7}


def complete(client, **options):
    given = {"model": "demo", "prompt": "The old road leads", "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    return client.completions.create(**{**given, **options})


def test_completion(client):
    answer = complete(client)
    assert answer.id
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6


def test_a_streamed_completion_is_the_whole_one_in_pieces(client):
    whole = complete(client, **SAME).choices[0].text
    choices = [choice for chunk in complete(client, stream=True, **SAME) for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]


def test_usage_comes_last_in_a_stream_that_asks_for_it(client):
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage is not None for chunk in chunks].index(True) == len(chunks) - 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6


def test_echo_puts_the_prompt_first(client):
    assert complete(client, echo=True).choices[0].text.startswith("The old road leads")


def test_every_prompt_of_a_batch_is_answered_n_times_in_order(client):
    prompts = ["One", "Two", "Three"]
    answer = complete(client, prompt=prompts, n=2, echo=True)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text[: len(prompts[i // 2])] for i, choice in enumerate(answer.choices)] == [
        prompts[i // 2] for i in range(6)
    ]
    assert answer.usage.completion_tokens == 36


def test_a_prompt_may_be_token_ids(client):
    assert complete(client, prompt=[5, 6, 7]).usage.prompt_tokens == 3


def test_logprobs_of_a_completion(client):
    logprobs = complete(client, logprobs=1).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 6
    assert all(logprob <= 0 for logprob in logprobs.token_logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_a_completion(client, stream):
    text = complete(client, max_tokens=32, **SAME).choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    answer = complete(client, max_tokens=32, stop=[stop], stream=stream, **SAME)
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
