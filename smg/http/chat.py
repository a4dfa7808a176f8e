"""`/v1/chat/completions`: messages to a prompt, and the answer as OpenAI clients read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smg._sse import Choice, escape
from smg.http.errors import ApiError, invalid, unsupported
from smg.http.job import Job, candidates, decoding, sampled_candidate
from smg.http.render import Timings, chat_logprobs, matched_json, response_usage, usage_json
from smg.http.requests import ChatRequest, Limits

if TYPE_CHECKING:
    from smg.http.tokenizer import ModelTokenizer

MAX_CHOICES = 10

#: variables of a template that the request's own fields set
OWN_VARIABLES = frozenset(("messages", "tools", "add_generation_prompt", "continue_final_message"))


def chat_job(request: ChatRequest, model: ModelTokenizer, limits: Limits, backend: str) -> Job:
    """Check what spans several fields, render the chat template, tokenize."""
    n = request.n or 1
    if n > min(MAX_CHOICES, limits.choices):
        raise invalid("n", f"n={n}: must be 1..{min(MAX_CHOICES, limits.choices)}")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "stream_options is only allowed with stream: true")
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs requires logprobs: true")
    check_messages(request.messages)
    tools = offered_tools(request)
    continues = bool(request.continue_final_message)
    if continues and request.messages[-1].get("role") != "assistant":
        raise invalid("continue_final_message", "continue_final_message: the last message must be the assistant's")
    if continues and request.add_generation_prompt:
        raise invalid("add_generation_prompt", "add_generation_prompt and continue_final_message exclude each other")
    variables = dict(request.chat_template_kwargs or {})
    for name in OWN_VARIABLES.intersection(variables):
        where = f"chat_template_kwargs.{name}"
        raise invalid(where, f"{where}: is set by the request's field {name}")
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    if request.documents is not None:
        variables.setdefault("documents", request.documents)
    text = model.render_chat(
        request.messages,
        tools=tools,
        add_generation_prompt=not continues and request.add_generation_prompt is not False,
        continue_final_message=continues,
        **variables,
    )
    options = request.stream_options
    return Job(
        prompts=[model.encode(text, add_special_tokens=False)],
        decodings=[
            decoding(
                request,
                model,
                limits,
                backend,
                max_tokens=request.max_completion_tokens or request.max_tokens,
                min_tokens=request.min_tokens,
                logprobs=candidates(request.top_logprobs or 0, backend) if request.logprobs else None,
            )
        ],
        n=n,
        model=request.model or "",
        rid=request.rid,
        priority=request.priority or 0,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        logprobs=bool(request.logprobs),
        sampled_candidate=sampled_candidate(request.top_logprobs, backend),
        continues_prompt=continues,
    )


def check_messages(messages: list[dict[str, Any]]) -> None:
    for i, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise invalid(f"messages[{i}].role", f"messages[{i}].role: must be a non-empty string")
        content = message.get("content")
        if isinstance(content, list):
            _check_parts(i, content)
        elif content is not None and not isinstance(content, str):
            raise invalid(f"messages[{i}].content", f"messages[{i}].content: must be a string or a list of parts")
        if role == "user" and not content:
            raise invalid(f"messages[{i}].content", f"messages[{i}].content: a user message must not be empty")


def _check_parts(i: int, parts: list[Any]) -> None:
    for j, part in enumerate(parts):
        where = f"messages[{i}].content[{j}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise invalid(where, f"{where}: must be an object with a type")
        if part["type"] not in ("text", "input_text", "output_text", "refusal"):
            raise unsupported(where, f"{where}: parts of type '{part['type'][:40]}' do not go over this wire")
        if not isinstance(part.get("text", part.get("refusal")), str):
            raise invalid(where, f"{where}.text: must be a string")


def offered_tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """Tools for the template, which sees them when the model is to call none: nothing here parses calls."""
    field, choice_field = "tools", "tool_choice"
    tools, choice = request.tools, request.tool_choice
    if tools is None and choice is None:  # as clients wrote it before there were tools
        field, choice_field = "functions", "function_call"
        tools = [{"type": "function", "function": function} for function in request.functions or ()]
        choice = request.function_call
        if isinstance(choice, dict):
            choice = {"type": "function", "function": choice}
    if not tools:
        if choice not in (None, "none"):
            raise invalid(choice_field, f"{choice_field} requires {field}")
        return None
    if isinstance(choice, dict):
        wanted = (choice.get("function") or {}).get("name") if choice.get("type") == "function" else None
        if not isinstance(wanted, str) or not wanted:
            raise invalid(choice_field, f"{choice_field}: the function's name is missing")
        names = [(tool.get("function") or {}).get("name") for tool in tools]
        if wanted not in names:
            raise invalid(choice_field, f"{choice_field}: function '{wanted}' not found in '{field}'")
    elif choice not in (None, "none", "auto", "required"):
        raise invalid(choice_field, f"{choice_field}: must be none, auto, required or a function")
    if choice != "none":
        raise unsupported(field, f"{field} is only supported with {choice_field}: none; calls are not parsed")
    return tools


class ChatShape:
    """Renders one chat completion. `id`, `created` and the model's name are the same in every part."""

    content_type = b"text/event-stream"

    def __init__(self, job: Job, id: str, created: int, model: ModelTokenizer, timings: Timings | None) -> None:
        self._job, self._model, self._timings = job, model, timings
        self._stamp = b'","created":%d,"model":"%b","choices":[' % (created, escape(job.model))
        self._id = b'{"id":"' + escape(id)
        self._chunk = self._id + b'","object":"chat.completion.chunk' + self._stamp
        self._tail = b'],"usage":null}' if job.include_usage else b"]}"
        # Usage and logprobs in a part are not constant.
        self._constant = not job.logprobs and not job.continuous_usage

    def around_text(self, index: int) -> tuple[bytes | None, bytes | None]:
        """The constant parts of an event, before and after its text."""
        if not self._constant:
            return None, None
        before = b'data: %b{"index":%d,"delta":{"content":"' % (self._chunk, index)
        return before, b'"},"logprobs":null,"finish_reason":null}' + self._tail + b"\n\n"

    def first(self, choice: Choice) -> bytes:
        return b'%b{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}%b' % (
            self._chunk,
            choice.index,
            self._usage_tail(choice),
        )

    def part(self, choice: Choice, text: bytes, entries: list[Any] | None) -> bytes:
        return b'%b{"index":%d,"delta":{"content":"%b"},"logprobs":%b,"finish_reason":null}%b' % (
            self._chunk,
            choice.index,
            escape(text),
            self._logprobs(entries) if entries else b"null",
            self._usage_tail(choice),
        )

    def last(self, choice: Choice) -> bytes:
        return b'%b{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b"%b}%b' % (
            self._chunk,
            choice.index,
            (choice.finish_reason or "").encode(),
            matched_json(choice),
            self._usage_tail(choice),
        )

    def _logprobs(self, entries: list[Any]) -> bytes:
        return chat_logprobs(self._model.table, entries, self._job.sampled_candidate)

    def _usage_tail(self, choice: Choice) -> bytes:
        if not self._job.continuous_usage:
            return self._tail
        return b'],"usage":' + usage_json(choice.prompt_tokens, choice.completion_tokens) + b"}"

    def closing(self, choices: Sequence[Choice]) -> bytes | None:
        """The event after all choices have ended."""
        if not self._job.include_usage:
            return None
        return self._chunk + b'],"usage":' + response_usage(self._job, choices, self._timings) + b"}"

    def error(self, error: ApiError) -> bytes:
        return error.body()

    def body(self, choices: Sequence[Choice]) -> bytes:
        """The answer in one piece."""
        made = []
        for choice in choices:
            entries = choice.logprobs
            made.append(
                b'{"index":%d,"message":{"role":"assistant","content":"%b"},"logprobs":%b,"finish_reason":"%b"%b}'
                % (
                    choice.index,
                    escape(choice.whole_text),
                    b"null" if entries is None else self._logprobs(entries),
                    (choice.finish_reason or "").encode(),
                    matched_json(choice),
                )
            )
        return b'%b","object":"chat.completion%b%b],"usage":%b}' % (
            self._id,
            self._stamp,
            b",".join(made),
            response_usage(self._job, choices, self._timings),
        )
