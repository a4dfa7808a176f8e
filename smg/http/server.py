"""The listening side: aiohttp's parser and connections, with limits on how long a client may take to ask."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from smg._sse import Wire
from smg.errors import AddressError
from smg.http.errors import ApiError
from smg.http.plain import PlainRequest, recognise

BACKLOG = 4096
LINGER = 2.0  # seconds that the rest of a refused body is read, so that the client sees the refusal
HELD_BYTES = 1 << 18  # of early next requests, before the client is read no further
Handler = Callable[[Any], Awaitable[web.StreamResponse]]  # of a web.BaseRequest or PlainRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of one connection. Times in seconds."""

    body_bytes: int = 64 << 20
    header_lines: int = 100
    header_bytes: int = 16 << 10  # of one line
    header_timeout: float = 30.0  # for a new connection's first request head
    body_timeout: float = 60.0  # for a request's body
    idle_timeout: float = 90.0  # between two requests


class Connection(web.RequestHandler):
    """A client's connection. It tells the stream that is written to it when its buffer is full."""

    def __init__(self, manager: Server, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self.wire: Wire | None = None
        self._server = manager
        self._late: asyncio.TimerHandle | None = None
        self._parsed = not manager.plain_paths  # aiohttp has got this connection
        self._plain: asyncio.Task[None] | None = None  # answers a request that aiohttp has not seen
        self._held = b""  # what came meanwhile

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._server.open_connections += 1
        self._late = asyncio.get_running_loop().call_later(self._server.limits.header_timeout, transport.close)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.open_connections -= 1
        self.head_received()
        if self.wire is not None:
            self.wire.leave()
        if self._plain is not None:
            self._plain.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._parsed:
            super().data_received(data)
        elif self._plain is not None:
            self._held += data
            if len(self._held) > HELD_BYTES:
                self.transport.pause_reading()  # type: ignore[union-attr]
        else:
            request = recognise(data, self._server.plain_paths, self._server.limits.body_bytes, self)
            if request is None:
                self._parsed = True
                super().data_received(data)
            else:
                self.head_received()
                self.keep_alive(True)  # stops aiohttp's own clock, which knows nothing of this request
                self._plain = self._server.loop.create_task(self._answer(request))

    async def _answer(self, request: PlainRequest) -> None:
        try:
            response = await self._server.answer(request)
            transport = self.transport
            if transport is None:
                return
            if not response.keep_alive:
                transport.close()
                return
            self._late = self._server.loop.call_later(self._server.limits.idle_timeout, transport.close)
        finally:
            self._plain = None
        if self._held:
            held, self._held = self._held, b""
            transport.resume_reading()
            self.data_received(held)

    def head_received(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.wire is not None:
            self.wire.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.wire is not None:
            self.wire.resume()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp itself refuses: not HTTP, or a head beyond the limits."""
        if status == 500:
            self.log_exception("Error handling request", exc_info=exc)
        code = "bad_http_request" if status < 500 else "internal_error"
        error = ApiError(status, code, (message or "the request could not be handled").splitlines()[0][:200])
        response = web.Response(status=status, body=error.body(), content_type="application/json")
        response.force_close()
        return response


class Server(web.Server):
    """Makes a `Connection` for every client. A handler is cancelled when its client leaves."""

    def __init__(self, handler: Handler, limits: ConnectionLimits, plain_paths: Container[str] = ()) -> None:
        super().__init__(
            handler,
            request_factory=self._request,
            handler_cancellation=True,
            keepalive_timeout=limits.idle_timeout,
            access_log=None,
            lingering_time=LINGER,
            max_line_size=limits.header_bytes,
            max_field_size=limits.header_bytes,
            max_headers=limits.header_lines,
        )
        self.answer = handler
        self.limits = limits
        self.plain_paths = plain_paths  # plain requests to these need not be parsed by aiohttp
        self.loop = asyncio.get_running_loop()
        self.open_connections = 0

    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)

    def _request(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: asyncio.Task[None]
    ) -> web.BaseRequest:
        protocol.head_received()
        return web.BaseRequest(
            message, payload, protocol, writer, task, self._loop, client_max_size=self.limits.body_bytes
        )


async def read_body(request: web.BaseRequest | PlainRequest, timeout: float) -> bytes:
    """The whole body. Raises ApiError when it is too long, or not there in time."""
    expected = request.headers.get("expect")
    if expected is not None:
        if expected.lower() != "100-continue":
            raise ApiError(417, "expectation_failed", "Expect: only 100-continue is known")
        if request.version >= (1, 1) and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if isinstance(request, PlainRequest):
        return request.body
    limit = request.client_max_size
    if (request.content_length or 0) > limit:
        raise _too_long(limit)
    reading = _parts_of(request.content, limit)
    try:
        body = await (reading if request.content.is_eof() else asyncio.wait_for(reading, timeout))
        if body is None:
            raise _too_long(limit)
        return body
    except (asyncio.TimeoutError, TimeoutError):
        raise ApiError(408, "body_timeout", f"the body was not complete within {timeout:g} s") from None
    except web.RequestPayloadError as exc:
        raise ApiError(400, "bad_http_request", f"the body cannot be read: {exc}") from None
    except ConnectionError:
        raise ApiError(499, "client_closed", "the client left before its body was complete") from None


def _too_long(limit: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the body is longer than {limit} bytes")


async def _parts_of(content: Any, limit: int) -> bytes | None:
    """A body, copied once where `request.read()` copies three times; None when it is too long."""
    parts, size = [], 0
    while part := await content.readany():
        size += len(part)
        if size > limit:
            return None
        parts.append(part)
    return b"".join(parts)


async def listen(server: Server, host: str, port: int, tls: ssl.SSLContext | None = None) -> tuple[asyncio.Server, int]:
    """Start to accept connections; returns the listener and its port. Raises AddressError."""
    loop = asyncio.get_running_loop()
    try:
        listener = await loop.create_server(server, host, port, backlog=BACKLOG, ssl=tls, reuse_address=True)
    except (OSError, OverflowError, socket.gaierror) as exc:
        raise AddressError(f"cannot listen on {host}:{port}: {exc}") from exc
    return listener, int(listener.sockets[0].getsockname()[1])


def tls_context(cert_path: str, key_path: str | None) -> ssl.SSLContext:
    """A server's TLS settings. Raises AddressError when the files cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert_path, key_path)
    except (OSError, ssl.SSLError) as exc:
        raise AddressError(f"cannot load the TLS certificate {cert_path} with key {key_path}: {exc}") from exc
    return context
