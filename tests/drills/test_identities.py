"""Names that clients choose for their requests: any text, twice at once, and again right after an abort.

What of them goes over the wire is in tests/engine/test_streams.py.
"""

from __future__ import annotations

import json
import re

import pytest
from serving import BODY, CHAT, STREAM, wait_until

from smg import SamplingParams

PROMPT = [1, 2, 3]
NAMES = {
    "one byte": "x",
    "4 KB": "n" * 4096,
    "unicode": "żółć-Ω-你好-👋",
    "newlines": "a\nb\r\nc\n",
    "NUL and quotes": "\x00\"'\\",
    "another's form": "0" * 24,
    "blank": " ",
}
names = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())


def params(seed=7, tokens=5):
    return SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True)


def tokens_of(stream):
    return [token for out in stream.blocking(10) for token in out.token_ids]


@names
@pytest.mark.parametrize("log", [False, True])
def test_any_name_is_kept_and_none_reaches_the_engine_raw(make_group, idle, name, log):
    group, mock = make_group(ranks=1, group={"log_request_ids": log})
    stream = group.submit(PROMPT, params(), request_id=name)
    assert tokens_of(stream) == mock.reply(7, 5)
    assert stream.request_id == name
    rid = mock.wait_for("add")["rid"]
    assert re.fullmatch(r"[0-9a-f]{24}(-[A-Za-z0-9._-]{1,32})?" if log else r"[0-9a-f]{24}", rid)
    idle(group)


def test_two_requests_of_one_name_end_each_by_itself(make_group, idle):
    group, mock = make_group(ranks=2, hold=True, group={"log_request_ids": True})
    first, second = (group.submit(PROMPT, params(seed), request_id="twin") for seed in (1, 2))
    mock.wait_for("add", count=2)
    first.abort()
    aborted = mock.wait_for("abort")["rids"]
    mock.release()
    assert tokens_of(second) == mock.reply(2, 5)
    assert len(aborted) == 1
    assert not any(event["rid"] in aborted for event in mock.events.matching("finish"))
    idle(group)


def test_a_name_is_used_again_right_after_its_abort(make_group, idle):
    group, mock = make_group(ranks=1, group={"log_request_ids": True}, step_ms=1)
    for turn in range(200):
        gone = group.submit(PROMPT, params(turn, 100_000), request_id="again")
        iterator = gone.blocking(10)
        if turn % 2:
            next(iterator)
        gone.abort()
        assert tokens_of(group.submit(PROMPT, params(turn, 2), request_id="again")) == mock.reply(turn, 2)
    assert group.counters["finished"] == [200]
    rids = [event["rid"] for event in mock.events.matching("add")]
    assert len(set(rids)) == len(rids)
    idle(group)


@names
def test_any_name_is_answered_over_http_or_refused_by_its_field(serve, name):
    served = serve(ranks=1)
    answer = served.ask(CHAT, BODY | {"rid": name})
    if answer.status == 200:
        assert answer.json["id"] == name
        streamed = served.ask(CHAT, STREAM | {"rid": name})
        assert {event["id"] for event in streamed.events if event != "[DONE]"} == {name}
    else:
        assert answer.status == 400
        assert answer.json["error"]["param"] == "rid"
    assert json.loads(answer.body)  # whatever was echoed is escaped
    assert served.chat().status == 200


def test_two_http_requests_of_one_name_are_both_answered(serve):
    served = serve(ranks=2, mock={"hold": True})
    with served.dial() as one, served.dial() as other:
        one.post(CHAT, BODY | {"rid": "twin", "seed": 1})
        other.post(CHAT, STREAM | {"rid": "twin", "seed": 2})
        served.mock.wait_for("add", count=2)
        served.mock.release()
        assert b'"id":"twin"' in one.until(b'"usage"')
        assert b'"finish_reason":"length"' in other.until(b"[DONE]")
    wait_until(lambda: served.group.requests == 0)
