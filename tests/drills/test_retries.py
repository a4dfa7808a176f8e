"""A rank dies before the first token: the request moves to another rank, and its client does not notice."""

from __future__ import annotations

import argparse
import re

import pytest
from serving import BODY, CHAT, STREAM, wait_until

from smg.http import launch

LONG = {"max_tokens": 8, "seed": 5}


def adds(served):
    return served.mock.events.matching("add")


def retries(served, name="smg_worker_retries_total"):
    sample = re.escape(f'{name}{{endpoint="chat",worker_type="regular"}} ')
    found = re.search(rf"^{sample}(\S+)$", served.metrics(), re.MULTILINE)
    return float(found[1]) if found else 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_a_token_moves_to_another_rank_and_keeps_its_identity(serve, stream):
    served = serve(ranks=2, mock={"hold": True})
    with served.dial() as raw:
        raw.post(CHAT, BODY | LONG | {"stream": stream}, "X-Request-Id: mine")
        first = served.mock.wait_for("add")["rank"]
        served.mock.die(first)
        second = served.mock.wait_for("add", count=2)["rank"]
        assert second == 1 - first
        served.mock.release(second)
        received = raw.until(b"[DONE]\n\n\r\n0\r\n\r\n" if stream else b'"usage"')
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert b"X-Request-Id: mine\r\n" in received
    assert b"X-SMG-Rank: %d\r\n" % second in received
    ids = set(re.findall(rb'"id":"([^"]+)"', received))
    assert len(ids) == 1
    assert next(iter(ids)).startswith(b"mine-")
    assert b'"finish_reason":"length"' in received
    # The text is one answer's, not one and a piece of another.
    expected = served.chat(**LONG).json["choices"][0]["message"]["content"]
    texts = re.findall(rb'"content":"([^"]*)"', received)
    assert b"".join(texts).decode("unicode_escape").encode("latin-1").decode() == expected
    assert retries(served) == 1
    assert served.group.counters["died"][first] == 1
    wait_until(lambda: served.group.requests == 0)
    assert served.front.admission.active == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_with_a_token_out_is_never_retried(serve, stream):
    served = serve(ranks=2, mock={"hold": True})
    with served.dial() as raw:
        raw.post(CHAT, BODY | LONG | {"stream": stream})
        rank = served.mock.wait_for("add")["rank"]
        served.mock.step(1, rank)
        wait_until(lambda: sum(served.group.counters["tokens"]) == 1)
        served.on_loop(lambda: None)  # its outputs are delivered by now
        if stream:
            raw.until(b'"content":"', 2)
        served.mock.die(rank)
        received = raw.until(b"rank_died")
    assert received.startswith(b"HTTP/1.1 200 OK" if stream else b"HTTP/1.1 503 ")
    assert len(adds(served)) == 1
    assert retries(served) == retries(served, "smg_worker_retries_exhausted_total") == 0


def test_no_rank_gets_a_request_twice(serve):
    served = serve(ranks=3, mock={"hold": True})
    with served.dial() as raw:
        raw.post(CHAT, BODY)
        had = []
        for count in (1, 2, 3):
            had.append(served.mock.wait_for("add", count=count)["rank"])
            if count < 3:
                served.mock.restart(had[-1])  # it is live again before the next one dies
                wait_until(lambda: served.group.live == 3)
        served.mock.die(had[-1])
        received = raw.until(b"}}")
    assert sorted(had) == [0, 1, 2]
    assert received.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"rank_died"' in received
    assert b"Retry-After: " in received
    assert len(adds(served)) == 3
    assert (retries(served), retries(served, "smg_worker_retries_exhausted_total")) == (2, 1)


@pytest.mark.parametrize("most", [0, 1])
def test_a_request_is_retried_no_more_often_than_was_said(serve, most):
    served = serve(ranks=3, mock={"hold": True}, front={"max_retries": most})
    with served.dial() as raw:
        raw.post(CHAT, BODY)
        for count in range(1, most + 2):
            served.mock.die(served.mock.wait_for("add", count=count)["rank"])
        assert raw.until(b"}}").startswith(b"HTTP/1.1 503 ")
    assert len(adds(served)) == most + 1
    assert retries(served) == most


def test_only_the_sequence_that_lost_its_rank_moves(serve):
    served = serve(ranks=3, mock={"hold": True})
    with served.dial() as raw:
        raw.post(CHAT, BODY | LONG | {"n": 2})
        served.mock.wait_for("add", count=2)
        lost, kept = (event["rank"] for event in adds(served))
        served.mock.die(lost)
        assert served.mock.wait_for("add", count=3)["rank"] == 3 - lost - kept
        served.mock.release(kept)
        served.mock.release(3 - lost - kept)
        received = raw.until(b'"usage"')
    ranks = re.search(rb"X-SMG-Rank: (\d),(\d)\r\n", received)
    assert {int(ranks[1]), int(ranks[2])} == {3 - lost - kept, kept}
    assert received.count(b'"finish_reason":"length"') == 2


def test_requests_of_a_dead_rank_spread_over_the_others(serve):
    served = serve(ranks=3, mock={"hold": True})
    clients = [served.dial() for _ in range(30)]
    for client in clients:
        client.post(CHAT, STREAM)
    served.mock.wait_for("add", count=30)
    served.mock.die(0)
    served.mock.wait_for("add", count=40)
    assert served.group.in_flight.tolist() == [0, 15, 15]
    served.mock.release(1)
    served.mock.release(2)
    for client in clients:
        assert b'"finish_reason":"length"' in client.until(b"[DONE]")
        client.close()


def test_a_retried_request_still_ends_by_its_first_deadline(serve):
    served = serve(ranks=2, mock={"hold": True}, front={"request_timeout_secs": 0.5})
    with served.dial() as raw:
        raw.post(CHAT, BODY)
        served.mock.die(served.mock.wait_for("add")["rank"])
        received = raw.until(b"}}")
    assert received.startswith(b"HTTP/1.1 504 ")
    wait_until(lambda: served.group.requests == 0)


def test_a_client_that_leaves_after_a_retry_aborts_at_the_new_rank(serve):
    served = serve(ranks=2, mock={"hold": True})
    raw = served.dial()
    raw.post(CHAT, STREAM)
    served.mock.die(served.mock.wait_for("add")["rank"])
    new = served.mock.wait_for("add", count=2)
    raw.close()
    assert served.mock.wait_for("abort") == {
        "event": "abort",
        "rank": new["rank"],
        "incarnation": 1,
        "rids": [new["rid"]],
    }
    wait_until(lambda: served.group.requests == 0)


@pytest.mark.parametrize(
    ("flags", "most"),
    [([], 5), (["--retry-max-retries", "2"], 2), (["--retry-max-retries", "2", "--disable-retries"], 0)],
)
def test_the_command_line_says_how_often(flags, most):
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    always = ["--worker-urls", "ipc:///run/x", "--backend", "tokenspeed", "--model-path", "m"]
    assert launch.service_options(parser.parse_args([*always, *flags])).front.max_retries == most
