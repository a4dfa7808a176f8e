"""Refusals and failures as HTTP clients see them: a status and an OpenAI-shaped body."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from smg import errors
from smg.http.templates import TemplateError

MAX_SHOWN = 500  # characters of a message that quotes what the client sent

_encode = msgspec.json.Encoder().encode

#: `SamplingParams` and `submit` field -> the request field that sets it, where the names differ
PARAM_NAMES = {
    "prompt_token_ids": "prompt",
    "deadline": "timeout",
    "json_schema": "response_format",
}


class ApiError(Exception):
    """A request is answered with `status` and this. `code` is for programs, `param` the field at fault."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        type: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param, self.type = status, code, message, param, type
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        return _encode({"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}})

    def event(self) -> bytes:
        """The same as one line for a stream that has already begun."""
        return self.body()


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 about one field."""
    return ApiError(400, code, message, param=param)


def unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, "unsupported_parameter", message, param=param)


def unavailable(code: str, message: str, retry_after: int = 1) -> ApiError:
    return ApiError(503, code, message, type="service_unavailable", headers={"Retry-After": str(retry_after)})


def _from_message(message: str) -> tuple[str | None, str]:
    """msgspec's "Expected `float` <= 2.0 - at `$.temperature`" as (field, sentence)."""
    found = re.fullmatch(r"(.*?)(?: - at (?:`key` in )?`\$(.*)`)?", message, re.DOTALL)
    what, path = (found[1], found[2]) if found else (message, None)
    param = path.lstrip(".") if path else None
    missing = re.search(r"missing required field `(.+?)`", what)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
    sentence = what.replace("Object missing", "missing").replace("`", "'")
    return param, f"{param}: {sentence}" if param else sentence


def describe(exc: BaseException) -> ApiError:
    """What a client is told about `exc`. What is not foreseen is a 500 that gives no details away."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, msgspec.ValidationError):
        param, message = _from_message(str(exc))
        return ApiError(400, "invalid_value", message[:MAX_SHOWN], param=param)
    if isinstance(exc, msgspec.DecodeError | UnicodeDecodeError):
        return ApiError(400, "json_parse_error", f"the body is not valid JSON: {exc}"[:MAX_SHOWN])
    if isinstance(exc, RecursionError):
        return ApiError(400, "json_too_deep", "the body nests too deep")
    if isinstance(exc, errors.InvalidRequest):
        return ApiError(400, "invalid_value", str(exc), param=PARAM_NAMES.get(exc.field, exc.field))
    if isinstance(exc, TemplateError):
        return ApiError(400, "chat_template_error", str(exc)[:MAX_SHOWN], param="messages")
    if isinstance(exc, errors.InvalidRank):
        return ApiError(400, "invalid_rank", str(exc), param="rank")
    if isinstance(exc, errors.Overloaded):
        return ApiError(429, "engine_overloaded", str(exc), type="rate_limit_error", headers={"Retry-After": "1"})
    if isinstance(exc, errors.NoRank):
        return unavailable("no_available_workers", str(exc), retry_after=5)
    if isinstance(exc, errors.RankDied):
        return unavailable("rank_died", str(exc))
    if isinstance(exc, errors.Closed):
        return unavailable("shutting_down", str(exc), retry_after=5)
    if isinstance(exc, errors.UtilityTimeout):
        return ApiError(504, "utility_timeout", str(exc), type="timeout_error")
    if isinstance(exc, errors.DeadlineExceeded):
        return ApiError(504, "deadline_exceeded", str(exc), type="timeout_error")
    if isinstance(exc, errors.Error):
        return ApiError(500, "engine_error", str(exc), type="internal_error")
    return ApiError(500, "internal_error", "the server failed; its log has the details", type="internal_error")
