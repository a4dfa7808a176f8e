"""Chat templates: the jinja2 text a model ships with, and the conventions such texts rely on.

The sandbox is immutable, blocks are trimmed, and templates find `raise_exception`, `strftime_now`, a `tojson` that
does not escape for HTML, loop controls and a `generation` block, as transformers' `apply_chat_template` gives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from smg.errors import Error

MAX_RENDERED = 64 * 1024 * 1024  # characters; a template may loop over what the client sends


class TemplateError(Error):
    """The template refuses these messages, or fails on them. The message is its own."""


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; rendering passes its body through."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()


class ChatTemplate:
    """One compiled template. `special_tokens` (bos_token, eos_token, ...) are variables of every rendering.

    Raises ValueError when the text is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from None
        self.source = source
        self._variables = {**_ENVIRONMENT.globals, **(special_tokens or {})}
        # A template that looks at parts of a content wants them as they are; others want one text.
        self.wants_parts = (
            "content[" in source
            or "in message.content" in source
            or ("in message['content']" in source or 'in message["content"]' in source or "in content" in source)
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt's text. With `continue_final_message` it ends inside the last message.

        `variables` are the request's own (documents, enable_thinking, ...). Raises TemplateError.
        """
        shown = list(messages) if self.wants_parts else [flattened(message) for message in messages]
        final = _final_text(shown) if continue_final_message else ""
        try:
            text = self._run(
                {
                    **self._variables,
                    **variables,
                    "messages": shown,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt and not continue_final_message,
                }
            )
        except TemplateError:
            raise
        except jinja2.TemplateError as error:
            raise TemplateError(f"chat template: {error.message or type(error).__name__}") from None
        except Exception as error:  # whatever an expression of the template ran into
            raise TemplateError(f"chat template: {type(error).__name__}: {error}") from None
        if len(text) > MAX_RENDERED:
            raise TemplateError(f"the chat template rendered more than {MAX_RENDERED} characters")
        return _cut_after(text, final) if continue_final_message else text

    def _run(self, variables: dict[str, Any]) -> str:
        """`Template.render`, without what it does anew for every rendering: half its time for a short chat."""
        template = self._template
        context = Context(_ENVIRONMENT, variables, template.name, template.blocks)
        return "".join(template.root_render_func(context))


def flattened(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its text parts joined, for templates that expect one string."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise TemplateError(f"content part of type {kind!r}: this model takes text only")
    return {**message, "content": "\n".join(texts)}


def _final_text(messages: Sequence[Mapping[str, Any]]) -> str:
    content = flattened(messages[-1]).get("content") if messages else None
    if not isinstance(content, str) or not content.strip():
        raise TemplateError("continue_final_message: the last message has no text to continue")
    return content


def _cut_after(text: str, final: str) -> str:
    """`text` up to the end of its last message's own text; templates may have trimmed that."""
    at = text.rfind(final)
    if at >= 0:
        return text[: at + len(final)]
    stripped = final.strip()
    at = text.rfind(stripped)
    if at < 0:
        raise TemplateError("continue_final_message: the template changes the last message's text")
    return text[: at + len(stripped)]
