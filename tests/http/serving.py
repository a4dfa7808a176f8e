"""A service that answers on a real port, with simulated ranks behind it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop
from scripted import MODEL

from smg.http.front import FrontOptions
from smg.http.service import Service, ServiceOptions
from smg.mock import Simulator

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
STREAM = BODY | {"stream": True}


def wait_until(condition, seconds=5.0):
    """Poll for what has no event to wait for; fails loudly."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of every event, JSON decoded, but for [DONE]."""
        lines = [line[6:] for line in self.body.split(b"\n\n") if line.startswith(b"data: ")]
        return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


class Served:
    """A `Service` on an event loop in a thread of its own, and the simulator of its ranks."""

    def __init__(self, directory: Path, options: dict[str, Any], ranks: int, mock: dict[str, Any] | None) -> None:
        self.loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._up: concurrent.futures.Future[Service] = concurrent.futures.Future()
        url = f"ipc://{directory}/g"
        front = FrontOptions(**{"served_model_name": "demo", **options.pop("front", {})})
        self._options = ServiceOptions(
            **{
                "worker_urls": [url],
                "backend": "tokenspeed",
                "model_path": str(MODEL),
                "ranks": ranks,
                "handshake_address": "tcp://127.0.0.1:0",
                "port": 0,
                "prometheus_port": 0,
                "front": front,
                **options,
            }
        )
        self.drained: concurrent.futures.Future[None] | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.service = self._up.result(10)
        self.group = self.service.groups[0]
        self.front = self.service.front
        self.mock: Simulator | None = None
        if mock is not None:
            self.mock = Simulator(
                url,
                ranks=ranks,
                handshake_address=self.group.handshake_address,
                **{"step_ms": 1.0, "record": True, "no_sentinel": True, "model_path": str(MODEL), **mock},
            )
            self.mock.start()
            self.group.wait_ready(10)
        parts = urlsplit(self.service.url)
        self.host, self.port = parts.hostname, parts.port

    def _run(self) -> None:
        async def main() -> None:
            try:
                async with Service(self._options) as service:
                    self._up.set_result(service)
                    await self._stop.wait()
            except BaseException as exc:
                if self._up.done():
                    raise
                self._up.set_exception(exc)

        self.loop.run_until_complete(main())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def on_loop(self, make: Callable[[], Any], timeout: float = 10) -> Any:
        """Run `make()` on the service's loop, a coroutine to its end, and return its result."""

        async def call() -> Any:
            found = make()
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(timeout)

    def close(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)
        if self.mock is not None:
            self.mock.close()
        assert not self._thread.is_alive()

    # ---------------------------------------------------------- asking

    def ask(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> Answer:
        """One request on a connection of its own. A `body` that is not bytes is sent as JSON."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=20)
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, body, headers or {})
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def chat(self, content: str = "Hello", **fields: Any) -> Answer:
        headers = fields.pop("headers", None)
        return self.ask(CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}, headers)

    def text(self, prompt: Any = "Hello", **fields: Any) -> Answer:
        return self.ask(TEXT, {"prompt": prompt, "max_tokens": 8, **fields})

    def metrics(self) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.service.metrics_port, timeout=20)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def dial(self, tls: ssl.SSLContext | None = None, window: int = 0) -> Raw:
        """A bare connection. `window`: receive no more than about so many bytes before they are read."""
        plain = socket.socket()
        if window:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        plain.settimeout(20)
        plain.connect((self.host, self.port))
        return Raw(tls.wrap_socket(plain, server_hostname=self.host) if tls else plain)


@dataclass
class Raw:
    """A bare connection, for what a client library would not send."""

    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)

    def post(self, path: str, body: Any, *headers: str, version: str = "1.1") -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(raw)}", *headers]
        self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def until(self, mark: bytes, count: int = 1) -> bytes:
        """Receive until `mark` has come `count` times; everything received so far."""
        while self.received.count(mark) < count:
            data = self.socket.recv(1 << 16)
            if not data:
                raise AssertionError(f"the connection ended before {mark!r}: {bytes(self.received)!r}")
            self.received += data
        return bytes(self.received)

    def rest(self) -> bytes:
        """Receive until the other side closes."""
        try:
            while data := self.socket.recv(1 << 16):
                self.received += data
        except ConnectionResetError:
            pass
        return bytes(self.received)

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
