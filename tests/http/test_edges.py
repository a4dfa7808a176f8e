"""Connections as clients really treat them: raw bytes, slow clients, clients that leave."""

import json
import re
import shutil
import socket
import struct
import subprocess
import time

import pytest
from serving import BODY, CHAT, STREAM, TEXT, wait_until

# ------------------------------------------------------------ bytes on a connection


def test_pipelined_requests_are_answered_in_order(served):
    with served.dial() as raw:
        for i in range(3):
            raw.post(CHAT, BODY | {"rid": f"r{i}", "stream": i == 1})
        received = raw.until(b'"id":"r2"')
    starts = [received.index(b'"id":"r%d"' % i) for i in range(3)]
    assert starts == sorted(starts)
    assert received.count(b"HTTP/1.1 200 OK") == 3


def test_a_connection_serves_one_request_after_another(served):
    with served.dial() as raw:
        for i in range(3):
            raw.post(CHAT, STREAM)
            raw.until(b"data: [DONE]\n\n\r\n0\r\n\r\n", i + 1)


def test_a_request_may_come_in_pieces(served):
    body = json.dumps(BODY).encode()
    request = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    with served.dial() as raw:
        for i in range(0, len(request), 7):
            raw.send(request[i : i + 7])
        assert raw.until(b'"usage"').startswith(b"HTTP/1.1 200 OK")


def test_a_chunked_request_body(served):
    body = json.dumps(BODY).encode()
    with served.dial() as raw:
        raw.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        raw.send(b"%x\r\n%b\r\n" % (10, body[:10]))
        raw.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body) - 10, body[10:]))
        assert raw.until(b'"usage"').startswith(b"HTTP/1.1 200 OK")


def test_http10_ends_with_the_connection(served):
    with served.dial() as raw:
        raw.post(CHAT, STREAM, version="1.0")
        received = raw.rest()
    assert received.endswith(b"data: [DONE]\n\n")
    assert b"Transfer-Encoding" not in received


def test_http10_keep_alive_is_kept_for_whole_answers(served):
    with served.dial() as raw:
        for i in range(2):
            raw.post(CHAT, BODY, "Connection: keep-alive", version="1.0")
            raw.until(b'"usage"', i + 1)


def test_connection_close_is_honoured(served):
    with served.dial() as raw:
        raw.post(CHAT, BODY, "Connection: close")
        received = raw.rest()
    assert b"Connection: close" in received


def test_expect_100_continue_is_answered(served):
    body = json.dumps(BODY).encode()
    with served.dial() as raw:
        raw.send(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        raw.until(b"HTTP/1.1 100 Continue\r\n\r\n")
        raw.send(body)
        raw.until(b"HTTP/1.1 200 OK")


def test_another_expectation_is_refused(served):
    with served.dial() as raw:
        raw.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nExpect: tea\r\nContent-Length: 2\r\n\r\n".encode())
        assert raw.until(b"}}").startswith(b"HTTP/1.1 417 ")


@pytest.mark.parametrize("garbage", [b"hello there\r\n\r\n", b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET\r\n\r\n"])
def test_what_is_not_http_gets_an_error_and_the_end(served, garbage):
    with served.dial() as raw:
        raw.send(garbage)
        received = raw.rest()
    assert received.startswith(b"HTTP/1.1 400 ") or received.startswith(b"HTTP/1.0 400 ")
    assert b'"code":"bad_http_request"' in received
    assert served.ask("/health").status == 200


def test_a_head_beyond_the_limits_is_refused(serve):
    served = serve(mock=None)
    for head in (f"X-Long: {'a' * 20000}", "\r\n".join(f"X-{i}: a" for i in range(200))):
        with served.dial() as raw:
            raw.send(f"GET /health HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
            assert raw.rest().split(b" ")[1] in (b"400", b"431")


def test_a_body_beyond_the_limit_is_refused(serve):
    from smg.http.server import ConnectionLimits

    served = serve(mock=None, connection=ConnectionLimits(body_bytes=1000))
    answer = served.ask(CHAT, {"messages": [], "pad": "x" * 2000})
    assert (answer.status, answer.json["error"]["code"]) == (413, "body_too_large")
    with served.dial() as raw:  # its length is not known beforehand
        raw.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        raw.send(b"800\r\n" + b"x" * 2048 + b"\r\n")
        assert raw.until(b"}}").startswith(b"HTTP/1.1 413 ")
    with served.dial() as raw:  # and all of it is there at once
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        raw.send(head + b"800\r\n" + b"x" * 2048 + b"\r\n0\r\n\r\n")
        assert raw.until(b"}}").startswith(b"HTTP/1.1 413 ")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_shows_every_event_as_it_comes(served):
    command = ["curl", "-sN", "--max-time", "20", served.service.url + CHAT, "-d", json.dumps(STREAM)]
    found = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout
    assert found.startswith(b"data: {")
    assert found.endswith(b"data: [DONE]\n\n")


# ------------------------------------------------------------ clients that take long


def limits(**values):
    from smg.http.server import ConnectionLimits

    return ConnectionLimits(**values)


def test_a_head_that_does_not_come_is_not_waited_for(serve):
    served = serve(mock=None, connection=limits(header_timeout=0.15))
    with served.dial() as raw:
        raw.send(b"GET /health HTTP/1.1\r\nX-Slow: ")
        assert raw.rest() == b""
    with served.dial() as raw:
        assert raw.rest() == b""


def test_a_body_that_does_not_come_is_not_waited_for(serve):
    served = serve(connection=limits(body_timeout=0.15))
    with served.dial() as raw:
        raw.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        received = raw.until(b"}}")
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"body_timeout"' in received


def test_an_idle_connection_is_closed(serve):
    served = serve(mock=None, connection=limits(idle_timeout=0.15))
    with served.dial() as raw:
        raw.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        raw.until(b'{"status":"ok"}')
        raw.rest()


@pytest.mark.parametrize("headers", [(), ("Connection: keep-alive",)], ids=["plain", "parsed"])
def test_a_stream_may_last_longer_than_a_connection_may_idle(serve, headers):
    served = serve(mock={"step_ms": 20}, connection=limits(idle_timeout=0.15, header_timeout=0.15))
    with served.dial() as raw:
        for turn in range(2):
            raw.post(CHAT, STREAM | {"max_tokens": 20}, *headers)
            raw.until(b"[DONE]", turn + 1)


def test_a_slow_reader_gets_everything_and_holds_up_nobody(serve):
    served = serve(mock={"step_ms": 0, "hold": True})

    def small_buffer():
        (completion,) = served.front.active
        transport = completion.exchange.request.transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    with served.dial(window=4096) as slow:
        slow.post(CHAT, STREAM | {"max_tokens": 4000, "seed": 3})
        served.mock.wait_for("add")
        served.on_loop(small_buffer)
        served.mock.release()
        wait_until(lambda: any(c.wire is not None and c.wire.paused for c in list(served.front.active)))
        for _ in range(5):
            assert served.chat().status == 200
        received = slow.until(b"\r\n0\r\n\r\n")
    whole = served.chat(max_tokens=4000, seed=3).json["choices"][0]["message"]["content"]
    lines = re.findall(rb"data: (\{.*\})\n", received)
    parts = [json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines]
    assert "".join(parts) == whole
    assert len(parts) < 3900, "nothing was coalesced"


def test_a_silent_stream_is_kept_open_by_comments(serve):
    served = serve(mock={"hold": True}, front={"sse_keepalive_secs": 0.1})
    with served.dial() as raw:
        raw.post(CHAT, STREAM)
        received = raw.until(b": ping\n\n", 2)
        assert received.startswith(b"HTTP/1.1 200 OK")
        served.mock.release()
        assert b'"finish_reason":"length"' in raw.until(b"[DONE]")


# ------------------------------------------------------------ clients that leave


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hard", [True, False])
def test_a_client_that_leaves_before_the_first_token_aborts_once(serve, stream, hard):
    served = serve(mock={"hold": True})
    raw = served.dial()
    raw.post(CHAT, BODY | {"stream": stream, "n": 2})
    served.mock.wait_for("add", count=2)
    if hard:
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    raw.close()
    served.mock.wait_for("abort", count=2, timeout=1)
    assert served.group.in_flight.tolist() == [0, 0]
    assert sum(served.group.counters["aborts"]) == 2
    assert served.front.admission.active == 0


def test_a_client_that_leaves_while_tokens_flow_aborts_within_a_tenth_of_a_second(serve):
    served = serve(mock={"step_ms": 5})
    raw = served.dial()
    raw.post(CHAT, STREAM | {"max_tokens": 10000})
    raw.until(b"data: ", 3)
    left = time.monotonic()
    raw.close()
    served.mock.wait_for("abort", timeout=1)
    assert time.monotonic() - left < 0.1
    wait_until(lambda: served.group.requests == 0)


def test_a_client_that_leaves_the_queue_was_never_sent(serve):
    served = serve(mock={"hold": True}, front={"max_concurrent_requests": 1})
    with served.dial() as first:
        first.post(CHAT, BODY)
        served.mock.wait_for("add")
        second = served.dial()
        second.post(CHAT, BODY)
        wait_until(lambda: served.front.admission.queued == 1)
        second.close()
        wait_until(lambda: served.front.admission.queued == 0)
        served.mock.release()
        first.until(b'"usage"')
    assert sum(served.group.counters["requests"]) == 1
    assert sum(served.group.counters["aborts"]) == 0
    wait_until(lambda: served.front.admission.active == 0)


def test_a_client_that_leaves_while_its_prompt_is_tokenized_is_not_sent(serve):
    served = serve()
    original, entered, go_on = served.front.model.encode, [], []

    def slow(text, add_special_tokens):
        entered.append(1)
        wait_until(lambda: go_on)
        return original(text, add_special_tokens)

    served.front.model.encode = slow
    raw = served.dial()
    raw.post(TEXT, {"prompt": "word " * 8000})
    wait_until(lambda: entered)
    raw.close()
    wait_until(lambda: served.front.admission.active == 0)
    go_on.append(1)
    served.front.model.encode = original
    assert served.chat().status == 200
    assert sum(served.group.counters["requests"]) == 1
