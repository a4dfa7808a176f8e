"""A model's tokenizer, chat templates and end-of-sequence ids, read from its local directory."""

from __future__ import annotations

import json
import logging
import os
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from smg._text import TokenTable
from smg.errors import Error, InvalidRequest
from smg.http.templates import ChatTemplate, TemplateError

_log = logging.getLogger("smg")
Encode = Callable[[str, bool], Sequence[int]]

# Characters. Ids of a longer text are an array: making an integer of each would hold up every thread for milliseconds.
LONG_TEXT = 32 << 10

# What a faster tokenizer must split as the reference does before it is trusted, besides text of the vocabulary.
_PROBES = (
    "Hello, world! It's 3:45 p.m., isn't it?",
    "  leading, trailing  \n\n\tand\r\ninner   runs of space \n",
    "def f(x): return {'a': [x**2, 0x1F, 1_000.5e-3]}  # 100%",
    "Ünïcödé, naïve façade; Straße; ﬁne ligature; e\u0301 combining",
    "日本語のテキスト 中文 한국어 العربية עברית हिन्दी ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇺🇳 \u200d \ufeff \u2028 \x00 \x7f",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAA 12345678901234567890 ----====____",
    "",
)
_SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")  # variables of chat templates
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")


class ModelError(Error):
    """The model directory cannot be used as it is; the message names the file."""


class ModelTokenizer:
    """Text to token ids and back, for one model. Usable from any thread.

    `name`: what the model is called, its directory as given. `table`: bytes of each id. `end_ids`: ids that end a
    text, the primary one first, each with what it matched (None: the end of the sequence). `vocab_size`: ids that
    the model takes are below it. `context`: tokens that the model's configuration allows for prompt and answer
    together, None when it does not say; what an engine reports about itself comes first. `encode`: a faster encoder
    than the reference, `fast` says whether there is one.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        *,
        templates: Mapping[str, ChatTemplate] | None = None,
        end_ids: Sequence[int] = (),
        vocab_size: int | None = None,
        context: int | None = None,
        encode: Encode | None = None,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.table = TokenTable(tokenizer)
        self.templates = dict(templates or {})
        self.end_ids: dict[int, str | int | None] = {token: None for token in end_ids}
        self.vocab_size = vocab_size or len(self.table)
        self.context = context
        self.fast = encode is not None
        self._encode = encode or reference_encoder(tokenizer)

    def encode(self, text: str, add_special_tokens: bool) -> Sequence[int]:
        """Token ids, of a long text in an array of type "I".

        Special tokens in the text are honoured; `add_special_tokens` adds the model's own.
        Raises InvalidRequest for text with lone surrogates, which is no Unicode text.
        """
        try:
            return self._encode(text, add_special_tokens)
        except Exception:  # of either encoder, a kind of its own
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise InvalidRequest("prompt", text, "text without lone surrogates") from None
            raise

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """The prompt's text, see `ChatTemplate.render`. A template called tool_use is for requests with tools."""
        template = self.templates.get("tool_use") if tools else None
        template = template or self.templates.get("default")
        if template is None:
            raise TemplateError("this model has no chat template; start the server with --chat-template FILE")
        return template.render(messages, tools=tools, **options)


def load(model_path: str, tokenizer_path: str | None = None, chat_template: str | None = None) -> ModelTokenizer:
    """The model in the local directory `model_path`.

    Reads tokenizer.json (from `tokenizer_path`, a directory or the file, where given), beside it
    tokenizer_config.json, special_tokens_map.json, chat_template.jinja and chat_template.json, and in `model_path`
    config.json and generation_config.json. Only the first must be there. `chat_template`, a file or the text
    itself, replaces the model's own. Raises ModelError.
    """
    directory = Path(model_path)
    if not directory.is_dir():
        raise ModelError(f"model path {model_path!r} is not a directory; models are read from local ones")
    source = Path(tokenizer_path) if tokenizer_path else directory
    file = source / "tokenizer.json" if source.is_dir() else source
    if not file.is_file():
        raise ModelError(f"{file} is missing: a tokenizer in the tokenizers library's format is needed")
    # One text at a time gains nothing from the library's threads, and the way there and back costs more than a
    # third of tokenizing a short prompt. A user's own setting stays.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise ModelError(f"{file} is not a tokenizer: {error}") from None
    tokenizer.no_padding()  # settings of training that some files still have
    tokenizer.no_truncation()
    settings = _json(file.parent / "tokenizer_config.json")
    tokens = {**_json(file.parent / "special_tokens_map.json"), **{k: v for k, v in settings.items() if v}}
    specials = {name: _token_text(tokens[name]) for name in _SPECIALS if tokens.get(name)}
    config, generation = _json(directory / "config.json"), _json(directory / "generation_config.json")
    if isinstance(config.get("text_config"), dict):  # of a model that takes more than text
        config = {**config, **config["text_config"]}
    try:
        return ModelTokenizer(
            model_path,
            tokenizer,
            templates=_templates(chat_template, file.parent, settings, specials),
            end_ids=_end_ids(config, generation, tokenizer, specials.get("eos_token")),
            vocab_size=_positive(config.get("vocab_size")),
            context=next((n for name in _CONTEXT if (n := _positive(config.get(name)))), None),
            encode=fast_encoder(file, tokenizer),
        )
    except ValueError as error:
        raise ModelError(f"model {model_path}: {error}") from None


def reference_encoder(tokenizer: Tokenizer) -> Encode:
    """`encode_batch_fast`, which lets go of the GIL; `encode` does not."""
    batch = tokenizer.encode_batch_fast

    def encode(text: str, add_special_tokens: bool) -> Sequence[int]:
        ids: list[int] = batch([text], add_special_tokens=add_special_tokens)[0].ids
        return ids if len(text) <= LONG_TEXT else array("I", ids)

    return encode


def fast_encoder(file: Path, tokenizer: Tokenizer) -> Encode | None:
    """`fastokens`' encoder, if it is installed, takes the model and splits the probes as the reference does."""
    try:
        import fastokens
    except ImportError:
        return None
    try:
        fast = fastokens.Tokenizer.from_file(str(file))
        encode_short, encode_batch = fast.encode, fast.encode_batch_flat

        def encode(text: str, add_special_tokens: bool) -> Sequence[int]:
            if len(text) > LONG_TEXT:
                return array("I", encode_batch([text], add_special_tokens)[0])
            ids: list[int] = encode_short(text, add_special_tokens).ids
            return ids

        reference = reference_encoder(tokenizer)
        for probe in _probes(tokenizer):
            for special in (False, True):
                if list(encode(probe, special)) != list(reference(probe, special)):
                    _log.info("fastokens differs from tokenizers on %s; it is not used", file)
                    return None
    except Exception as error:
        _log.info("fastokens does not take %s (%s); it is not used", file, error)
        return None
    return encode


def _probes(tokenizer: Tokenizer) -> list[str]:
    """Texts of every kind: the fixed ones, each with an added token in it, and what the vocabulary itself spells."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    chosen = random.Random(0)
    size = tokenizer.get_vocab_size()
    words = [
        tokenizer.decode([chosen.randrange(size) for _ in range(40)], skip_special_tokens=False) for _ in range(24)
    ]
    marked = [f"{content}{probe}{content} {content}" for content in added[:8] for probe in _PROBES[:3]]
    short = [*_PROBES, *words, *marked]
    text = "".join(short)
    return [*short, text * (LONG_TEXT // len(text) + 1)]


def _templates(
    override: str | None, directory: Path, settings: Mapping[str, Any], specials: Mapping[str, str]
) -> dict[str, ChatTemplate]:
    """By name: "default", and what else the model has. ValueError when one is no template."""
    found: Any
    if override is not None:
        found = _override(override)
    elif (file := directory / "chat_template.jinja").is_file():
        found = file.read_text(encoding="utf-8")
    else:
        found = settings.get("chat_template") or _json(directory / "chat_template.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
        named.setdefault("default", next(iter(named.values()), None))
    else:
        named = {"default": found}
    for text in named.values():
        if not isinstance(text, str | None):
            raise ValueError("its chat_template must be a string, or a list of objects with a name and a template")
    return {name: ChatTemplate(text, specials) for name, text in named.items() if text}


def _override(chat_template: str) -> str:
    if "{{" in chat_template or "{%" in chat_template:
        return chat_template
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"chat template {chat_template}: {error}") from None


def _end_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Tokenizer, eos_token: str | None
) -> list[int]:
    """End-of-sequence ids, the primary one first: config.json, generation_config.json, the tokenizer's own."""
    ids: list[int] = []
    for found in (config.get("eos_token_id"), generation.get("eos_token_id")):
        ids += found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) for token in ids):
        raise ValueError(f"eos_token_id in its configuration is {ids!r}; expected a token id or a list of them")
    own = tokenizer.token_to_id(eos_token) if eos_token else None
    if own is not None:
        ids.append(own)
    return list(dict.fromkeys(ids))


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _token_text(value: Any) -> str:
    """A special token in tokenizer_config.json: its text, or an object with it."""
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, holds {type(value).__name__}")
    return value
