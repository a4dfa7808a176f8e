"""Stop strings: what ends a text, what is held back for them, and what is not."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from smg._text import MAX_STOP_BYTES, Detokenizer, StopStrings, TokenTable
from smg.errors import InvalidRequest

# Few characters, so that stops overlap each other and themselves; two share bytes inside UTF-8 sequences.
TEXTS = st.text("abé\u00eaé字", max_size=30)
STOPS = st.lists(st.text("abé\u00eaé字", min_size=1, max_size=5), min_size=1, max_size=5)


@cache
def table() -> TokenTable:
    """One token per byte, so that every cut through a text is possible."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return TokenTable(tokenizer)


@cache
def id_of() -> dict[int, int]:
    return {table().bytes_of(token)[0]: token for token in range(256)}


def ids_of(text: str) -> list[int]:
    return [id_of()[byte] for byte in text.encode()]


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The stop that begins first, of those the shortest, and where: the whole text known."""
    hits = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    return (min(hits)[0], min(hits)[2]) if hits else None


def expected(text: str, stops: list[str], keep: bool = False) -> tuple[str, str | None]:
    hit = first_stop(text, stops)
    if hit is None:
        return text, None
    start, stop = hit
    return text[:start] + (stop if keep else ""), stop


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(1, 9), min_size=1), keep=st.booleans())
def test_the_text_does_not_depend_on_tokens_and_frames(
    text: str, stops: list[str], cuts: list[int], keep: bool
) -> None:
    ids = ids_of(text)
    stream = Detokenizer(table(), stop=StopStrings(stops), no_stop_trim=keep)
    shown = ""
    while ids:
        cut = cuts[len(ids) % len(cuts)]
        shown += stream.push(ids[:cut])
        ids = ids[cut:]
    shown += stream.finish()
    assert (shown, stream.stop_match) == expected(text, stops, keep)
    assert stream.stopped == (stream.stop_match is not None)


@given(text=TEXTS, stops=STOPS)
def test_exactly_what_could_become_a_stop_is_held(text: str, stops: list[str]) -> None:
    stream = Detokenizer(table(), stop=StopStrings(stops))
    shown = ""
    for i, character in enumerate(text):
        shown += stream.push(ids_of(character))
        if stream.stopped:
            break
        so_far = text[: i + 1]
        begun = [so_far[at:] for at in range(i + 2) if any(stop.startswith(so_far[at:]) for stop in stops)]
        assert shown == so_far.removesuffix(begun[0])


@given(text=TEXTS, stops=STOPS)
def test_a_stop_ends_the_text_as_soon_as_no_earlier_one_is_under_way(text: str, stops: list[str]) -> None:
    stream = Detokenizer(table(), stop=StopStrings(stops))
    for i, character in enumerate(text):
        stream.push(ids_of(character))
        so_far = text[: i + 1]
        hit = first_stop(so_far, stops)
        under_way = hit is not None and any(
            stop.startswith(so_far[at:]) and len(stop) > len(so_far) - at for at in range(hit[0]) for stop in stops
        )
        assert stream.stopped == (hit is not None and not under_way)
        if stream.stopped:
            assert stream.token_count == len(so_far.encode())
            return


@pytest.mark.parametrize(
    ("text", "stops", "shown", "match"),
    [
        ("Hello\n\nUser: hi", ["\n\nUser:", "###"], "Hello", "\n\nUser:"),
        ("aab", ["ab"], "a", "ab"),
        ("abcd", ["abcd", "c"], "", "abcd"),
        ("abcx", ["abcd", "c"], "ab", "c"),
        ("abc", ["abcd", "c"], "ab", "c"),
        ("abc", ["ab", "abc"], "", "ab"),
        ("xabab", ["bab", "ab"], "x", "ab"),
        ("xabcq", ["xabcd", "ab", "abc"], "x", "ab"),
        ("price: 5 €", ["€"], "price: 5 ", "€"),
        ("êé", ["é"], "ê", "é"),
        ("never", ["nev er"], "never", None),
        ("ab", ["ab", "ab"], "", "ab"),
    ],
)
def test_which_match_counts(text: str, stops: list[str], shown: str, match: str | None) -> None:
    for ids in ([ids_of(text)], [[token] for token in ids_of(text)]):
        stream = Detokenizer(table(), stop=StopStrings(stops))
        assert "".join([*map(stream.push, ids), stream.finish()]) == shown
        assert stream.stop_match == match


def test_nothing_comes_after_a_stop_and_later_tokens_are_not_counted() -> None:
    stream = Detokenizer(table(), stop=StopStrings(["END"]))
    assert stream.push(ids_of("go END ") + ids_of("more")) == "go "
    assert (stream.stopped, stream.stop_match, stream.token_count) == (True, "END", 6)
    assert [stream.push(ids_of("more")), stream.finish()] == ["", ""]
    assert stream.token_count == 6


def test_a_stop_may_match_a_character_that_bytes_left_incomplete() -> None:
    stream = Detokenizer(table(), stop=StopStrings(["�!"]))
    assert stream.push([*ids_of("a"), id_of()[0xE4]]) == "a"
    assert stream.push(ids_of("!")) == ""
    assert stream.stop_match == "�!"
    stream = Detokenizer(table(), stop=StopStrings(["�"]))
    assert stream.push([*ids_of("a"), id_of()[0xE4]]) + stream.finish() == "a"
    assert stream.stop_match == "�"


def test_stops_are_not_looked_for_before_min_tokens() -> None:
    stream = Detokenizer(table(), stop=StopStrings(["ab"]), min_tokens=3)
    assert [stream.push([token]) for token in ids_of("abababx")] == ["a", "b", "a", "b", "", "", ""]
    assert (stream.stop_match, stream.token_count) == ("ab", 6)


def test_the_prompt_is_not_searched() -> None:
    stream = Detokenizer(table(), stop=StopStrings(["ab"]), prompt_tail_ids=ids_of("xa"))
    assert stream.push(ids_of("b")) + stream.finish() == "b"
    assert not stream.stopped


def test_stop_strings_may_be_shared_by_streams() -> None:
    stops = StopStrings(["ab"])
    one, other = (Detokenizer(table(), stop=stops) for _ in range(2))
    assert [one.push(ids_of("a")), other.push(ids_of("xb")), one.push(ids_of("b"))] == ["", "xb", ""]
    assert (one.stopped, other.stopped) == (True, False)
    assert stops.strings == ("ab",)


def test_byte_fallback_text_is_searched_too() -> None:
    byte_tokens = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=byte_tokens | {"▁a": 256}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    stream = Detokenizer(TokenTable(tokenizer), stop=StopStrings(["🎉 a"]))
    assert stream.push([256, *"x🎉".encode()]) == " a"
    assert stream.push([256, 256]) == "x"
    assert stream.stop_match == "🎉 a"


@pytest.mark.parametrize(
    "strings",
    [[], [""], ["a", ""], ["a", 5], ["\ud800"], ["x" * MAX_STOP_BYTES, "y"]],
    ids=lambda s: repr(s)[:12],
)
def test_unusable_stops_are_refused_by_name(strings: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="stop=") as refused:
        StopStrings(strings)
    assert refused.value.field == "stop"


def test_the_longest_stops_work() -> None:
    long = "".join(chr(0x4E00 + i) for i in range(MAX_STOP_BYTES // 3))
    stream = Detokenizer(table(), stop=StopStrings([long]))
    assert stream.push(ids_of("x" + long[:-1])) == "x"
    assert stream.push(ids_of(long[-1])) == ""
    assert stream.stop_match == long
