"""What the simulated model says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import smg.mock
from smg.mock.replies import RING_TOKENS, Replies, make_replies, model_vocab_size
from smg.mock.settings import Settings

DEMO_MODEL = Path(smg.mock.__file__).parents[1] / "data" / "demo-model"


def test_replies_are_the_same_in_every_process_and_python_version() -> None:
    replies = make_replies(Settings(seed=1, vocab_size=50_000))
    assert replies.start(0) == 26100
    assert replies.window(replies.start(7), 0, 5) == [45561, 47388, 15523, 42372, 47254]


def test_the_engines_seed_and_the_requests_seed_both_count() -> None:
    one, other = make_replies(Settings(seed=1)), make_replies(Settings(seed=2))
    seen = {tuple(r.window(r.start(seed), 0, 8)) for r in (one, other) for seed in range(50)}
    assert len(seen) == 100


def test_ids_are_below_the_vocabulary_size_and_never_the_one_that_ends_replies() -> None:
    for eos in (None, 0, 3):
        replies = make_replies(Settings(vocab_size=5, eos_token_id=eos))
        assert set(replies.window(0, 0, RING_TOKENS)) == {0, 1, 2, 3, 4} - {4 if eos is None else eos}


@given(st.integers(0, 9), st.integers(0, 40), st.integers(0, 40))
def test_a_window_goes_round_the_ring(start: int, begin: int, count: int) -> None:
    replies = Replies(list(range(10)), range(10), seed=0, eos=None, lengths=None)
    assert replies.window(start, begin, begin + count) == [(start + begin + i) % 10 for i in range(count)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.sets(st.integers(0, 6)), st.integers(0, 30))
def test_the_first_of_some_ids_is_found_wherever_it_is(ring: list[int], wanted: set[int], begin: int) -> None:
    replies = Replies(ring, range(len(ring)), seed=0, eos=None, lengths=None)
    found = replies.first_of(1, wanted, begin, begin + 50)
    there = [i for i in range(begin, begin + 50) if ring[(1 + i) % len(ring)] in wanted]
    assert found == (there[0] if there else None)
    assert replies.first_of(1, wanted, begin, begin) is None


def test_with_a_model_replies_are_text_that_begins_a_sentence() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    settings = Settings(model_path=str(DEMO_MODEL), output_tokens="20-40")
    replies = make_replies(settings)
    texts = {tokenizer.decode(replies.window(replies.start(seed), 0, 40)) for seed in range(30)}
    assert len(texts) > 25
    for text in texts:
        assert text[0].isupper()
        assert "�" not in text
        assert text.isascii()
    assert tokenizer.id_to_token(replies.eos) == "<|im_end|>"
    assert model_vocab_size(settings) == tokenizer.get_vocab_size()
