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

# Goes after the text that is to be continued, so that the prompt can be cut there. The space shows whether the
# template trims what it is given.
_SEAM = "CONTINUE-THE-FINAL-MESSAGE-HERE "


class TemplateError(Error):
    """The template refuses these messages, or fails on them. The message is its own."""


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
        self._variables = {**_ENVIRONMENT.globals, "documents": None, **(special_tokens or {})}
        tree = _ENVIRONMENT.parse(source)
        self.wants_parts = _loops_over_content(tree)
        # One that never asks whether a content is a string takes nothing but parts.
        self._only_parts = self.wants_parts and all(test.name != "string" for test in tree.find_all(nodes.Test))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,  # so that the request's own variables may have any name
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt's text. With `continue_final_message` it ends inside the last message.

        Text parts of a content are joined by newlines, unless the template itself goes through them. Arguments of
        tool calls, JSON in a string in OpenAI's API, are what that JSON says. `variables` are the request's own
        (documents, enable_thinking, ...). Raises TemplateError.
        """
        shown = [self._readied(message) for message in messages]
        if continue_final_message:
            shown[-1:] = [_with_seam(message) for message in shown[-1:]]
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
        return _cut_at_seam(text) if continue_final_message else text

    def _run(self, variables: dict[str, Any]) -> str:
        """`Template.render`, without what it does anew for every rendering: half its time for a short chat."""
        template = self._template
        context = Context(_ENVIRONMENT, variables, template.name, template.blocks)
        return "".join(template.root_render_func(context))

    def _readied(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message as the template expects it; itself where nothing is to be done."""
        content = message.get("content")
        if isinstance(content, list):
            texts = [_part_text(part) for part in content]
            parts = [{"type": "text", "text": text} for text in texts]
            message = {**message, "content": parts if self.wants_parts else "\n".join(texts)}
        elif self._only_parts and isinstance(content, str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message = {**message, "tool_calls": [_with_arguments(call) for call in calls]}
        return message


def _part_text(part: Any) -> str:
    text = part
    if isinstance(part, Mapping):
        text = part.get("text", part.get("refusal"))
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise TemplateError(f"content part of type {kind!r}: this model takes text only")
    return text


def _with_arguments(call: Any) -> Any:
    """A tool call with its arguments as an object; as it is when they are no JSON object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _with_seam(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if isinstance(content, list) and content:
        *parts, last = content
        return {**message, "content": [*parts, {**last, "text": last["text"] + _SEAM}]}
    if not isinstance(content, str) or not content.strip():
        raise TemplateError("continue_final_message: the last message has no text to continue")
    return {**message, "content": content + _SEAM}


def _cut_at_seam(text: str) -> str:
    """`text` up to the end of its last message's own text, trimmed if the template trims."""
    at = text.rfind(_SEAM)
    if at >= 0:
        return text[:at]
    at = text.rfind(_SEAM.rstrip())
    if at < 0:
        raise TemplateError("continue_final_message: the template leaves the last message's text out or changes it")
    return text[:at].rstrip()


def _loops_over_content(tree: nodes.Template) -> bool:
    """Does it go through a message's content part by part? Others want one string, which parts would break."""
    names = {"content"}  # variables that hold a content; by this name also as a macro's parameter

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Filter):
            return node.node is not None and is_content(node.node)
        if isinstance(node, nodes.CondExpr):
            return is_content(node.expr1) or (node.expr2 is not None and is_content(node.expr2))
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        return isinstance(node, nodes.Name) and node.name in names

    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and is_content(assignment.node):
            names.add(assignment.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


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
