"""JSON text: escaping that every reader agrees on, and how deep a body nests."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg._sse import escape, json_depth

any_text = st.text(st.characters(codec=None, exclude_categories=()))
awkward = st.text(st.sampled_from('"\\/\b\f\n\r\t\x00\x1f\x7f\x85\u2028\u2029\u2027\u202aé漢\U0001f600\ud800\udfff'))


@given(any_text | awkward)
def test_escaped_text_is_json_for_the_same_text(text):
    # json joins a pair of surrogate escapes, as JSON defines it.
    expected = json.loads(json.dumps(text))
    assert json.loads(b'"' + escape(text) + b'"') == expected


@given(any_text | awkward)
def test_escaped_text_is_one_line_for_every_line_splitter(text):
    escaped = escape(text).decode()
    assert len(("x" + escaped).splitlines()) == 1


@given(st.text(st.characters(codec="utf-8")))
def test_bytes_are_escaped_like_the_text_they_encode(text):
    assert escape(text.encode()) == escape(text)


def test_text_that_needs_no_escape_stays_as_it_is():
    assert escape("déjà vu, 漢字 \U0001f600 /") == "déjà vu, 漢字 \U0001f600 /".encode()


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ('"', b'\\"'),
        ("\\", b"\\\\"),
        ("\n\r\t\b\f", b"\\n\\r\\t\\b\\f"),
        ("\x00\x1f", b"\\u0000\\u001f"),
        ("\x85\u2028\u2029", b"\\u0085\\u2028\\u2029"),
        ("\ud800x\udfff", b"\\ud800x\\udfff"),
        (
            "\x84\x86\u2027\u202a\ud7ff\ue000",
            "\x84\x86\u2027\u202a\ud7ff\ue000".encode("utf-8", "surrogatepass"),
        ),
    ],
)
def test_what_must_be_escaped_is(text, escaped):
    assert escape(text) == escaped


@given(st.binary())
def test_bytes_that_are_not_utf8_do_no_harm(data):
    assert len(escape(data)) >= len(data)


strings = st.text() | st.text('\\"[]{}a')
nested = st.recursive(st.none() | strings, lambda inner: st.lists(inner) | st.dictionaries(strings, inner))


def depth_of(value):
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


@given(nested)
def test_depth_counts_brackets_outside_strings(value):
    assert json_depth(json.dumps(value).encode()) == depth_of(value)


@given(st.binary())
def test_depth_of_garbage_is_a_number(data):
    assert json_depth(data) >= 0
