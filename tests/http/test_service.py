"""The service around the endpoints: keys, places, deaths, deadlines, shutdown and what Prometheus sees."""

import asyncio
import gc
import json
import re
import ssl
import subprocess
import threading

import pytest
from serving import BODY, CHAT, STREAM, TEXT, wait_until

from smg.http.chat import ChatShape
from smg.http.completion import Completion
from smg.http.errors import ApiError
from smg.http.exchange import Exchange
from smg.http.front import FAST_INLINE_BYTES

# ------------------------------------------------------------ who may ask


def test_a_key_is_needed_for_everything_but_health_and_models(serve):
    served = serve(api_keys=["first", "second"])
    for path in ("/health", "/liveness", "/readiness", "/v1/models"):
        assert served.ask(path).status == 200
    for path in ("/workers", "/get_loads", "/get_server_info", "/openapi.json"):
        assert served.ask(path).status == 401
    for path in (CHAT, TEXT, "/generate", "/v1/tokenize"):
        refused = served.ask(path, BODY)
        assert refused.status == 401
        assert refused.json["error"]["code"] == "invalid_api_key"
        assert refused.headers["WWW-Authenticate"] == "Bearer"
    for key in ("first", "second"):
        assert served.chat(headers={"Authorization": f"Bearer {key}"}).status == 200
    for wrong in ("Bearer third", "Bearer ", "first", "Basic first", "Bearer first second", "Bearer \xfe"):
        assert served.chat(headers={"Authorization": wrong}).status == 401
    assert served.ask("/nope").status == 404


def test_browsers_elsewhere_are_not_allowed_unless_asked_for(served, serve):
    assert served.ask("/health", headers={"Origin": "https://a.example"}).headers["Access-Control-Allow-Origin"] is None
    assert served.ask(CHAT, method="OPTIONS").status == 405
    open_one = serve(cors_origins=["https://a.example"])
    allowed = open_one.chat(headers={"Origin": "https://a.example"})
    assert allowed.headers["Access-Control-Allow-Origin"] == "https://a.example"
    assert open_one.chat(headers={"Origin": "https://b.example"}).headers["Access-Control-Allow-Origin"] is None
    before = open_one.ask(CHAT, method="OPTIONS", headers={"Origin": "https://a.example"})
    assert before.status == 200
    assert "POST" in before.headers["Access-Control-Allow-Methods"]
    stream = open_one.chat(stream=True, headers={"Origin": "https://a.example"})
    assert stream.headers["Access-Control-Allow-Origin"] == "https://a.example"


def test_tls(serve, tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run([*make, *names, "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    served = serve(tls_cert_path=str(cert), tls_key_path=str(key))
    assert served.service.url.startswith("https://")
    trust = ssl.create_default_context(cafile=str(cert))
    with served.dial(trust) as raw:
        raw.post(CHAT, STREAM | {"max_tokens": 50})
        received = raw.until(b"data: [DONE]")
        assert received.count(b'"content":"') > 10
        raw.post(CHAT, BODY)
        raw.until(b'"usage"')


# ------------------------------------------------------------ places


def test_beyond_its_places_and_queue_a_request_is_refused_at_once(serve):
    served = serve(mock={"hold": True}, front={"max_concurrent_requests": 1, "queue_size": 1})
    with served.dial() as first, served.dial() as second:
        first.post(CHAT, BODY)
        served.mock.wait_for("add")
        second.post(CHAT, BODY)
        wait_until(lambda: served.front.admission.queued == 1)
        refused = served.chat()
        assert (refused.status, refused.json["error"]["code"]) == (429, "admission_queue_full")
        assert refused.headers["Retry-After"]
        served.mock.release()
        first.until(b'"usage"')
        second.until(b'"usage"')
    assert 'smg_admission_queue_rejected_total{reason="full"} 1.0' in served.metrics()


def test_a_place_that_does_not_come_in_time_is_a_503(serve):
    served = serve(mock={"hold": True}, front={"max_concurrent_requests": 1, "queue_timeout_secs": 0.1})
    with served.dial() as first:
        first.post(CHAT, BODY)
        served.mock.wait_for("add")
        late = served.chat()
        assert (late.status, late.json["error"]["code"]) == (503, "admission_queue_timeout")
        served.mock.release()
        first.until(b'"usage"')
    assert served.chat().status == 200


def test_a_place_is_decided_before_the_prompt_is_read(serve):
    served = serve(mock={"hold": True}, front={"max_concurrent_requests": 1, "queue_size": 0})
    with served.dial() as first:
        first.post(CHAT, BODY)
        served.mock.wait_for("add")
        assert served.ask(CHAT, b"not JSON").status == 429
        served.mock.release()
        first.until(b'"usage"')


def test_a_full_engine_is_a_429(serve):
    served = serve(ranks=1, max_inflight=1, mock={"hold": True})
    with served.dial() as first:
        first.post(CHAT, BODY)
        served.mock.wait_for("add")
        refused = served.chat()
        assert (refused.status, refused.json["error"]["code"]) == (429, "engine_overloaded")
        assert refused.headers["Retry-After"]
        # Of two, the second has no place; the first is not left running.
        served.mock.release()
        first.until(b'"usage"')
    assert served.chat(n=2).status == 429
    wait_until(lambda: served.group.requests == 0)


# ------------------------------------------------------------ deaths and deadlines


def test_a_rank_that_dies_before_the_first_token_is_a_503(serve):
    served = serve(ranks=1, mock={"hold": True})
    with served.dial() as stream, served.dial() as whole:
        stream.post(CHAT, STREAM)
        whole.post(CHAT, BODY)
        served.mock.wait_for("add", count=2)
        served.mock.die(0)
        for raw in (stream, whole):
            received = raw.until(b"}}")
            assert received.startswith(b"HTTP/1.1 503 ")
            assert b'"code":"rank_died"' in received
    refused = served.chat()
    assert (refused.status, refused.json["error"]["code"]) == (503, "no_available_workers")
    assert served.ask("/readiness").status == 503
    served.mock.restart(0)
    served.group.wait_ready(10)
    served.mock.release()
    assert served.chat().status == 200


def test_a_rank_that_dies_midway_is_an_error_event_and_harms_no_other_rank(serve):
    served = serve(ranks=2, mock={"hold": True})
    with served.dial() as one, served.dial() as other:
        one.post(CHAT, STREAM)
        served.mock.wait_for("add")
        other.post(CHAT, STREAM)
        served.mock.wait_for("add", count=2)
        served.mock.step()
        first = one.until(b'"content":"', 2)
        other.until(b'"content":"', 2)
        rank = int(re.search(rb"X-SMG-Rank: (\d)", first)[1])
        served.mock.die(rank)
        received = one.until(b"0\r\n\r\n", 2 if rank == 0 else 1)
        assert b'"code":"rank_died"' in received
        assert b'"finish_reason":"' not in received
        assert b"[DONE]" not in received
        served.mock.release(1 - rank)
        assert b'"finish_reason":"length"' in other.until(b"[DONE]")
        # The connection that saw the error is as good as before.
        one.post(CHAT, BODY)
        one.until(b'"usage"')


def test_a_deadline_is_a_504_and_midway_an_error_event(serve):
    served = serve(mock={"hold": True}, front={"request_timeout_secs": 0.3})
    late = served.chat()
    assert (late.status, late.json["error"]["code"]) == (504, "deadline_exceeded")
    with served.dial() as raw:
        raw.post(CHAT, STREAM)
        served.mock.wait_for("add", count=2)
        served.mock.step()
        received = raw.until(b"deadline_exceeded")
        assert received.startswith(b"HTTP/1.1 200 OK")
        assert b"[DONE]" not in received
    served.mock.wait_for("abort", count=2)
    assert served.group.requests == 0


# ------------------------------------------------------------ shutdown


def drain(served, grace):
    return asyncio.run_coroutine_threadsafe(served.service.drain(grace), served.loop)


def test_draining_lets_what_runs_end_and_takes_nothing_new(serve):
    served = serve(mock={"hold": True})
    with served.dial() as raw:
        raw.post(CHAT, STREAM)
        served.mock.wait_for("add")
        drained = drain(served, 10)
        wait_until(lambda: served.front.draining)
        ready = served.ask("/readiness")
        assert (ready.status, ready.json["reason"]) == (503, "draining")
        refused = served.chat()
        assert (refused.status, refused.json["error"]["code"]) == (503, "shutting_down")
        assert not drained.done()
        served.mock.release()
        assert b'"finish_reason":"length"' in raw.until(b"[DONE]")
        drained.result(5)


def test_what_does_not_end_in_the_grace_period_ends_with_an_error(serve):
    served = serve(mock={"hold": True}, front={"max_concurrent_requests": 2})
    with served.dial() as begun, served.dial() as silent, served.dial() as waiting:
        begun.post(CHAT, STREAM)
        served.mock.wait_for("add")
        served.mock.step()
        begun.until(b'"content":"', 2)
        silent.post(CHAT, BODY)
        served.mock.wait_for("add", count=2)
        waiting.post(CHAT, BODY)
        wait_until(lambda: served.front.admission.queued == 1)
        drain(served, 0.05).result(5)
        received = begun.until(b"shutting_down")
        assert b"[DONE]" not in received
        for raw in (silent, waiting):
            assert raw.until(b"shutting_down").startswith(b"HTTP/1.1 503 ")
    served.mock.wait_for("abort", count=2)


def test_stopping_at_once_ends_running_requests_with_an_error(serve):
    served = serve(mock={"hold": True})
    with served.dial() as raw:
        raw.post(CHAT, BODY)
        served.mock.wait_for("add")
        closing = threading.Thread(target=served.close)
        closing.start()
        assert raw.until(b"shutting_down").startswith(b"HTTP/1.1 503 ")
        closing.join(10)
        assert not closing.is_alive()


# ------------------------------------------------------------ metrics


def test_metrics_tell_requests_latencies_and_ranks(serve):
    served = serve(mock={"step_ms": 1})
    asked = served.chat(n=2)
    served.chat(stream=True)
    served.chat(temperature=9)
    served.chat(model="nobody")
    served.ask("/nope")
    text = served.metrics()

    def value(line):
        found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
        assert found, f"{line} is not in the metrics"
        return float(found[1])

    assert value(f'smg_http_requests_total{{method="POST",path="{CHAT}"}}') == 4
    assert value('smg_http_requests_total{method="GET",path="other"}') == 1
    assert value(f'smg_http_responses_total{{error_code="",path="{CHAT}",status_code="200"}}') == 2
    assert value(f'smg_http_responses_total{{error_code="invalid_value",path="{CHAT}",status_code="400"}}') == 1
    chat = 'backend_type="regular",endpoint="chat",model="demo",router_type="grpc"'
    reached = 'backend_type="regular",connection_mode="zmq",endpoint="chat",{}model="{}",router_type="grpc"{}'
    assert value(f"smg_router_ttft_seconds_count{{{chat}}}") == 3
    assert value(f"smg_router_inter_token_seconds_count{{{chat}}}") == 3 * 7
    assert value(f"smg_router_tpot_seconds_count{{{chat}}}") == 3
    assert value(f"smg_router_generation_duration_seconds_count{{{chat}}}") == 3
    assert value(f"smg_router_request_duration_seconds_count{{{reached.format('', 'demo', '')}}}") == 2
    for streaming in ("true", "false"):
        labels = reached.format("", "demo", f',streaming="{streaming}"')
        assert value(f"smg_router_requests_total{{{labels}}}") == 1
    for code, model in (("invalid_value", "demo"), ("no_workers", "other")):
        labels = reached.format(f'error_type="{code}",', model, "")
        assert value(f"smg_router_request_errors_total{{{labels}}}") == 1
    assert value(f'smg_router_tokens_total{{{chat},token_type="output"}}') == 24
    (one,) = {chat["usage"]["prompt_tokens"] for chat in (asked.json, served.chat().json)}
    assert value(f'smg_router_tokens_total{{{chat},token_type="input"}}') == 2 * one
    assert value('smg_http_rate_limit_total{result="allowed"}') == 4
    assert value('smg_http_rate_limit_total{result="rejected"}') == 0
    selected = 'connection_mode="zmq",model="demo",policy="least_load",worker_type="regular"'
    assert value(f"smg_worker_selection_total{{{selected}}}") == 3
    worker = served.group.url
    assert value(f'smg_worker_health{{worker="{worker}"}}') == 1
    assert value(f'smg_worker_requests_active{{worker="{worker}"}}') == 0
    for rank in (0, 1):
        labels = f'dp_rank="{rank}",model="demo",worker="{worker}"'
        assert value(f'smg_rank_state{{dp_rank="{rank}",model="demo",state="live",worker="{worker}"}}') == 1
        assert value(f"smg_rank_tokens_total{{{labels}}}") > 0
        assert value(f"smg_rank_requests_active{{{labels}}}") == 0
        assert value(f"smg_engine_waiting_requests{{{labels}}}") == 0
    assert value("smg_admission_inflight") == 0
    assert value("smg_http_connections_active") == 0


def test_the_metrics_port_has_metrics_only(serve):
    served = serve(mock=None)
    served.port = served.service.metrics_port
    assert served.ask("/v1/models").status == 404
    assert served.ask("/metrics", b"{}").status == 405


# ------------------------------------------------------------ what a request leaves behind


@pytest.mark.parametrize(
    ("body", "end"),
    [
        (BODY, b'"usage"'),
        (STREAM, b"[DONE]"),
        (BODY | {"n": 3}, b'"usage"'),
        (STREAM | {"stop": "e", "max_tokens": 500}, b"[DONE]"),
        (BODY | {"temperature": 9}, b"invalid_value"),
        (BODY | {"model": "nobody"}, b"model_not_found"),
        (BODY | {"priority": 1}, b"invalid_value"),
    ],
)
def test_a_request_leaves_nothing_for_the_collector(serve, body, end):
    served = serve()

    def left():
        return [found for found in gc.get_objects() if isinstance(found, Completion | Exchange)]

    gc.collect()
    gc.disable()
    try:
        with served.dial() as raw:
            raw.post(CHAT, body)
            raw.until(end)
            wait_until(lambda: not left())
    finally:
        gc.enable()


# ------------------------------------------------------------ long prompts


def test_a_long_prompt_does_not_hold_up_the_loop(serve):
    served = serve()
    entered, go_on = threading.Event(), threading.Event()
    original = served.front.model.encode

    def slow(text, add_special_tokens):
        if len(text) > FAST_INLINE_BYTES:
            entered.set()
            assert go_on.wait(10)
        return original(text, add_special_tokens)

    served.front.model.encode = slow
    with served.dial() as raw:
        raw.post(TEXT, {"prompt": "word " * 8000, "max_tokens": 2})
        assert entered.wait(10)
        assert served.chat().status == 200
        go_on.set()
        raw.until(b'"usage"')


def test_an_unforeseen_failure_is_a_500_without_details(serve, caplog):
    served = serve()

    def broken(*args, **options):
        raise RuntimeError("secret")

    served.front.model.render_chat = broken
    answer = served.chat()
    assert answer.status == 500
    assert answer.json["error"]["code"] == "internal_error"
    assert "secret" not in answer.body.decode()
    assert "secret" in caplog.text
    assert served.text().status == 200


@pytest.mark.parametrize("part", ["first", "last", "closing"])
def test_an_unforeseen_failure_midway_ends_the_stream_with_an_error(serve, monkeypatch, caplog, part):
    served = serve()

    def broken(*args):
        raise RuntimeError("secret")

    monkeypatch.setattr(ChatShape, part, broken)
    length = 50000 if part == "first" else 8
    answer = served.chat(stream=True, stream_options={"include_usage": True}, max_tokens=length)
    monkeypatch.undo()
    assert b'"code":"internal_error"' in answer.body
    assert b"secret" not in answer.body
    assert b"[DONE]" not in answer.body
    assert answer.status == (500 if part == "first" else 200)
    wait_until(lambda: served.group.requests == 0 and not served.front.active)
    assert served.chat().status == 200


def test_errors_keep_their_status_and_body():
    error = ApiError(418, "teapot", "no coffee", param="cup")
    assert json.loads(error.body()) == {
        "error": {"message": "no coffee", "type": "invalid_request_error", "param": "cup", "code": "teapot"}
    }
