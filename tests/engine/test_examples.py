"""The examples do what they say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from fastapi.testclient import TestClient

import smg
from smg.mock.simulator import Simulator

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic looks annotations up there
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"fastapi_app", "thread_worker", "batch"}


def test_threads_share_one_group(make_group):
    group, _ = make_group(ranks=2)
    example = load("thread_worker")
    results = example.run(group, example.PROMPTS)
    assert {tuple(prompt) for prompt in example.PROMPTS} == set(results)
    assert all(len(tokens) == 16 for tokens in results.values())
    assert group.requests == 0


def test_a_batch_comes_back_whole_and_a_death_is_told_per_request(make_group):
    group, mock = make_group(ranks=2)
    example = load("batch")
    params = smg.SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
    results = dict(example.complete(group, [[1, number] for number in range(50)], params))
    assert results == dict.fromkeys(range(50), mock.reply(3, 8))
    mock.hold()
    job = example.complete(group, [[1], [2]], params)
    mock.die(0, after_adds=1)
    mock.die(1, after_adds=1)
    assert {type(result) for _, result in job} == {smg.RankDied}
    assert group.requests == 0


def test_a_fastapi_app_embeds_a_group(ipc_dir, monkeypatch):
    url = f"ipc://{ipc_dir}/e"
    monkeypatch.setenv("SMG_WORKER_URL", url)
    monkeypatch.setenv("SMG_HANDSHAKE_ADDRESS", "tcp://127.0.0.1:0")
    example = load("fastapi_app")
    with TestClient(example.app) as client:
        group = example.app.state.group
        assert client.post("/generate", json={"prompt_token_ids": [1]}).status_code == 503
        with Simulator(url, handshake_address=group.handshake_address, step_ms=0):
            group.wait_ready(10)
            answer = client.post("/generate", json={"prompt_token_ids": [1, 2], "max_tokens": 5})
            events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line]
            assert sum(len(event["token_ids"]) for event in events) == 5
            assert events[-1]["finish_reason"] == "length"
            refused = client.post("/generate", json={"prompt_token_ids": [], "max_tokens": 5})
            assert (refused.status_code, "prompt_token_ids" in refused.text) == (400, True)
            assert client.get("/in_flight").json() == [0]
