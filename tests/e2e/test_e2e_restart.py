"""An engine that is killed while it serves."""

import os
import signal

import httpx
import openai
import pytest

MESSAGES = [{"role": "user", "content": "Where does the old road lead?"}]


def test_an_engine_that_is_killed_ends_its_streams_with_an_error_and_comes_back(client, lane, server):
    options = {"model": "demo", "messages": MESSAGES, "extra_body": {"ignore_eos": True}}
    before = len(server.lines)
    stream = iter(client.chat.completions.create(max_tokens=600, stream=True, **options))
    next(stream)
    os.kill(server.worker_pid(0), signal.SIGKILL)
    with pytest.raises(openai.APIError):
        for chunk in stream:
            assert not any(choice.finish_reason for choice in chunk.choices)
    server.wait_line(r"worker 0: rank\S* \S+ ready again", lane.startup_timeout, after=before)
    assert client.chat.completions.create(max_tokens=8, **options).usage.completion_tokens == 8
    (worker,) = httpx.get(f"{server.url}/workers").json()["workers"]
    assert [rank["incarnation"] for rank in worker["ranks"]] == [2] * lane.ranks
