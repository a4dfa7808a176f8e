"""How the decoders of the `tokenizers` library write single tokens: what `TokenTable` is built from.

A decoder whose text depends on more than the tokens one by one (and on which of them is the first, on runs
of byte-fallback tokens, on characters stripped from the start) has no table; `LibraryStream` goes through it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from tokenizers import Regex, Tokenizer, decoders

Spell = Callable[[str], tuple[bytes, bytes, "int | None"]]
"""token -> (its bytes, its bytes as first token of a text, value of a byte-fallback token)"""


class Reading(NamedTuple):
    """What a decoder does, token by token."""

    mode: Literal["bytes", "text", "library"]  # pieces of UTF-8; pieces of text; not token by token
    name: str  # the decoder's stages, for logs
    spell: Spell
    stripped: str = ""  # the character that a text loses at its start
    strip_left: int = 0  # this many of them at most


def reading(decoder: decoders.Decoder | None) -> Reading:
    if decoder is None:
        return Reading("text", "none", spell_words)
    try:
        stages = flatten(json.loads(decoder.__getstate__()))
    except Exception:  # the library's, for a decoder written in Python, which has no JSON
        return Reading("library", "custom", spell_plain)
    kinds = [stage["type"] for stage in stages]
    name = ", ".join(kinds)
    if kinds == ["ByteLevel"]:
        return Reading("bytes", name, spell_byte_level)
    if kinds in (["Metaspace"], ["WordPiece"]):
        return Reading("text", name, lambda token: spell_by(decoder, token))

    replacing: list[decoders.Decoder] = []
    while stages and stages[0]["type"] == "Replace":
        pattern = stages[0]["pattern"]
        pattern = pattern["String"] if "String" in pattern else Regex(pattern["Regex"])
        replacing.append(decoders.Replace(pattern, stages[0]["content"]))
        del stages[0]
    fallback = bool(stages) and stages[0]["type"] == "ByteFallback"
    if fallback:
        del stages[0]
    stripped, strip_left = "", 0
    if stages and stages[0]["type"] == "Fuse":
        del stages[0]
        # Only on fused text does Strip mean the start of the text and not of every token.
        if stages and stages[0]["type"] == "Strip" and stages[0]["stop"] == 0:
            stripped, strip_left = stages[0]["content"], stages[0]["start"]
            del stages[0]
    if stages:
        return Reading("library", name, spell_plain)
    replace = decoders.Sequence(replacing) if replacing else None
    return Reading("text", name, lambda token: spell_replaced(replace, fallback, token), stripped, strip_left)


def flatten(stage: dict[str, Any]) -> list[dict[str, Any]]:
    if stage["type"] != "Sequence":
        return [stage]
    return [inner for part in stage["decoders"] for inner in flatten(part)]


def spell_plain(token: str) -> tuple[bytes, bytes, None]:
    spelled = token.encode()
    return spelled, spelled, None


def spell_words(token: str) -> tuple[bytes, bytes, None]:
    return b" " + token.encode(), token.encode(), None


def spell_by(decoder: decoders.Decoder, token: str) -> tuple[bytes, bytes, None]:
    return decoder.decode(["", token]).encode(), decoder.decode([token]).encode(), None


def spell_replaced(replace: decoders.Decoder | None, fallback: bool, token: str) -> tuple[bytes, bytes, int | None]:
    if replace is not None:
        token = replace.decode([token])
    spelled = token.encode()
    # The library reads the digits with Rust's from_str_radix, which takes a plus sign.
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>", token) if fallback else None
    return spelled, spelled, int(byte[1], 16) if byte else None


def spell_byte_level(token: str) -> tuple[bytes, bytes, None]:
    # A token with a character outside the alphabet (an added token) stands for itself.
    try:
        spelled = bytes([BYTE_OF[character] for character in token])
    except KeyError:
        spelled = token.encode()
    return spelled, spelled, None


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte in GPT-2's spelling: printable Latin-1 is itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = byte_level_alphabet()


class LibraryStream:
    """A stream through the library's own `DecodeStream`, for decoders that no table can follow."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.restart()

    def restart(self) -> None:
        self.stream = decoders.DecodeStream(skip_special_tokens=self.skip_special_tokens)
        self.shown: list[int] = []  # tokens of the text given out last
        self.waiting: list[int] = []  # tokens since then

    def step(self, token: int) -> bytes:
        try:
            text = self.stream.step(self.tokenizer, token)
        except Exception:
            # The library gives up when later tokens changed text that it had given out. Going on afresh loses
            # what it held back, at most a few characters, and keeps the stream alive.
            self.restart()
            text = self.stream.step(self.tokenizer, token)
        self.waiting.append(token)
        if text is None:
            return b""
        self.shown, self.waiting = self.waiting, []
        return text.encode()

    def rest(self) -> bytes:
        before = self.decode(self.shown)
        return self.decode(self.shown + self.waiting)[len(before) :].encode()

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=self.skip_special_tokens)
