"""One HTTP request and its answer, written as bytes on the connection that aiohttp reads."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion11, web

from smg.http.errors import ApiError
from smg.http.plain import PlainRequest
from smg.http.render import new_id

REQUEST_ID_HEADERS = ("X-Request-Id", "X-Correlation-Id", "X-Trace-Id", "Request-Id")

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_usable_id = re.compile(r"[\x21-\x7e]{1,256}").fullmatch


class Sent(web.StreamResponse):
    """Tells aiohttp that the response is on the wire already, and whether the connection goes on."""

    def __init__(self, keep_alive: bool) -> None:
        super().__init__()
        self._keep_alive = keep_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


_SENT = {True: Sent(True), False: Sent(False)}


class Date:
    """The `Date` header's line, made once a second."""

    def __init__(self) -> None:
        self._second, self._line = 0, b""

    def line(self) -> bytes:
        now = int(time.time())
        if now != self._second:
            self._second, self._line = now, b"Date: %b\r\n" % formatdate(now, usegmt=True).encode()
        return self._line


_date = Date()


class Exchange:
    """A request, and the one place that renders heads and writes whole answers.

    `extra` are header lines every answer to this request carries. `status` and `code` are what was answered.
    """

    __slots__ = (
        "arrived", "code", "extra", "given", "http11", "keep_alive", "path", "request", "request_id", "status",
    )  # fmt: skip

    def __init__(self, request: web.BaseRequest | PlainRequest, path: str, extra: bytes = b"") -> None:
        self.request, self.path, self.extra = request, path, extra
        self.arrived = time.monotonic()
        self.http11 = request.version >= HttpVersion11
        self.keep_alive = request.keep_alive
        self.status, self.code = 0, ""
        self.request_id, self.given = "", False

    def identify(self, prefix: str, names: tuple[str, ...]) -> None:
        """Take the request's id from one of those headers (lower case), or make one. Answers echo it."""
        headers = self.request.headers
        for name in names:
            given = headers.get(name)
            if given is not None and _usable_id(given):
                self.request_id, self.given = given, True
                break
        else:
            self.request_id, self.given = new_id(prefix), False
        self.extra += b"X-Request-Id: %b\r\n" % self.request_id.encode()

    def answer_id(self) -> str:
        """The id of what is answered: the request's own, made unique where a client chose it."""
        return new_id(self.request_id + "-") if self.given else self.request_id

    def head(self, status: int, content_type: bytes, framing: bytes, more: bytes = b"") -> bytes:
        """Status line and headers. `framing`: a Content-Length or Transfer-Encoding line, or nothing."""
        self.status = status
        if self.keep_alive:
            connection = b"" if self.http11 else b"Connection: keep-alive\r\n"
        else:
            connection = b"Connection: close\r\n" if self.http11 else b""
        return b"HTTP/1.%d %d %b\r\nContent-Type: %b\r\n%b%b%b%b%b\r\n" % (
            1 if self.http11 else 0,
            status,
            _REASONS.get(status, b"Unknown"),
            content_type,
            framing,
            _date.line(),
            connection,
            self.extra,
            more,
        )

    def stream_head(self, more: bytes = b"") -> bytes:
        """The head of an event stream: chunked for HTTP/1.1, else ended by the end of the connection."""
        framing = b"Transfer-Encoding: chunked\r\n"
        if not self.http11:
            self.keep_alive, framing = False, b""
        return self.head(
            200,
            b"text/event-stream; charset=utf-8",
            framing,
            b"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n" + more,
        )

    def sent(self) -> Sent:
        return _SENT[bool(self.keep_alive)]

    def answer(
        self,
        body: bytes,
        status: int = 200,
        content_type: bytes = b"application/json",
        more: bytes = b"",
    ) -> Sent:
        """Write a whole answer."""
        head = self.head(status, content_type, b"Content-Length: %d\r\n" % len(body), more)
        transport: Any = self.request.transport
        if transport is not None:
            transport.write(head + body if self.request.method != "HEAD" else head)
        return self.sent()

    def refuse(self, error: ApiError) -> Sent:
        """Write an error."""
        self.code = error.code
        if not self.request.content.is_eof():
            self.keep_alive = False  # what is left of the body is not waited for
        return self.answer(error.body(), error.status, more=header_lines(error))


def header_lines(error: ApiError) -> bytes:
    headers: Mapping[str, str] = {"X-SMG-Error-Code": error.code, **error.headers}
    return b"".join(b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in headers.items())
