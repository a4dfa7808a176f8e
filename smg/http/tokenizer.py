"""A model's tokenizer, chat template and end-of-sequence ids, read from its local directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from smg._text import TokenTable
from smg.errors import Error
from smg.http.templates import ChatTemplate, TemplateError

_log = logging.getLogger("smg")
Encode = Callable[[str, bool], list[int]]

# What a faster tokenizer must split as the reference does before it is trusted.
_PROBES = (
    "Hello, world! It's 3:45 p.m., isn't it?",
    "  leading, trailing  \n\n\tand\r\ninner   runs of space \n",
    "def f(x): return {'a': [x**2, 0x1F, 1_000.5e-3]}  # 100%",
    "Ünïcödé, naïve façade; Straße; ﬁne ligature; e\u0301 combining",
    "日本語のテキスト 中文 한국어 العربية עברית हिन्दी ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇺🇳 \u200d \ufeff \u2028 \x00 \x7f",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAA 12345678901234567890 ----====____",
)
_SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")  # variables of chat templates


class ModelError(Error):
    """The model directory cannot be used as it is; the message names the file."""


class ModelTokenizer:
    """Text to token ids and back, for one model.

    `name`: what the model is called, its directory as given. `table`: bytes of each id. `end_ids`: ids that end a
    text, each with what it matched (None: the end of the sequence). `vocab_size`: ids are below it.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | None = None,
        end_ids: Sequence[int] = (),
        encode: Encode | None = None,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.table = TokenTable(tokenizer)
        self.template = template
        self.end_ids: dict[int, str | int | None] = {token: None for token in end_ids}
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._encode = encode or reference_encoder(tokenizer)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids. Special tokens in the text are honoured; `add_special_tokens` adds the model's own."""
        return self._encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt's text, see `ChatTemplate.render`."""
        if self.template is None:
            raise TemplateError("this model has no chat template; start the server with --chat-template FILE")
        return self.template.render(messages, **options)


def reference_encoder(tokenizer: Tokenizer) -> Encode:
    """`encode_batch_fast`, which lets go of the GIL; `encode` does not."""
    batch = tokenizer.encode_batch_fast

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = batch([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    return encode


def fast_encoder(path: Path, reference: Encode, probes: Sequence[str]) -> Encode | None:
    """`fastokens`' encoder, if it is installed, takes the model and splits the probes as the reference does."""
    try:
        import fastokens
    except ImportError:
        return None
    try:
        encode_fast = fastokens.Tokenizer.from_file(str(path)).encode

        def encode(text: str, add_special_tokens: bool) -> list[int]:
            ids: list[int] = encode_fast(text, add_special_tokens).ids
            return ids

        for probe in probes:
            for special in (False, True):
                if encode(probe, special) != reference(probe, special):
                    _log.info("fastokens differs from tokenizers on this model; it is not used")
                    return None
    except Exception as error:
        _log.info("fastokens does not take this model (%s); it is not used", error)
        return None
    return encode


def load(model_path: str, tokenizer_path: str | None = None, chat_template: str | None = None) -> ModelTokenizer:
    """The model in the local directory `model_path`.

    Reads tokenizer.json (from `tokenizer_path`, a directory or the file, where given), tokenizer_config.json,
    chat_template.jinja, config.json and generation_config.json, of which only the first must be there.
    `chat_template` is a file that replaces the model's template. Raises ModelError.
    """
    directory = Path(model_path)
    if not directory.is_dir():
        raise ModelError(f"model path {model_path!r} is not a directory; models are read from local ones")
    source = Path(tokenizer_path) if tokenizer_path else directory
    file = source / "tokenizer.json" if source.is_dir() else source
    if not file.is_file():
        raise ModelError(f"{file} is missing: a tokenizer in the tokenizers library's format is needed")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise ModelError(f"{file} is not a tokenizer: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = _json(file.parent / "tokenizer_config.json")
    specials = {name: _token_text(config[name]) for name in _SPECIALS if config.get(name)}
    template_text = _template_text(chat_template, file.parent, config)
    try:
        template = None if template_text is None else ChatTemplate(template_text, specials)
    except ValueError as error:
        raise ModelError(f"model {model_path}: {error}") from None
    reference = reference_encoder(tokenizer)
    probes = (*_PROBES, *("".join(specials.values()) + probe for probe in _PROBES[:2]))
    return ModelTokenizer(
        model_path,
        tokenizer,
        template=template,
        end_ids=_end_ids(directory, tokenizer, specials.get("eos_token")),
        encode=fast_encoder(file, reference, probes) or reference,
    )


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


def _token_text(value: Any) -> str:
    """A special token in tokenizer_config.json: its text, or an object with it."""
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _template_text(override: str | None, directory: Path, config: Mapping[str, Any]) -> str | None:
    if override is not None:
        try:
            return Path(override).read_text(encoding="utf-8")
        except OSError as error:
            raise ModelError(f"chat template {override}: {error.strerror}") from None
    beside = directory / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("default", next(iter(named.values()), None))
    return found


def _end_ids(directory: Path, tokenizer: Tokenizer, eos_token: str | None) -> list[int]:
    """End-of-sequence ids, the primary one first: config.json, generation_config.json, the tokenizer's own."""
    ids: list[int] = []
    for name in ("config.json", "generation_config.json"):
        found = _json(directory / name).get("eos_token_id")
        ids += found if isinstance(found, list) else [] if found is None else [found]
    own = tokenizer.token_to_id(eos_token) if eos_token else None
    if own is not None:
        ids.append(own)
    return list(dict.fromkeys(ids))
