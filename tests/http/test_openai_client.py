"""The official Python client against every endpoint it knows here."""

import openai
import pytest
from serving import Served

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(served: Served):
    with openai.OpenAI(base_url=f"{served.service.url}/v1", api_key="not-used", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(served: Served):
    async with openai.AsyncOpenAI(base_url=f"{served.service.url}/v1", api_key="not-used", max_retries=0) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["demo"]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_chat(client, n, logprobs):
    options = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=6, n=n, **options)
    assert len(answer.choices) == n
    for choice in answer.choices:
        assert choice.message.role == "assistant"
        assert isinstance(choice.message.content, str)
        assert choice.finish_reason == "length"
        if logprobs:
            assert len(choice.logprobs.content) == 6
            assert isinstance(choice.logprobs.content[0].token, str)
    assert answer.id
    assert answer.created
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("n", [1, 2])
def test_chat_streamed(client, n):
    stream = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=6, n=n, stream=True, stream_options={"include_usage": True}
    )
    roles, finishes, usages, contents = {}, {}, [], 0
    for chunk in stream:
        if chunk.usage is not None:
            assert chunk.choices == []
            usages.append(chunk.usage)
        for choice in chunk.choices:
            if choice.index not in roles:
                roles[choice.index] = choice.delta.role
            contents += bool(choice.delta.content)
            if choice.finish_reason:
                assert choice.index not in finishes
                finishes[choice.index] = choice.finish_reason
    assert roles == dict.fromkeys(range(n), "assistant")
    assert finishes == dict.fromkeys(range(n), "length")
    assert [usage.completion_tokens for usage in usages] == [6 * n]
    assert 0 < contents <= 6 * n


def test_chat_with_the_stream_helper(client):
    with client.chat.completions.stream(model="demo", messages=MESSAGES, max_tokens=6) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.current_completion_snapshot.choices[0].message.content == text


def test_completions(client):
    answer = client.completions.create(model="demo", prompt=["Hello", "A map"], max_tokens=4, n=2, echo=True)
    assert answer.object == "text_completion"
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[3].text.startswith("A map")
    assert answer.usage.completion_tokens == 16


def test_completions_streamed(client):
    stream = client.completions.create(model="demo", prompt="Hello", max_tokens=4, stream=True, seed=1)
    parts = [choice for chunk in stream for choice in chunk.choices]
    assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]
    whole = client.completions.create(model="demo", prompt="Hello", max_tokens=4, seed=1)
    assert "".join(part.text for part in parts) == whole.choices[0].text


def test_an_error_is_the_clients_exception(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=MESSAGES, temperature=3)
    assert caught.value.param == "temperature"
    assert caught.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)


def test_a_request_id_is_the_clients_request_id(client):
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=1, extra_headers={"X-Request-Id": "abc"}
    )
    assert answer._request_id == "abc"


async def test_async_chat(async_client):
    answer = await async_client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=6)
    assert answer.usage.completion_tokens == 6


async def test_async_chat_streamed(async_client):
    stream = await async_client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=6, stream=True)
    finishes = [choice.finish_reason async for chunk in stream for choice in chunk.choices]
    assert finishes[-1] == "length"
    assert finishes.count("length") == 1


async def test_async_completions_streamed(async_client):
    stream = await async_client.completions.create(model="demo", prompt="Hello", max_tokens=4, stream=True)
    assert [choice.finish_reason async for chunk in stream for choice in chunk.choices][-1] == "length"


async def test_async_models(async_client):
    assert [model.id async for model in async_client.models.list()] == ["demo"]
