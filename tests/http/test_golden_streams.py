"""Event streams byte for byte, made by the real code from scripted outputs."""

import pytest
from scripted import END, Client, Script, ids, job

from smg._text import StopStrings
from smg.errors import RankDied
from smg.http.chat import ChatShape
from smg.http.completions import CompletionShape
from smg.http.generate import GenerateShape
from smg.sampling import SamplingParams

CHAT = b'data: {"id":"id-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":['
TEXT = b'data: {"id":"id-1","object":"text_completion","created":1700000000,"model":"m","choices":['


def events(start: bytes, *rest: bytes, end: bytes = b"]}") -> bytes:
    return b"".join(start + part + end + b"\n\n" for part in rest)


def role(index: int = 0) -> bytes:
    return b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index


def said(text: bytes, index: int = 0) -> bytes:
    return b'{"index":%d,"delta":{"content":"%b"},"logprobs":null,"finish_reason":null}' % (index, text)


def ended(reason: bytes, index: int = 0, more: bytes = b"") -> bytes:
    return b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b"%b}' % (index, reason, more)


def text(words: bytes, index: int = 0, reason: bytes = b"null") -> bytes:
    return b'{"index":%d,"text":"%b","logprobs":null,"finish_reason":%b}' % (index, words, reason)


DONE = b"data: [DONE]\n\n"


async def test_chat_begins_with_the_role_and_ends_with_done():
    script = Script(ChatShape, job())
    script.say(" The")
    script.say(" boat")
    script.say([END], "stop")
    assert script.body == events(CHAT, role(), said(b" The"), said(b" boat"), ended(b"stop")) + DONE
    assert script.client.complete
    assert script.done


async def test_completion_text():
    script = Script(CompletionShape, job())
    script.say(" The")
    script.say(" boat", "length")
    assert script.body == events(TEXT, text(b" The"), text(b" boat"), text(b"", 0, b'"length"')) + DONE


async def test_head_names_type_framing_and_rank():
    script = Script(ChatShape, job(n=2))
    script.say(" The")
    lines = script.client.head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 200 OK"
    assert b"Content-Type: text/event-stream; charset=utf-8" in lines
    assert b"Transfer-Encoding: chunked" in lines
    assert b"X-SMG-Rank: 0,1" in lines


async def test_every_output_is_one_write():
    script = Script(ChatShape, job())
    for word in (" The", " boat", " is"):
        script.say(word)
    script.say(" gone", "length")
    assert len(script.client.writes) == 4
    assert script.client.writes[0].startswith(b"HTTP/1.1 200 OK\r\n")
    assert script.client.writes[3].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_http10_gets_no_chunks_and_the_connection_ends_it():
    client = Client(http11=False)
    script = Script(ChatShape, job(), client)
    script.say(" The", "length")
    assert client.raw_body == events(CHAT, role(), said(b" The"), ended(b"length")) + DONE
    assert b"Transfer-Encoding" not in client.head
    assert client.head.startswith(b"HTTP/1.0 200 OK")
    assert not script.exchange.keep_alive


async def test_three_choices_have_one_finish_each():
    script = Script(ChatShape, job(n=3))
    script.say(" a", sequence=1)
    script.say(" b", sequence=0)
    script.say(" c", "length", sequence=2)
    script.say(" d", "stop", sequence=1)
    script.say(" e", "length", sequence=0)
    assert script.body == (
        events(
            CHAT,
            *(role(1), said(b" a", 1)),
            *(role(0), said(b" b", 0)),
            *(role(2), said(b" c", 2), ended(b"length", 2)),
            *(said(b" d", 1), ended(b"stop", 1)),
            *(said(b" e", 0), ended(b"length", 0)),
        )
        + DONE
    )


async def test_usage_comes_once_and_last_when_it_is_asked_for():
    script = Script(ChatShape, job(n=2, include_usage=True))
    script.say(" a", "length", sequence=0)
    script.say(" b c", "length", sequence=1)
    prompt, words = len(ids("Hello")), 1 + len(ids(" b c"))
    assert script.body == (
        events(
            CHAT,
            *(role(0), said(b" a", 0), ended(b"length", 0)),
            *(role(1), said(b" b c", 1), ended(b"length", 1)),
            end=b'],"usage":null}',
        )
        + CHAT
        + b'],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n'
        % (prompt, words, prompt + words)
        + DONE
    )


@pytest.mark.parametrize(("shape", "start"), [(ChatShape, CHAT), (CompletionShape, TEXT)])
async def test_continuous_usage_is_in_every_part(shape, start):
    script = Script(shape, job(include_usage=True, continuous_usage=True))
    script.say(" a")
    script.say(" b", "length")
    prompt = len(ids("Hello"))

    def usage(count: int) -> bytes:
        return b'],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}' % (
            prompt,
            count,
            prompt + count,
        )

    if shape is ChatShape:
        expected = (
            events(start, role(), said(b" a"), end=usage(1))
            + events(start, said(b" b"), ended(b"length"), end=usage(2))
            + events(start, b"", end=usage(2))
        )
    else:
        expected = (
            events(start, text(b" a"), end=usage(1))
            + events(start, text(b" b"), text(b"", 0, b'"length"'), end=usage(2))
            + events(start, b"", end=usage(2))
        )
    assert script.body == expected + DONE


async def test_chat_logprobs():
    script = Script(ChatShape, job(logprobs=True, params=SamplingParams(max_tokens=4, logprobs=1)))
    a, b = ids(" a")[0], ids(" the")[0]
    script.say([a], logprobs=[(a, -0.5, [(a, -0.5), (b, float("-inf"))])])
    script.say([END], "stop", logprobs=[(END, -1.0, [])])
    entry = (
        b'{"token":" a","logprob":-0.5,"bytes":[32,97],"top_logprobs":['
        b'{"token":" a","logprob":-0.5,"bytes":[32,97]},'
        b'{"token":" the","logprob":-9999.0,"bytes":[32,116,104,101]}]}'
    )
    end = b'{"token":"<|im_end|>","logprob":-1.0,"bytes":%b,"top_logprobs":[]}' % (
        str(list(b"<|im_end|>")).replace(" ", "").encode()
    )
    first = b'{"index":0,"delta":{"content":" a"},"logprobs":{"content":[%b]},"finish_reason":null}' % entry
    second = b'{"index":0,"delta":{"content":""},"logprobs":{"content":[%b]},"finish_reason":null}' % end
    assert script.body == events(CHAT, role(), first, second, ended(b"stop")) + DONE


async def test_completion_logprobs_count_their_offsets_on():
    script = Script(CompletionShape, job(logprobs=True, params=SamplingParams(max_tokens=4, logprobs=0)))
    a, b = ids(" a")[0], ids(" the")[0]
    script.say([a], logprobs=[(a, -0.5, [])])
    script.say([b], "length", logprobs=[(b, -0.25, [])])

    def part(word: bytes, value: bytes, offset: int) -> bytes:
        return (
            b'{"index":0,"text":"%b","logprobs":{"tokens":["%b"],"token_logprobs":[%b],"top_logprobs":[{}],'
            b'"text_offset":[%d]},"finish_reason":null}' % (word, word, value, offset)
        )

    expected = events(TEXT, part(b" a", b"-0.5", 0), part(b" the", b"-0.25", 2), text(b"", 0, b'"length"'))
    assert script.body == expected + DONE


async def test_an_empty_output_is_a_role_and_a_finish():
    script = Script(ChatShape, job())
    script.say([END], "stop")
    assert script.body == events(CHAT, role(), ended(b"stop")) + DONE


async def test_the_first_output_is_written_even_without_text():
    script = Script(ChatShape, job())
    script.say([])
    assert script.body == events(CHAT, role())


async def test_a_stop_string_ends_the_text_and_aborts_once():
    script = Script(ChatShape, job(stops=StopStrings(["boat is"])))
    script.say(" The")
    script.say(" boat")
    script.say(" is gone")
    # The beginning of the stop was held back and never came out.
    stopped = ended(b"stop", more=b',"matched_stop":"boat is"')
    assert script.body == events(CHAT, role(), said(b" The"), said(b" "), stopped) + DONE
    assert script.streams[0].aborts == 1
    script.say(" late", "length")
    assert script.streams[0].aborts == 1
    assert script.client.body.endswith(DONE)


async def test_a_stop_string_that_never_completes_changes_nothing():
    script = Script(ChatShape, job(stops=StopStrings(["boat is sunk"])))
    for word in (" The", " boat", " is", " gone"):
        script.say(word)
    script.say([END], "stop")
    words = b"".join(part.partition(b'"')[0] for part in script.body.split(b'"content":"')[2:])
    assert words == b" The boat is gone"
    assert script.streams[0].aborts == 0


async def test_a_stop_token_is_not_in_the_text_and_says_what_matched():
    token = ids(" gone")[0]
    script = Script(CompletionShape, job(stop_ids={END: None, token: "gone"}))
    script.say([*ids(" is"), token], "stop")
    finish = b'{"index":0,"text":"","logprobs":null,"finish_reason":"stop","matched_stop":"gone"}'
    assert script.body == events(TEXT, text(b" is"), finish) + DONE
    assert script.streams[0].aborts == 0


async def test_no_stop_trim_keeps_the_stop():
    script = Script(CompletionShape, job(stops=StopStrings(["boat"]), keep_stop=True))
    script.say(" The boat is")
    finish = b'{"index":0,"text":"","logprobs":null,"finish_reason":"stop","matched_stop":"boat"}'
    assert script.body == events(TEXT, text(b" The boat"), finish) + DONE


async def test_an_engine_error_midway_is_an_error_event_and_no_finish():
    script = Script(ChatShape, job(n=2))
    script.say(" The")
    script.completion.choices[0].deliver(RankDied("rank 0 went away", 0))
    error = (
        b'data: {"error":{"message":"rank 0 went away","type":"service_unavailable","param":null,'
        b'"code":"rank_died"}}\n\n'
    )
    assert script.body == events(CHAT, role(), said(b" The")) + error
    assert script.client.complete
    assert script.done
    # The other choice is not left running.
    assert [stream.aborts for stream in script.streams] == [0, 1]
    script.say(" late", sequence=1)
    assert script.body.endswith(error)


async def test_an_engine_error_before_the_first_byte_leaves_the_status_open():
    script = Script(ChatShape, job())
    script.completion.choices[0].deliver(RankDied("rank 0 went away", 0))
    assert script.client.writes == []
    assert script.completion.error is not None
    assert script.completion.error.status == 503


async def test_the_engines_own_error_is_not_a_finish_reason():
    script = Script(ChatShape, job())
    script.say(" The")
    script.say(" boat", "error")
    assert b'"finish_reason":"' not in script.body
    assert b'"code":"engine_error"' in script.body
    assert DONE not in script.body


async def test_a_client_that_is_gone_gets_nothing_more():
    script = Script(ChatShape, job())
    script.say(" The")
    before = list(script.client.writes)
    script.client.leave()
    script.say(" boat")
    script.say(" is", "length")
    assert script.client.writes == before


async def test_closing_aborts_what_runs():
    script = Script(ChatShape, job(n=2))
    script.say(" The", "length", sequence=0)
    script.completion.close()
    script.completion.close()
    assert [stream.aborts for stream in script.streams] == [0, 1]
    assert script.front.active == set()
    assert script.client.wire is None


async def test_texts_coalesce_while_the_client_does_not_read():
    script = Script(ChatShape, job(n=2))
    script.say(" The", sequence=0)
    script.say(" A", sequence=1)
    written = len(script.client.writes)
    script.completion.wire.pause()
    for word in (" boat", " is", " gone"):
        script.say(word, sequence=0)
    assert len(script.client.writes) == written
    script.completion.wire.resume()
    assert script.body == events(CHAT, role(), said(b" The"), role(1), said(b" A", 1), said(b" boat is gone"))


async def test_a_stream_that_ends_while_the_client_does_not_read_is_whole():
    script = Script(ChatShape, job())
    script.say(" The")
    script.completion.wire.pause()
    script.say(" boat")
    script.say(" is", "length")
    assert script.body == events(CHAT, role(), said(b" The"), said(b" boat is"), ended(b"length")) + DONE
    assert script.done


async def test_a_silent_stream_gets_comments():
    script = Script(ChatShape, job())
    wire = script.completion.wire
    for _ in range(3):
        wire.tick(4)
    assert script.client.writes == []
    wire.tick(4)
    assert script.client.body == b": ping\n\n"
    for _ in range(3):
        wire.tick(4)
    script.say(" The")
    for _ in range(3):
        wire.tick(4)
    assert script.body == b": ping\n\n" + events(CHAT, role(), said(b" The"))


async def test_echo_and_suffix_stand_around_the_text():
    script = Script(CompletionShape, job(echo=[b"Hello"], suffix=b"."))
    script.say(" The")
    script.say(" boat", "length")
    assert script.body == (
        events(TEXT, text(b"Hello"), text(b" The"), text(b" boat"), text(b".", 0, b'"length"')) + DONE
    )


async def test_echo_of_a_prompt_alone_needs_no_engine():
    script = Script(CompletionShape, job(echo=[b"Hello"], params=SamplingParams(max_tokens=0)))
    assert script.streams == []
    assert script.body == events(TEXT, text(b"Hello"), text(b"", 0, b'"length"')) + DONE


async def test_native_events_have_the_whole_text():
    script = Script(GenerateShape, job(native=True))
    script.say(" The")
    script.say(" boat", "length")
    first, second = ids(" The"), ids(" boat")

    def meta(count: int, finish: bytes) -> bytes:
        return b'{"id":"id-1","finish_reason":%b,"prompt_tokens":%d,"completion_tokens":%d,"cached_tokens":0' % (
            finish,
            len(ids("Hello")),
            count,
        )

    parts = script.body.split(b"\n\n")
    assert parts[0] == b'data: {"text":" The","output_ids":%b,"meta_info":%b}}' % (
        str(first).replace(" ", "").encode(),
        meta(len(first), b"null"),
    )
    assert parts[1].startswith(
        b'data: {"text":" The boat","output_ids":%b,"meta_info":%b,"e2e_latency":'
        % (
            str(first + second).replace(" ", "").encode(),
            meta(len(first + second), b'{"type":"length","length":%d}' % len(first + second)),
        )
    )
    assert parts[2:] == [b"data: [DONE]", b""]


async def test_an_answer_in_one_piece():
    script = Script(ChatShape, job(n=2, stream=False))
    script.say(" The", sequence=0)
    script.say(" boat", "length", sequence=0)
    script.say([END], "stop", sequence=1)
    assert script.client.writes == []
    prompt, words = len(ids("Hello")), len(ids(" The")) + len(ids(" boat")) + 1
    assert script.completion.shape.body(script.completion.choices) == (
        b'{"id":"id-1","object":"chat.completion","created":1700000000,"model":"m","choices":['
        b'{"index":0,"message":{"role":"assistant","content":" The boat"},"logprobs":null,"finish_reason":"length"},'
        b'{"index":1,"message":{"role":"assistant","content":""},"logprobs":null,"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}' % (prompt, words, prompt + words)
    )
