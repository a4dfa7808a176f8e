"""What a stream gives out is what the tokenizer's own decode makes of all its ids.

Each family is trained here, configured as the models it is named after; `tokenizers` is the reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from smg._text import Detokenizer, TokenTable

CORPUS = [
    "The router sends each request to the rank with the least work, and streams the answer back.",
    "It doesn't wait; it can't. We'll see whether they've 12345 tokens left ( or not ) . Isn't that so ?",
    "def f(x):\n    return {'a': [x, 1, 2]}  # comment\n\n\t\tdone\n",
    "你好，世界！路由器把请求发给最空闲的节点。こんにちは、世界。",
    "Привет, мир! Grüße aus Köln, ça va très bien, ñandú.",
    "🎉🎉 party 👩‍👩‍👧 family é combining e\u0301 ½ € ✓ �",
] * 3
SAMPLES = [
    *CORPUS[:6],
    " leading space",
    "  two",
    "trailing ",
    "",
    "a",
    "é",
    "🎉",
    "日本語テキスト",
    "no<eos>pe",
]
GPT2_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# Byte -> character of that alphabet: Latin-1 stands for itself, the rest for the other bytes in their order.
SPELLING = {ord(character): character for character in GPT2_ALPHABET if ord(character) < 0x100}
SPELLING |= zip((byte for byte in range(256) if byte not in SPELLING), GPT2_ALPHABET[len(SPELLING) :], strict=True)


def train(model: models.Model, trainer: trainers.Trainer, configure: Callable[[Tokenizer], None]) -> Tokenizer:
    tokenizer = Tokenizer(model)
    configure(tokenizer)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("[two words]"), AddedToken("→ é")])
    return tokenizer


def byte_level(configure: Callable[[Tokenizer], None]) -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=GPT2_ALPHABET, show_progress=False)
    return train(models.BPE(), trainer, configure)


def gpt2() -> Tokenizer:
    def configure(t: Tokenizer) -> None:
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        t.decoder = decoders.ByteLevel()
        t.post_processor = processors.ByteLevel(trim_offsets=False)

    return byte_level(configure)


def llama3() -> Tokenizer:
    def configure(t: Tokenizer) -> None:
        split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
        t.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        t.decoder = decoders.ByteLevel()

    return byte_level(configure)


def qwen2() -> Tokenizer:
    def configure(t: Tokenizer) -> None:
        t.normalizer = normalizers.NFC()
        t.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\p{N}|[^\r\n\p{L}\p{N}]?\p{L}+|\s+|."), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        t.decoder = decoders.Sequence([decoders.ByteLevel()])

    return byte_level(configure)


def sentencepiece(normalizer: normalizers.Normalizer, decoder: decoders.Decoder) -> Tokenizer:
    """BPE with byte fallback: characters that the vocabulary lacks become <0xNN> tokens."""

    def configure(t: Tokenizer) -> None:
        t.normalizer = normalizer

    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", *byte_tokens], limit_alphabet=60, show_progress=False
    )
    made = json.loads(train(models.BPE(), trainer, configure).to_str())
    made["added_tokens"] = [entry for entry in made["added_tokens"] if entry["content"] not in byte_tokens]
    made["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.decoder = decoder
    return tokenizer


def llama2() -> Tokenizer:
    return sentencepiece(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )


def gemma() -> Tokenizer:
    return sentencepiece(
        normalizers.Replace(" ", "▁"),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    )


def strip_several() -> Tokenizer:
    """As Llama 2, with up to three multi-byte characters lost at the start."""
    return sentencepiece(
        normalizers.Replace(" ", "▁"),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("▁", 3, 0)]),
    )


def unigram(decoder: decoders.Decoder, scheme: str) -> Tokenizer:
    def configure(t: Tokenizer) -> None:
        t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        t.decoder = decoder

    trainer = trainers.UnigramTrainer(vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    return train(models.Unigram(), trainer, configure)


def t5() -> Tokenizer:
    return unigram(decoders.Metaspace(prepend_scheme="always"), "always")


def metaspace_never() -> Tokenizer:
    return unigram(decoders.Metaspace(prepend_scheme="never"), "never")


def bert() -> Tokenizer:
    def configure(t: Tokenizer) -> None:
        t.normalizer = normalizers.BertNormalizer()
        t.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        t.decoder = decoders.WordPiece(prefix="##", cleanup=True)

    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"], show_progress=False)
    return train(models.WordPiece(unk_token="[UNK]"), trainer, configure)


def words() -> Tokenizer:
    def configure(t: Tokenizer) -> None:
        t.pre_tokenizer = pre_tokenizers.Whitespace()

    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False)
    return train(models.WordLevel(unk_token="[UNK]"), trainer, configure)


def end_of_word() -> Tokenizer:
    """Its decoder puts a space after a word only if another follows: no table can say that."""

    def configure(t: Tokenizer) -> None:
        t.pre_tokenizer = pre_tokenizers.Whitespace()
        t.decoder = decoders.BPEDecoder(suffix="</w>")

    trainer = trainers.BpeTrainer(vocab_size=400, end_of_word_suffix="</w>", show_progress=False)
    return train(models.BPE(end_of_word_suffix="</w>"), trainer, configure)


FAMILIES = [gpt2, llama3, qwen2, llama2, gemma, strip_several, t5, metaspace_never, bert, words]
BYTE_FALLBACK = [llama2, gemma, strip_several]
family = pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
# Ten families share the examples of one test, more or less.
shared = settings(max_examples=settings.default.max_examples // 3)
byte_fallback = pytest.mark.parametrize("make", BYTE_FALLBACK, ids=lambda make: make.__name__)


@cache
def made(make: Callable[[], Tokenizer]) -> tuple[Tokenizer, TokenTable]:
    tokenizer = make()
    return tokenizer, TokenTable(tokenizer)


@cache
def id_sequences(make: Callable[[], Tokenizer]) -> st.SearchStrategy[list[int]]:
    """Ids of real text, byte tokens, added tokens, ids that do not exist, any mixture of them."""
    tokenizer = made(make)[0]
    size = tokenizer.get_vocab_size()
    texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in SAMPLES]
    early = [[token] for token in range(300)]  # single bytes, in the families that have them
    late = [[token] for token in range(size - 8, size + 3)]  # added tokens, and past the end
    parts = st.lists(st.sampled_from([*texts * 5, *early, *late * 5]) | st.lists(st.integers(0, size - 1)), max_size=12)
    return parts.map(lambda parts: [token for part in parts for token in part])


CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def in_chunks(cuts: list[int], ids: Sequence[int]) -> list[Sequence[int]]:
    """`ids` in pieces of the sizes in `cuts`, over and over."""
    chunks = []
    for cut in cycle(cuts):
        if not len(ids):
            break
        chunks.append(ids[:cut])
        ids = ids[cut:]
    return chunks


def text_of(stream: Detokenizer, chunks: Sequence[Sequence[int]]) -> str:
    return "".join([*(stream.push(chunk) for chunk in chunks), stream.finish()])


@family
@shared
@given(data=st.data())
def test_deltas_put_together_are_decode_of_the_whole(make: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer, table = made(make)
    ids = data.draw(id_sequences(make))
    hide = data.draw(st.booleans())
    stream = Detokenizer(table, skip_special_tokens=hide)
    assert text_of(stream, in_chunks(data.draw(CUTS), ids)) == tokenizer.decode(ids, skip_special_tokens=hide)
    assert stream.token_count == len(ids)
    assert stream.unknown == sum(tokenizer.id_to_token(token) is None for token in ids)


@family
def test_the_table_follows_the_decoder(make: Callable[[], Tokenizer]) -> None:
    assert made(make)[1].exact


@pytest.mark.parametrize("make", [gpt2, llama2, gemma])
@shared
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20))
def test_a_character_comes_out_with_its_last_token(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer, table = made(make)
    assume("▁" not in text and "<" not in text)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    stream = Detokenizer(table)
    for i, token in enumerate(ids):
        stream.push([token])
        ahead = Detokenizer(table)
        shown = ahead.push(ids[: i + 1])
        whole = tokenizer.decode(ids[: i + 1])
        held = len(whole) - len(shown)
        # A run of byte tokens may still turn out to be no text; else only part of a character is held.
        if "<0x" not in tokenizer.id_to_token(token):
            assert held == 0 or (held == 1 and whole[-1] == "�")


@shared
@given(text=st.text(alphabet="字漢語文🎉é", min_size=60, max_size=90))
def test_a_long_run_of_byte_tokens_does_not_wait_for_its_end(text: str) -> None:
    tokenizer, table = made(gemma)
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    stream = Detokenizer(table)
    shown = "".join(stream.push([token]) for token in ids)
    assert text.startswith(shown)
    assert len(text[len(shown) :].encode()) < 128
    assert shown + stream.finish() == text


@byte_fallback
@pytest.mark.parametrize(
    "run",
    [b"\xf0\x9f\x8e", b"ab\xff", b"\xe4\xbd\xa0\x80", b"\xc0\xaf", b"\xed\xa0\x80", b"a" * 100 + b"\x80"],
)
def test_an_invalid_run_is_one_replacement_per_byte(make: Callable[[], Tokenizer], run: bytes) -> None:
    tokenizer, table = made(make)
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in run]
    after = tokenizer.token_to_id("e")
    whole = tokenizer.decode([*ids, after, *ids])
    assert whole == "�" * len(run) + "e" + "�" * len(run)
    assert text_of(Detokenizer(table), [[token] for token in [*ids, after, *ids]]) == whole


# Where UTF-8 changes its rules: continuation bytes, overlong forms, surrogates, past U+10FFFF.
EDGES = bytes.fromhex("41 7f 80 8f 90 9f a0 bf c0 c1 c2 df e0 e1 ec ed ee ef f0 f1 f3 f4 f5 ff")


@pytest.mark.parametrize("make", [gpt2, gemma])
@given(data=st.lists(st.sampled_from(EDGES), max_size=8).map(bytes), cuts=CUTS)
def test_invalid_bytes_become_what_decode_makes_of_them(
    make: Callable[[], Tokenizer], data: bytes, cuts: list[int]
) -> None:
    tokenizer, table = made(make)
    ids = [id_of_byte(tokenizer, byte) for byte in data]
    text = text_of(Detokenizer(table), in_chunks(cuts, ids))
    assert text == tokenizer.decode(ids)
    if make is gpt2:
        assert text == data.decode("utf-8", "replace")


@pytest.mark.parametrize("lead", EDGES[10:])
def test_every_second_byte_of_a_character(lead: int) -> None:
    tokenizer, table = made(gpt2)
    for second in range(256):
        for rest in (b"", b"\x80", b"\x80\x80"):
            data = bytes([lead, second]) + rest
            ids = [id_of_byte(tokenizer, byte) for byte in data]
            assert text_of(Detokenizer(table), [[token] for token in ids]) == tokenizer.decode(ids)


# Continuing a prompt


@family
@shared
@given(data=st.data())
def test_continuing_a_prompt_gives_the_rest_of_the_text(make: Callable[[], Tokenizer], data: st.DataObject) -> None:
    """Also when the prompt ends inside a character: it comes out whole, with its last token."""
    tokenizer, table = made(make)
    text = data.draw(st.sampled_from(SAMPLES) | st.text("ab 字🎉é", max_size=12))
    assume("�" not in text)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids)
    assume(whole)
    seam = data.draw(st.integers(1, len(ids)))
    # What the prompt shows by itself, less the beginning of a character at its end.
    if make in BYTE_FALLBACK:
        cuts = (tokenizer.decode(ids[: seam - partial]) for partial in range(4) if partial <= seam)
        prompt_text = next(shown for shown in cuts if not shown.endswith("�"))
    else:
        prompt_text = tokenizer.decode(ids[:seam]).removesuffix("�")
    stream = Detokenizer(table, prompt_tail_ids=ids[:seam])
    assert prompt_text + text_of(stream, in_chunks(data.draw(CUTS), ids[seam:])) == (
        whole if seam < len(ids) else prompt_text
    )


@family
@shared
@given(data=st.data())
def test_a_prompt_that_ends_with_a_whole_character(make: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer, table = made(make)
    # An open run of byte tokens would still change as a whole; the test with real text has them.
    prompt = [token for token in data.draw(id_sequences(make)) if not is_byte_token(tokenizer, token)]
    hide = data.draw(st.booleans())
    ids = data.draw(id_sequences(make))
    before = tokenizer.decode(prompt, skip_special_tokens=hide)
    assume(not before.endswith("�"))
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=hide)
    stream = Detokenizer(table, skip_special_tokens=hide, prompt_tail_ids=prompt)
    assert before + text_of(stream, in_chunks(data.draw(CUTS), ids)) == whole


@pytest.mark.parametrize("make", [gpt2, llama2, gemma])
@pytest.mark.parametrize("begun", [b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x8e"])
def test_a_character_that_only_the_prompt_began_does_not_leak(make: Callable[[], Tokenizer], begun: bytes) -> None:
    tokenizer, table = made(make)
    alphabet = {byte: id_of_byte(tokenizer, byte) for byte in [*begun, 0x89, 0x8E]}
    prompt = [tokenizer.token_to_id("e"), *(alphabet[byte] for byte in begun)]
    assert Detokenizer(table, prompt_tail_ids=prompt).finish() == ""
    stream = Detokenizer(table, prompt_tail_ids=prompt)
    assert text_of(stream, [[tokenizer.token_to_id("e")]]) == "e"
    # Bytes of the stream's own that complete nothing are its own text.
    if begun == b"\xf0\x9f":
        stream = Detokenizer(table, prompt_tail_ids=prompt)
        assert text_of(stream, [[alphabet[0x8E]], [tokenizer.token_to_id("e")]]) == "�e"


def test_the_end_of_a_long_prompt_is_enough() -> None:
    tokenizer, table = made(llama2)
    prompt = tokenizer.encode(CORPUS[0] * 20).ids
    party = [id_of_byte(tokenizer, byte) for byte in "🎉".encode()]
    word = tokenizer.encode("the").ids
    for tail in (prompt, prompt[-32:]):
        assert text_of(Detokenizer(table, prompt_tail_ids=[*tail, *party[:3]]), [party[3:], word]) == "🎉 the"
        assert text_of(Detokenizer(table, prompt_tail_ids=tail), [word]) == " the"


def test_a_prompt_of_byte_tokens_has_begun_the_text() -> None:
    tokenizer, table = made(strip_several)
    prompt = [id_of_byte(tokenizer, byte) for byte in "字".encode()]
    mark = tokenizer.token_to_id("▁")
    assert tokenizer.decode([mark, *prompt, mark]) == "字▁"
    assert text_of(Detokenizer(table, prompt_tail_ids=[mark, *prompt]), [[mark]]) == "▁"


def is_byte_token(tokenizer: Tokenizer, token: int) -> bool:
    return (tokenizer.id_to_token(token) or "").startswith("<0x")


def id_of_byte(tokenizer: Tokenizer, byte: int) -> int:
    token = tokenizer.token_to_id(f"<0x{byte:02X}>")
    if token is None:
        token = tokenizer.token_to_id(SPELLING[byte])
    assert token is not None
    return token


# Options and odd input


def test_spaces_between_added_tokens_can_be_left_out() -> None:
    tokenizer, table = made(words)
    bos, tool, word = (tokenizer.token_to_id(name) for name in ["<bos>", "<tool_call>", "router"])
    ids = [word, bos, tool, bos, word, tool]

    def text(**options: bool) -> str:
        return text_of(Detokenizer(table, **options), [[token] for token in ids])

    assert text(skip_special_tokens=False) == "router <bos> <tool_call> <bos> router <tool_call>"
    assert text(skip_special_tokens=False, spaces_between_special_tokens=False) == (
        "router <bos><tool_call><bos> router <tool_call>"
    )
    assert text(spaces_between_special_tokens=False) == "router <tool_call> router <tool_call>"


def test_ids_outside_the_vocabulary_yield_no_text_and_are_counted() -> None:
    tokenizer, table = made(gpt2)
    a = tokenizer.token_to_id("a")
    stream = Detokenizer(table)
    assert stream.push([a, len(table), -1, 2**40, a, 2**32 - 1, 2**32 + a]) == "aa"
    assert (stream.unknown, stream.token_count) == (5, 7)
    with pytest.raises(TypeError):
        stream.push(["a"])  # type: ignore[list-item]


def test_a_gap_in_the_vocabulary_is_unknown() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a"))
    table = TokenTable(tokenizer)
    stream = Detokenizer(table)
    assert (len(table), 3 in table, 5 in table) == (6, False, True)
    assert stream.push([3, 0, 4, 5]) == "a b"
    assert stream.unknown == 2


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.int64])
def test_ids_may_be_an_array(dtype: type) -> None:
    tokenizer, table = made(gpt2)
    ids = np.array(tokenizer.encode(CORPUS[0]).ids, dtype=dtype)
    assert text_of(Detokenizer(table, prompt_tail_ids=ids[:0]), [ids[:3], ids[3:]]) == CORPUS[0]


def test_nothing_comes_after_the_end() -> None:
    tokenizer, table = made(gpt2)
    stream = Detokenizer(table)
    assert stream.push([id_of_byte(tokenizer, 0xE4)]) == ""
    assert [stream.finish(), stream.finish(), stream.push([tokenizer.token_to_id("a")])] == ["�", "", ""]


def test_bytes_of_a_token() -> None:
    for make in (gpt2, llama2):
        tokenizer, table = made(make)
        assert table.bytes_of(id_of_byte(tokenizer, 0xE4)) == b"\xe4"
        assert table.bytes_of(tokenizer.token_to_id("<bos>")) == b"<bos>"
        assert table.bytes_of(len(table)) == table.bytes_of(-1) == b""
        assert table.is_special(tokenizer.token_to_id("<eos>"))
        assert not table.is_special(tokenizer.token_to_id("<tool_call>"))
        assert not table.is_special(len(table))
    tokenizer, table = made(llama2)
    assert table.bytes_of(tokenizer.token_to_id("▁")) == b" "


def test_a_vocabulary_out_of_all_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="token id 16777216"):
        TokenTable(Tokenizer(models.WordLevel({"a": 0, "b": 1 << 24}, unk_token="a")))
    with pytest.raises(ValueError, match="token 1 is 70000 bytes"):
        TokenTable(Tokenizer(models.WordLevel({"a": 0, "b" * 69999: 1}, unk_token="a")))


# Decoders that no table can follow


class Shout:
    """A decoder written in Python."""

    def decode_chain(self, tokens: list[str]) -> list[str]:
        return [token.upper() for token in tokens]


def shouting() -> Tokenizer:
    tokenizer = words()
    tokenizer.decoder = decoders.Decoder.custom(Shout())
    return tokenizer


def fused_then_replaced() -> Tokenizer:
    tokenizer = gemma()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 0, 0)]
    )
    return tokenizer


@pytest.mark.parametrize("make", [end_of_word, shouting, fused_then_replaced], ids=lambda make: make.__name__)
@shared
@given(text=st.sampled_from(CORPUS), data=st.data())
def test_other_decoders_go_through_the_library(make: Callable[[], Tokenizer], text: str, data: st.DataObject) -> None:
    tokenizer, table = made(make)
    assert not table.exact
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert text_of(Detokenizer(table), in_chunks(data.draw(CUTS), ids)) == tokenizer.decode(ids)


def test_a_library_stream_gives_out_its_held_tail_and_continues_prompts() -> None:
    tokenizer, table = made(fused_then_replaced)
    party = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🎉".encode()]
    e = tokenizer.token_to_id("e")
    assert text_of(Detokenizer(table), [[e], party[:2]]) == tokenizer.decode([e, *party[:2]])
    assert text_of(Detokenizer(table, prompt_tail_ids=[e, *party[:2]]), [party[2:], [e]]) == "🎉e"


def test_a_library_stream_survives_text_that_changes_afterwards() -> None:
    tokenizer, table = made(fused_then_replaced)
    e, a, bad = (tokenizer.token_to_id(name) for name in ["e", "<0x41>", "<0xFF>"])
    stream = Detokenizer(table)
    assert stream.push([e, a]) == "eA"
    stream.push([bad])
    assert text_of(stream, [[e], [e]]).endswith("ee")


def test_a_library_stream_counts_unknown_ids() -> None:
    _, table = made(end_of_word)
    stream = Detokenizer(table)
    assert stream.push([len(table), -1]) + stream.finish() == ""
    assert (stream.unknown, stream.token_count) == (2, 2)
