"""Plain requests are answered ahead of aiohttp's parser; whatever else comes is aiohttp's, and nobody can tell."""

from __future__ import annotations

import json

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from serving import CHAT, TEXT

from smg.http.plain import recognise
from smg.http.server import ConnectionLimits

PATHS = {CHAT, TEXT}
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "seed": 1}


def request(*headers: str, path: str = CHAT, body: bytes = b"{}", method: str = "POST", version: str = "1.1") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def test_a_plain_post_is_recognised_with_its_headers_and_body():
    found = recognise(request("X-Request-Id:  abc ", "Accept:", body=b'{"a":1}'), PATHS, 100, None)
    assert found is not None
    assert (found.path, found.body) == (CHAT, b'{"a":1}')
    assert found.headers == {"host": "x", "content-length": "7", "x-request-id": "abc", "accept": ""}


@pytest.mark.parametrize("value", ["keep-alive", "Keep-Alive "])
def test_a_client_may_say_that_it_keeps_the_connection(value):
    found = recognise(request(f"Connection: {value}"), PATHS, 100, None)
    assert found is not None
    assert found.keep_alive


@pytest.mark.parametrize(
    "data",
    [
        request(method="GET"),
        request(version="1.0"),
        request(path="/v1/models"),
        request(path=CHAT + "?a=b"),
        request("Transfer-Encoding: chunked"),
        request("Connection: close"),
        request("Connection: keep-alive, TE"),
        request("Connection: keep-alive", "Connection: keep-alive"),
        request("Keep-Alive: timeout=5"),
        request("Connection: keep-alive", "Keep-Alive: timeout=5"),
        request("Expect: 100-continue"),
        request("Content-Encoding: gzip"),
        request("Upgrade: websocket"),
        request("Content-Length: 2"),
        request("Host: y"),
        request("Folded: a\r\n b"),
        request("Bad name: a"),
        request("Tab\t: a"),
        request("Nul: a\0b"),
        request("Bare: a\rb"),
        request("Latin: \xe9"),
        request(body=b"x" * 101),
        request()[:-1],
        request() + b"P",
        request("X: " + "y" * 9000),
        request().replace(b"\r\n", b"\n"),
        request().replace(b"Length: 2", b"Length: +2"),
        request().replace(b"Length: 2", b"Length: 02"),
        request().replace(b"Host: x\r\n", b""),
        b"",
        b"POST",
    ],
    ids=lambda data: repr(data[:60]),
)
def test_anything_that_needs_interpretation_is_not(data):
    assert recognise(data, PATHS, 100, None) is None


@given(st.data())
def test_no_prefix_and_no_changed_byte_is_taken_for_another_request(data):
    whole = request("X-Request-Id: abc", "Accept: */*", body=b'{"prompt":"x"}')
    assert recognise(whole[: data.draw(st.integers(0, len(whole) - 1))], PATHS, 100, None) is None
    at, byte = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 255))
    changed = whole[:at] + bytes([byte]) + whole[at + 1 :]
    found = recognise(changed, PATHS, 100, None)
    if found is not None:
        assert found.path in PATHS
        assert changed.endswith(found.body)
        assert found.headers["content-length"] == str(len(found.body))


@pytest.fixture
def parsed(monkeypatch):
    """How often aiohttp's parser was given something."""
    calls = []
    original = web.RequestHandler.data_received

    def count(self, data):
        if data:  # aiohttp also calls it itself, without any
            calls.append(data)
        original(self, data)

    monkeypatch.setattr(web.RequestHandler, "data_received", count)
    return calls


def test_plain_and_parsed_requests_get_the_same_answer(serve, parsed):
    served = serve()
    body = json.dumps(BODY).encode()
    answers = []
    for headers in ((), ("TE: trailers",)):
        with served.dial() as raw:
            raw.post(CHAT, body, "X-Request-Id: same", *headers)
            answer = raw.until(b"}}")
            answers.append(answer)
    assert len(parsed) == 1
    heads, contents = zip(*(answer.split(b"\r\n\r\n") for answer in answers), strict=True)
    names = [sorted(line.split(b":")[0] for line in head.split(b"\r\n")) for head in heads]
    assert names[0] == names[1]
    messages = [json.loads(content)["choices"][0]["message"] for content in contents]
    assert messages[0] == messages[1]


def test_a_connection_goes_from_plain_to_parsed_when_it_must(serve, parsed):
    served = serve()
    with served.dial() as raw:
        for turn in range(3):
            raw.post(CHAT, BODY)
            raw.until(b'"usage"', turn + 1)
        assert parsed == []
        raw.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        raw.until(b'{"status":"ok"}')
        raw.post(CHAT, BODY)
        raw.until(b'"usage"', 4)
    assert len(parsed) == 2


def test_requests_that_come_early_are_answered_in_turn(serve, parsed):
    served = serve(mock={"step_ms": 5})
    with served.dial() as raw:
        for seed in range(4):
            raw.post(CHAT, BODY | {"seed": seed, "stream": seed % 2 == 1}, f"X-Request-Id: turn-{seed}")
        raw.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        received = raw.until(b'{"status":"ok"}')
    turns = [received.index(f"X-Request-Id: turn-{seed}".encode()) for seed in range(4)]
    assert turns == sorted(turns)
    assert received.index(b'{"status":"ok"}') > turns[-1]


def test_a_client_that_leaves_a_plain_request_aborts_it_once(serve, parsed):
    served = serve(mock={"hold": True})
    with served.dial() as raw:
        raw.post(CHAT, BODY)
        served.mock.wait_for("add")
    served.mock.wait_for("abort")
    assert parsed == []
    assert served.group.requests == 0
    assert sum(served.group.counters["aborts"]) == 1


def test_an_idle_plain_connection_is_closed(serve, parsed):
    served = serve(connection=ConnectionLimits(idle_timeout=0.15))
    with served.dial() as raw:
        raw.post(CHAT, BODY)
        raw.until(b'"usage"')
        raw.rest()
    assert parsed == []
