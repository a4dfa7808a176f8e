"""A plain, complete POST, recognised ahead of aiohttp's parser: most of what a short request costs is that parser.

Recognised is only what needs no interpretation: HTTP/1.1, a path that is asked for, well-formed headers none of which
changes how a message is framed, coded or answered, one Content-Length, and the whole body in the same read. Anything
else is aiohttp's, with the connection it came on.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

from aiohttp import HttpVersion11

LONGEST_HEAD = 8192  # bytes

_head = re.compile(
    rb"POST (/[A-Za-z0-9/_.-]*) HTTP/1\.1\r\n"
    rb"((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[ \t]*[\x20-\x7e\t]*\r\n){1,64})\r\n"
).match
_framing = frozenset(
    (
        "connection", "content-encoding", "expect", "http2-settings", "keep-alive", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    )
)  # fmt: skip
_USUAL = ("connection", "keep-alive")  # what HTTP/1.1 does anyway, and what many clients say


class Headers(dict[str, str]):
    """Header values by lower-case name; asked for in any case."""

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)


class PlainRequest:
    """What the front asks of aiohttp's request, of a request that was read whole."""

    __slots__ = ("body", "headers", "path", "protocol")

    method = "POST"
    version = HttpVersion11
    keep_alive = True

    def __init__(self, path: str, headers: Headers, body: bytes, protocol: Any) -> None:
        self.path, self.headers, self.body, self.protocol = path, headers, body, protocol

    @property
    def transport(self) -> Any:
        return self.protocol.transport

    @property
    def content(self) -> PlainRequest:
        return self

    def is_eof(self) -> bool:
        return True


def recognise(data: bytes, paths: Container[str], longest_body: int, protocol: Any) -> PlainRequest | None:
    """The request in `data`, if it is a plain one for one of `paths` and nothing else is in there."""
    found = _head(data, 0, LONGEST_HEAD)
    if found is None:
        return None
    path = found[1].decode("ascii")
    size = len(data) - found.end()
    if path not in paths or size > longest_body:
        return None
    headers = Headers()
    for line in found[2].decode("ascii").split("\r\n")[:-1]:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        if name in headers or (name in _framing and (name, value.lower()) != _USUAL):
            return None
        headers[name] = value
    if headers.get("content-length") != str(size) or "host" not in headers:
        return None
    return PlainRequest(path, headers, data[found.end() :], protocol)
