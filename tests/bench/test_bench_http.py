"""`smg bench http --url`: what is sent, what is timed, how errors are told apart, against a server that is scripted."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from aiohttp import web

from smg.bench import loadtest
from smg.bench.loadtest import Load, Objective, Run, Sent, Target
from smg.bench.trace import SHAPES, Lengths, Shape
from smg.cli import main

FIVE = Shape(Lengths(3, 0.0, 3), Lengths(5, 0.0, 5))


class Server:
    """Answers with five pieces of text; the n-th request's fate may be another."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.fates: dict[int, str] = {}
        self.running = self.most = 0

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        fate = self.fates.get(len(self.bodies), "")
        self.bodies.append(body := await request.json())
        self.headers.append(request.headers.get("Authorization"))
        if fate == "refused":
            return web.json_response({"error": {"message": "busy"}}, status=429)
        self.running += 1
        self.most = max(self.most, self.running)
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(body["max_tokens"]):
            if fate == "broken" and number == 2:
                break
            if fate == "error" and number == 2:
                await response.write(b'data: {"error": {"message": "rank died"}}\n\n')
                break
            choice = {"delta": {"content": "a"}} if "messages" in body else {"text": "a"}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            await asyncio.sleep(0)
        else:
            usage = {"choices": [], "usage": {"completion_tokens": 5}}
            await response.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
        self.running -= 1
        return response


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    scripted = Server()
    runner = web.AppRunner(_app(scripted))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield scripted, f"http://127.0.0.1:{runner.addresses[0][1]}/"
    await runner.cleanup()


@pytest.fixture
def served() -> Iterator[tuple[Server, str]]:
    """The same server on a loop of its own, for tests of the command."""
    scripted, loop = Server(), asyncio.new_event_loop()
    runner = web.AppRunner(_app(scripted))
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
    thread = Thread(target=loop.run_forever)
    thread.start()
    yield scripted, f"http://127.0.0.1:{runner.addresses[0][1]}"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def _app(scripted: Server) -> web.Application:
    app = web.Application()
    app.router.add_get("/v1/models", scripted.models)
    app.router.add_post("/v1/chat/completions", scripted.answer)
    app.router.add_post("/v1/completions", scripted.answer)
    return app


async def test_a_closed_loop_keeps_so_many_requests_at_once_and_counts_all_tokens(server: tuple[Server, str]) -> None:
    scripted, url = server
    run = await loadtest.run(Target(url, "m", api_key="secret"), Load(FIVE, 20, concurrency=4), seed=1)
    assert len(run.sent) == len(scripted.bodies) == 20
    assert scripted.most <= 4
    assert all(sent.error is None and sent.tokens == 5 and len(sent.texts) == 5 for sent in run.sent)
    assert set(scripted.headers) == {"Bearer secret"}
    assert {len(body["messages"][0]["content"].split()) for body in scripted.bodies} == {3}
    assert all(0 < sent.ttft <= sent.texts[-1] <= sent.ended for sent in run.sent)


async def test_an_open_loop_begins_requests_whatever_is_under_way(server: tuple[Server, str]) -> None:
    _, url = server
    run = await loadtest.run(Target(url, "m", chat=False), Load(FIVE, 30, rate=300), seed=1)
    assert len(run.sent) == 30
    begun = sorted(sent.begun for sent in run.sent)
    assert 0.02 < begun[-1] - begun[0] < 2  # 0.1 s on average
    assert all(sent.error is None for sent in run.sent)


async def test_errors_are_told_apart_by_kind(server: tuple[Server, str]) -> None:
    scripted, url = server
    scripted.fates = {1: "refused", 3: "broken", 4: "error", 6: "refused"}
    run = await loadtest.run(Target(url, "m"), Load(FIVE, 8, concurrency=1), seed=1)
    assert run.errors == {"HTTP 429": 2, "broken off": 1, "error event": 1}
    assert run.complaint == "2 × HTTP 429, 1 × broken off, 1 × error event (busy)"
    figures = run.figures(Objective())
    assert figures["errors"] == 4
    assert figures["good"] == 50
    assert figures["goodput"] == pytest.approx(4 / run.seconds)


async def test_a_server_that_is_not_there_is_an_error_of_its_own(server: tuple[Server, str]) -> None:
    run = await loadtest.run(Target("http://127.0.0.1:9/", "m"), Load(FIVE, 2, concurrency=2), seed=1)
    assert run.errors == {"connection refused": 2}
    assert math.isnan(run.figures(Objective())["ttft_p50"])


def sent(*texts: float, ended: float = 1.0, error: str | None = None) -> Sent:
    return Sent(0.0, 0.0, list(texts), ended, len(texts), error)


@pytest.mark.parametrize(
    ("objective", "good"),
    [
        (Objective(), 2),
        (Objective(ttft=0.15), 1),
        (Objective(per_token=0.15), 1),
        (Objective(ttft=0.05), 0),
        (Objective(ttft=0.3, per_token=0.3, whole=0.9), 1),
    ],
)
def test_goodput_counts_requests_that_meet_every_bound(objective: Objective, good: int) -> None:
    requests = [sent(0.1, 0.3, 0.5, ended=0.6), sent(0.2, 0.3, 0.4), sent(0.1, error="timeout")]
    assert Run(requests, 2.0).figures(objective)["goodput"] == good / 2


def test_percentiles_are_of_first_tokens_gaps_and_whole_requests() -> None:
    figures = Run([sent(0.1, 0.3), sent(0.2, 0.5, ended=2.0)], 4.0).figures(Objective())
    assert figures["ttft_p99"] == pytest.approx(200)
    assert figures["itl_p99"] == pytest.approx(300)
    assert figures["e2e_p99"] == pytest.approx(2000)
    assert figures["throughput"] == 1


def test_the_same_seed_asks_the_same() -> None:
    load = Load(replace(SHAPES["sharegpt"]), 5, rate=1)
    assert list(load.prompts(3)) == list(load.prompts(3))
    assert list(load.prompts(3)) != list(load.prompts(4))


def test_the_command_sends_several_servers_the_same_and_compares_them(
    served: tuple[Server, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted, url = served
    path = tmp_path / "figures.json"
    arguments = ["bench", "http", "--url", f"ours={url}", "--url", f"theirs={url}/v1", "--concurrency", "2", "--rate"]
    arguments += ["200", "--requests", "4", "--repeats", "2", "--output-tokens", "5", "--slo-ttft-ms", "5000"]
    assert main([*arguments, "--json", str(path)]) == 0
    assert {body["model"] for body in scripted.bodies} == {"scripted"}
    measured = {m["name"]: m for m in json.loads(path.read_text())["measurements"]}
    for name in ("http.closed.2.ttft_p50", "http.open.200.goodput"):
        assert [len(of["samples"]) for of in measured[name]["contestants"].values()] == [2, 2]
    assert measured["http.open.200.errors"]["facts"]["errors"] == {"ours": {}, "theirs": {}}
    out = capsys.readouterr().out
    assert "| 2 at once: requests with TTFT ≤ 5000 ms (%) | 100.0 (100.0–100.0) | theirs |" in out
    assert "| ours | rival |" in out
    assert "2 at once: this client began late" not in out
    assert "200 a second: this client began late" in out


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x", "name="])
def test_a_url_that_is_none_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "http", "--url", url]) == 2
    assert f"--url {url}: must be http://" in capsys.readouterr().err


def test_a_server_that_is_down_is_said_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "http", "--url", "http://127.0.0.1:9"]) == 2
    assert "cannot list its models" in capsys.readouterr().err


def test_a_server_that_refuses_every_request_is_said_with_its_reason(
    served: tuple[Server, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted, url = served
    scripted.fates = dict.fromkeys(range(8), "refused")
    assert main(["bench", "http", "--url", f"it={url}"]) == 2
    assert "it answered none of 8 requests to warm up: 8 × HTTP 429 (busy)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error": {"message": "a\\n b"}}', "a b"),
        ('{"error": "plain"}', "plain"),
        ('{"detail": 1}', '{"detail": 1}'),
        ("[]", "[]"),
        ("<html>", "<html>"),
    ],
)
def test_what_a_server_says_of_an_error_is_kept_whatever_its_shape(body: str, message: str) -> None:
    assert loadtest._message(body) == message
