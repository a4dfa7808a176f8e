"""What clients can do to a server that listens: after all of it, nothing of them is left in it, by count."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from serving import BODY, CHAT, STREAM, Served, wait_until

from smg.http.server import ConnectionLimits

Serve = Callable[..., Served]
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: no goodbye


def counts(served: Served) -> dict[str, int]:
    """Everything that a client can make the server's process hold."""
    _, _, live, untaken = served.group._core.slots
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "tasks": served.on_loop(lambda: len(asyncio.all_tasks())),
        "connections": served.service._servers[0].open_connections,
        "requests": served.group.requests,
        "live slots": live,
        "slots not taken": untaken,
        "admitted": served.front.admission.active,
        "queued": served.front.admission.queued,
        "completions": len(served.front.active),
    }


@contextmanager
def nothing_left(served: Served) -> Iterator[None]:
    """After the block, no count stays above what it was, and the server still answers.

    Below is no leak: descriptors of an earlier test's service may go meanwhile.
    """
    assert served.chat("long " * 60_000, max_tokens=1).status == 200  # its thread is made once and kept
    gc.collect()  # sockets of an earlier test's service
    wait_until(lambda: counts(served)["connections"] == 0)
    before = counts(served)
    yield
    gc.collect()
    try:
        wait_until(lambda: all(count <= before[name] for name, count in counts(served).items()), 20)
    except AssertionError:
        assert counts(served) == before
    assert served.chat().status == 200


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A client's misconduct is no failure of the server's: nothing is logged as one."""
    yield
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


def hang_up(connection: socket.socket, hard: bool) -> None:
    if hard:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    connection.close()


def post(body: dict[str, object], *headers: str) -> bytes:
    raw = json.dumps(body).encode()
    lines = [f"POST {CHAT} HTTP/1.1", "Host: x", f"Content-Length: {len(raw)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


@pytest.mark.parametrize("headers", [(), ("X-Odd: 1",)], ids=["plain", "parsed"])
def test_requests_cut_at_every_byte_leave_nothing(serve: Serve, quiet: None, headers: tuple[str, ...]) -> None:
    served = serve()
    request = post(STREAM, *headers)
    with nothing_left(served):
        for cut in range(len(request)):
            with served.dial() as raw:
                raw.send(request[:cut])
                hang_up(raw.socket, hard=cut % 2 == 1)


def test_resets_at_every_byte_of_a_streamed_answer_leave_nothing(serve: Serve, quiet: None) -> None:
    served = serve(mock={"step_ms": 0})
    request = post(STREAM | {"max_tokens": 3, "seed": 5})
    with served.dial() as raw:
        raw.send(request)
        whole = raw.until(b"\r\n0\r\n\r\n")
    with nothing_left(served):
        for cut in range(0, len(whole)):
            with served.dial() as raw:
                raw.send(request)
                got = b""
                while len(got) < cut and not got.endswith(
                    b"\r\n0\r\n\r\n"
                ):  # tokens may share an event: it is shorter then
                    got += raw.socket.recv(cut - len(got))
                hang_up(raw.socket, hard=True)


def test_resets_while_tokens_flow_abort_each_request_at_most_once(serve: Serve, quiet: None) -> None:
    served = serve(mock={"step_ms": 1})
    rng = random.Random(4)
    with nothing_left(served):
        for _ in range(200):
            with served.dial() as raw:
                raw.send(post(STREAM | {"max_tokens": 2000}))
                raw.socket.recv(rng.randrange(1, 1000))
                hang_up(raw.socket, hard=True)
        wait_until(lambda: served.group.requests == 0)
        counted = served.group.counters
        assert sum(counted["aborts"]) <= 200
        assert sum(counted["aborts"]) + sum(counted["finished"]) + sum(counted["unsent"]) >= 200


@pytest.mark.slow
def test_ten_thousand_connections_opened_and_dropped_leave_nothing(serve: Serve, quiet: None) -> None:
    served = serve()
    address = (served.host, served.port)
    with nothing_left(served):
        for number in range(10_000):
            connection = socket.create_connection(address)
            if number % 3 == 1:
                connection.send(b"POST /v1/ch")
            hang_up(connection, hard=number % 2 == 1)


def test_connections_held_open_all_go_when_their_clients_do(serve: Serve, quiet: None) -> None:
    served = serve()
    with nothing_left(served):
        held = [socket.create_connection((served.host, served.port)) for _ in range(400)]
        wait_until(lambda: counts(served)["connections"] == 400)
        assert served.chat().status == 200  # they hold up nobody
        for connection in held:
            connection.close()


def test_pipelined_requests_of_a_client_that_leaves_are_dropped(serve: Serve, quiet: None) -> None:
    served = serve()
    with nothing_left(served):
        served.mock.hold()
        for _ in range(20):
            with served.dial() as raw:
                raw.send(post(BODY) * 20)
                wait_until(lambda: served.group.requests == 1)
                hang_up(raw.socket, hard=True)
            wait_until(lambda: served.group.requests == 0)
        served.mock.release()
    counted = served.group.counters
    assert sum(counted["aborts"]) + sum(counted["unsent"]) == 20


def test_a_client_with_more_requests_in_the_pipe_than_are_read_is_gone_with_its_first_answer(
    serve: Serve, quiet: None
) -> None:
    served = serve()
    with nothing_left(served):
        served.mock.hold()
        with served.dial() as raw:
            raw.send(post(BODY) * 100)  # so many that it is read no further, and so not seen to leave
            wait_until(lambda: served.group.requests == 1)
            hang_up(raw.socket, hard=True)
        served.mock.release()
    assert sum(served.group.counters["requests"]) < 50


@pytest.mark.parametrize(
    "attack",
    [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"y" * 1_000_000 + b"\r\n\r\n",
        f"POST {CHAT} HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n".encode(),
        f"POST {CHAT} HTTP/1.1\r\nContent-Length: -1\r\n\r\n".encode(),
        f"POST {CHAT} HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n".encode(),
        f"POST {CHAT} HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode(),
        f"POST {CHAT} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n".encode(),
        f"POST {CHAT} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + b"1\r\nx\r\n" * 200_000,
        f"POST {CHAT} HTTP/1.1\r\nContent-Length: 300000\r\n\r\n".encode() + b"[" * 300_000,
        post({"messages": [{"role": "user", "content": "x" * 300_000}], "max_tokens": 1}),
        post({"messages": [{"role": "user", "content": "x"}] * 20_000, "max_tokens": 1}),
        post({**BODY, "stop": ["x" * 100_000] * 4}),
        post({**BODY, "n": 10**30}),
        post({**BODY, "logit_bias": {str(i): 1 for i in range(50_000)}}),
        post({**BODY, "rid": "r" * 200_000}),
    ],
    ids=[
        "path", "headers", "header", "length", "negative", "two-lengths", "length-and-chunks", "chunk-size", "chunks",
        "nesting", "prompt", "messages", "stops", "n", "biases", "id",
    ],
)  # fmt: skip
def test_an_oversized_request_is_refused_and_leaves_nothing(serve: Serve, quiet: None, attack: bytes) -> None:
    served = serve(connection=ConnectionLimits(body_bytes=1 << 20, header_timeout=2, body_timeout=2))
    with nothing_left(served), served.dial() as raw:
        try:
            raw.send(attack)
        except ConnectionError:
            pass  # it was refused before it was all sent
        raw.socket.shutdown(socket.SHUT_WR)
        answer = raw.rest()
        assert answer == b"" or 400 <= int(answer.split(b" ")[1]) < 500, answer[:300]
