"""What the simulated model says: token ids that follow from the engine's seed and the request's own.

All replies are windows of one ring of token ids, which is made once. A reply starts where its seed says and
goes on round the ring, so that the next token of a thousand requests costs one index each.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from smg.mock.settings import Settings

RING_TOKENS = 1 << 16
_MASK64 = (1 << 64) - 1


class Replies:
    """The ring, where replies start in it, and how long they are.

    ring  token ids; a reply's token i is ring[(start + i) % size]
    eos   id that ends a reply which ends by itself, or None
    """

    def __init__(
        self,
        ring: list[int],
        starts: Sequence[int],
        *,
        seed: int,
        eos: int | None,
        lengths: tuple[int, int] | None,
    ) -> None:
        self.ring = ring
        self.size = len(self.ring)
        self.eos = eos
        self._starts = starts
        self._seed = seed
        self._lengths = lengths

    def start(self, seed: int) -> int:
        """Where in the ring the reply for a request's seed starts."""
        return self._starts[_mix(self._seed, seed) % len(self._starts)]

    def natural_length(self, seed: int) -> int | None:
        """After how many tokens that reply ends by itself; None when it does not."""
        if self._lengths is None:
            return None
        low, high = self._lengths
        return low + _mix(self._seed + 1, seed) % (high - low + 1)

    def window(self, start: int, begin: int, end: int) -> list[int]:
        """The tokens [begin, end) of the reply that starts at `start`."""
        count = end - begin
        first = (start + begin) % self.size
        part = self.ring[first : first + count]
        while len(part) < count:
            part += self.ring[: count - len(part)]
        return part

    def logprob_window(self, start: int, begin: int, end: int) -> list[float]:
        """The logprobs of the same tokens: made up, but always the same for the same reply and place."""
        # Multiples of 1/1024: float64 holds them exactly, so tests may compare with ==.
        tokens = self.window(start, begin, end)
        return [-((token * 2654435761 + place) % 4096) / 1024 for place, token in enumerate(tokens, begin)]

    def first_of(self, start: int, wanted: Iterable[int], begin: int, end: int) -> int | None:
        """The first place in [begin, end) of a reply where one of the wanted ids stands, or None."""
        wanted = frozenset(wanted)
        end = min(end, begin + self.size)  # one round of the ring shows all there is
        tokens = self.window(start, begin, end)
        if wanted.isdisjoint(tokens):
            return None
        return next(begin + place for place, token in enumerate(tokens) if token in wanted)


def make_replies(settings: Settings) -> Replies:
    """The replies these settings ask for. Needs `tokenizers` when there is a model path."""
    ring, starts, eos = _ring(settings.model_path, settings.seed, settings.vocab_size, settings.eos_token_id)
    return Replies(ring, starts, seed=settings.seed, eos=eos, lengths=settings.reply_lengths)


@lru_cache(maxsize=8)  # many simulators of one test run are alike
def _ring(
    model_path: str | None, seed: int, vocab_size: int, eos: int | None
) -> tuple[list[int], Sequence[int], int | None]:
    """The ring's ids, the places where a reply may start, and the id that ends one."""
    draw = random.Random(seed).random  # random() alone gives the same numbers in every Python version
    if model_path is not None:
        return *_text_ring(Path(model_path), draw), _model_eos(Path(model_path)) if eos is None else eos
    eos = vocab_size - 1 if eos is None else eos
    ring = [int(draw() * (vocab_size - 1)) for _ in range(RING_TOKENS)]
    return [token + (token >= eos) for token in ring], range(RING_TOKENS), eos  # eos itself is left out


def _text_ring(model: Path, draw: Callable[[], float]) -> tuple[list[int], list[int]]:
    """Paragraphs of `SENTENCES`, each tokenized whole: a reply begins as text does, with no space before."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("--model-path needs the tokenizers package: pip install 'smg-fastpath[server]'") from None
    path = model / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"--model-path {model}: there is no tokenizer.json in it")
    texts = [
        " ".join(SENTENCES[int(draw() * len(SENTENCES))] for _ in range(2 + int(draw() * 4))) + "\n\n"
        for _ in range(256)
    ]
    encodings = Tokenizer.from_file(str(path)).encode_batch(texts, add_special_tokens=False)
    paragraphs = [encoding.ids for encoding in encodings]
    ring: list[int] = []
    starts: list[int] = []
    while len(ring) < RING_TOKENS:
        starts.append(len(ring))
        ring += paragraphs[int(draw() * len(paragraphs))]
    return ring, starts


def model_vocab_size(settings: Settings) -> int:
    """Ids below this are valid: the model's config says so, else --vocab-size."""
    if settings.model_path is not None:
        size = _read_json(Path(settings.model_path) / "config.json").get("vocab_size")
        if isinstance(size, int):
            return size
    return settings.vocab_size


def _model_eos(model: Path) -> int | None:
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(model / name).get("eos_token_id")
        if isinstance(eos, list) and eos:
            eos = eos[0]
        if isinstance(eos, int):
            return eos
    return None


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    found = json.loads(path.read_text("utf-8"))
    return found if isinstance(found, dict) else {}


def _mix(seed: int, value: int) -> int:
    """64 well-mixed bits of two integers (the finaliser of splitmix64)."""
    x = (seed * 0x9E3779B97F4A7C15 + value + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


SENTENCES = (
    "The harbour is quiet in the morning, and the first boats leave before the fog has lifted.",
    "A good map leaves out almost everything, and that is why it helps.",
    "Put the kettle on, and I will tell you what the letter said.",
    "Rivers do not hurry, yet nothing stays where they have decided to go.",
    "She counted the steps twice and found one more on the way down.",
    "Bread needs flour, water, salt and time, and most of all it needs time.",
    "The old clock in the hall is four minutes slow, which everyone in the house has learned to add.",
    "If the wind turns north tonight, we should bring the boxes inside.",
    "Nobody remembers who planted the walnut tree, but everybody eats from it.",
    "The train was late, so we learned each other's names.",
    "A short answer would be yes; a longer one would need a drawing.",
    "He mended the fence with wire, string and a great deal of patience.",
    "There are three ways up the hill, and the steepest has the best view.",
    "Write the number down before you forget it, then check it once more.",
    "The library smells of paper and rain, and it closes at six.",
    "Some birds stay for the winter because the bakery throws out its crumbs.",
    "First measure, then cut, and keep the piece that was too long.",
    "The children built a dam of stones and were proud of every leak they stopped.",
    "On clear nights you can see the lights of the next village, and sometimes hear its dogs.",
    "It is easier to carry two buckets than one, as long as the path is even.",
    "The recipe calls for saffron, but paprika has never disappointed anyone here.",
    "We walked until the road became a track and the track became a field.",
    "Keep the receipt, because the shop has a long memory and a short temper.",
    "The bridge was built for carts, and it still complains about lorries.",
    "Somewhere between the second and the third cup of tea the problem solved itself.",
    "A question asked twice is usually two questions.",
    "The gardener says that snow is the poor man's blanket for the beds.",
    "Take the stairs on the left; the ones on the right only look shorter.",
    "His handwriting leaned so far to the right that it seemed to be running.",
    "The museum keeps its best pieces in the cellar, where the light cannot hurt them.",
    "When the tide is out, you can reach the island without getting your shoes wet.",
    "The second violin had the better tune that evening, and everyone heard it.",
    "A rope is only as long as the part you can hold.",
    "They painted the door blue so that visitors would stop knocking at the neighbours'.",
    "In spring the whole valley smells of wild garlic for a week.",
    "Salt the water first, then tell me about your day.",
    "The lighthouse has been automatic for years, but somebody still polishes the brass.",
    "He kept every key he had ever owned, and could name the locks of two.",
    "The report was finished on Friday and understood on Monday.",
    "Sheep remember faces, which the new shepherd found out to his cost.",
    "Leave a little sugar for the tea, and take the rest to the fair.",
    "The shortest day of the year is also the one with the longest stories.",
    "We could hear the waterfall an hour before we saw it.",
    "A loose button holds best on the day you buy the thread.",
    "The ferry takes twelve cars, or nine and a very patient horse.",
    "Her grandmother measured flour with a cup that had lost its handle in another century.",
    "The sign says that the road is closed, and the tyre marks say that it is not.",
    "Most of the work was done before anybody came to watch.",
)
