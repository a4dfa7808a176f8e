"""Chat completions through router and engine, as OpenAI's own client sees them."""

import openai
import pytest

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How do I get across the river?"}]
SAME = {"temperature": 0, "seed": 7}  # asked twice, the answer is the same


def chat(client, **options):
    return client.chat.completions.create(**{"model": "demo", "messages": MESSAGES, "max_tokens": 8, **options})


def length(client, **options):
    """Eight tokens exactly, whatever the model would rather say."""
    return chat(client, extra_body={"ignore_eos": True}, **options)


@pytest.fixture(params=[None, 1, 5], ids=["no logprobs", "top 1", "top 5"])
def logprobs(request, lane):
    if request.param == 5 and lane.engine.alternatives < 5:
        pytest.skip(f"{lane.name}'s wire carries the token's own logprob only")
    return {} if request.param is None else {"logprobs": True, "top_logprobs": request.param}


def check_logprobs(choice, asked, lane):
    if not asked:
        assert choice.logprobs is None
        return
    assert len(choice.logprobs.content) == 8
    for entry in choice.logprobs.content:
        assert isinstance(entry.token, str)
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) <= asked["top_logprobs"]
        if lane.engine.alternatives:
            assert len(entry.top_logprobs) == asked["top_logprobs"]


@pytest.mark.parametrize("n", [1, 2])
def test_chat(client, lane, n, logprobs):
    answer = length(client, n=n, **logprobs)
    assert answer.id
    assert answer.created
    assert answer.object == "chat.completion"
    assert [choice.index for choice in answer.choices] == list(range(n))
    for choice in answer.choices:
        assert choice.message.role == "assistant"
        assert isinstance(choice.message.content, str)
        assert choice.finish_reason == "length"
        check_logprobs(choice, logprobs, lane)
    usage = answer.usage
    assert usage.prompt_tokens > 0
    assert usage.completion_tokens == 8 * n
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("n", [1, 2])
def test_chat_streamed(client, n, logprobs):
    stream = length(client, n=n, stream=True, stream_options={"include_usage": True}, **logprobs)
    roles, finishes, usages, entries = {}, {}, [], dict.fromkeys(range(n), 0)
    for chunk in stream:
        if chunk.usage is not None:
            assert chunk.choices == []
            usages.append(chunk.usage)
        for choice in chunk.choices:
            if choice.index not in roles:
                roles[choice.index] = choice.delta.role
            if choice.logprobs and choice.logprobs.content:
                entries[choice.index] += len(choice.logprobs.content)
            if choice.finish_reason:
                assert choice.index not in finishes, "a choice finishes once"
                finishes[choice.index] = choice.finish_reason
    assert roles == dict.fromkeys(range(n), "assistant")
    assert finishes == dict.fromkeys(range(n), "length")
    assert [usage.completion_tokens for usage in usages] == [8 * n]
    assert usages[0].total_tokens == usages[0].prompt_tokens + 8 * n
    assert entries == dict.fromkeys(range(n), 8 if logprobs else 0)


def test_a_streamed_chat_is_the_whole_one_in_pieces(client):
    whole = length(client, **SAME).choices[0].message.content
    pieces = [choice.delta.content for chunk in length(client, stream=True, **SAME) for choice in chunk.choices]
    assert "".join(filter(None, pieces)) == whole


def test_the_stream_helper_of_the_client(client):
    with client.chat.completions.stream(model="demo", messages=MESSAGES, max_tokens=8) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.current_completion_snapshot.choices[0].message.content == text


def stopping_at(client):
    """An answer's text, and a string within it, some way in, to stop at."""
    text = chat(client, max_tokens=48, extra_body={"ignore_eos": True}, **SAME).choices[0].message.content
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    assert len(stop) == 4, f"too short to stop within: {text!r}"
    return text, stop


def test_a_stop_string_ends_the_answer_before_it(client):
    text, stop = stopping_at(client)
    choice = chat(client, max_tokens=48, stop=[stop, "\x00never"], extra_body={"ignore_eos": True}, **SAME).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == text[: text.index(stop)]


def test_a_stop_string_ends_a_stream_and_no_part_of_it_is_sent(client):
    text, stop = stopping_at(client)
    options = {"max_tokens": 48, "stop": stop, "stream": True, "extra_body": {"ignore_eos": True}, **SAME}
    choices = [choice for chunk in chat(client, **options) for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == text[: text.index(stop)]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]


def test_a_stop_string_stays_when_it_is_not_to_be_trimmed(client):
    text, stop = stopping_at(client)
    options = {"max_tokens": 48, "stop": stop, "extra_body": {"ignore_eos": True, "no_stop_trim": True}, **SAME}
    assert chat(client, **options).choices[0].message.content == text[: text.index(stop) + len(stop)]


def test_one_token(client):
    answer = chat(client, max_tokens=1, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 1
    assert answer.choices[0].finish_reason == "length"


def test_penalties_and_limits_are_taken(client):
    answer = length(client, frequency_penalty=0.5, presence_penalty=0.5, temperature=0.9, top_p=0.9)
    assert answer.choices[0].finish_reason == "length"


def test_content_in_parts(client):
    parts = [{"type": "text", "text": "Which river?"}, {"type": "text", "text": "This one."}]
    assert length(client, messages=[{"role": "user", "content": parts}]).usage.prompt_tokens > 0


def test_a_conversation_of_several_turns(client):
    turns = [*MESSAGES, {"role": "assistant", "content": "By boat."}, {"role": "user", "content": "Whose?"}]
    assert length(client, messages=turns).usage.prompt_tokens > length(client).usage.prompt_tokens


def test_a_request_id_of_the_clients_is_the_answers(client):
    assert chat(client, extra_body={"rid": "e2e-rid-1"}).id == "e2e-rid-1"
    answer = chat(client, extra_headers={"X-Request-Id": "corr-abc"})
    assert answer._request_id == "corr-abc"


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == ["demo"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": 3}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
        ({"n": 0}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
    ],
)
def test_what_cannot_be_is_the_clients_exception(client, options, error):
    with pytest.raises(error):
        chat(client, **options)


async def test_the_asynchronous_client(async_client):
    answer = await async_client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=8)
    assert answer.choices[0].finish_reason in ("length", "stop")
    stream = await async_client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=8, stream=True)
    finishes = [choice.finish_reason async for chunk in stream for choice in chunk.choices]
    assert len([finish for finish in finishes if finish]) == 1
