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
_lines = re.compile(r"([^:]+):[ \t]*([^\r]*)\r\n").findall
_framing = frozenset(
    (
        "connection", "content-encoding", "expect", "http2-settings", "keep-alive", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    )
)  # fmt: skip


class PlainRequest:
    """What the front asks of aiohttp's request, of a request that was read whole. Headers have lower-case names."""

    __slots__ = ("body", "headers", "path", "protocol")

    method = "POST"
    version = HttpVersion11
    keep_alive = True

    def __init__(self, path: str, headers: dict[str, str], body: bytes, protocol: Any) -> None:
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
    lines = _lines(found[2].decode("ascii"))
    headers = {name.lower(): value.rstrip(" \t") for name, value in lines}
    if len(headers) != len(lines) or headers.get("content-length") != str(size) or "host" not in headers:
        return None
    # Many clients say that they keep the connection, which HTTP/1.1 does anyway.
    if not _framing.isdisjoint(headers) and (
        headers.get("connection", "").lower() != "keep-alive" or len(_framing.intersection(headers)) > 1
    ):
        return None
    return PlainRequest(path, headers, data[found.end() :], protocol)
