"""A front that listens: groups, model, HTTP and metrics ports, from start to drained stop."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field

from smg.engine.group import EngineGroup
from smg.errors import AddressError
from smg.http import tokenizer
from smg.http.app import App, MetricsApp
from smg.http.errors import unavailable
from smg.http.exchange import REQUEST_ID_HEADERS
from smg.http.front import ENDPOINTS, Front, FrontOptions
from smg.http.metrics import Metrics
from smg.http.server import ConnectionLimits, Server, listen, tls_context
from smg.protocol.vllm import Model
from smg.routing.router import Router

log = logging.getLogger(__name__)

LAST_WORDS = 2.0  # seconds for the error events of what a stop cuts off


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Where to listen and what to serve. Ports may be 0: the system then gives one."""

    worker_urls: Sequence[str]
    backend: str
    model_path: str
    ranks: int = 1
    min_ready: int | None = None
    handshake_address: str | None = None
    max_inflight: int | None = None
    stall_timeout: float = 60.0
    log_request_ids: bool = False
    max_logprobs: int = 20
    structured_backend: str = "xgrammar"
    policy: str = "least_load"
    tokenizer_path: str | None = None
    chat_template: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    prometheus_host: str = "127.0.0.1"
    prometheus_port: int = 29000
    tls_cert_path: str | None = None
    tls_key_path: str | None = None
    api_keys: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    request_id_headers: Sequence[str] = REQUEST_ID_HEADERS
    connection: ConnectionLimits = field(default_factory=ConnectionLimits)
    front: FrontOptions = field(default_factory=FrontOptions)


class Service:
    """`async with Service(options) as service:` answers on `service.url`, metrics on `service.metrics_url`.

    Leaving the block stops at once; `drain` first, to let what runs come to its end. Raises AddressError when
    a port, a file or a worker's socket directory cannot be used.
    """

    def __init__(self, options: ServiceOptions) -> None:
        self.options = options
        self.groups: list[EngineGroup] = []
        self._servers: list[Server] = []
        self._listeners: list[asyncio.AbstractServer] = []

    async def __aenter__(self) -> Service:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stop()

    async def _start(self) -> None:
        options = self.options
        tls: ssl.SSLContext | None = None
        if options.tls_cert_path is not None:
            tls = tls_context(options.tls_cert_path, options.tls_key_path)
        model = tokenizer.load(options.model_path, options.tokenizer_path, options.chat_template)
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)  # glibc keeps what it took to read the model
        if len(options.worker_urls) > 1 and options.handshake_address is not None:
            raise AddressError("one handshake address cannot serve several worker URLs; let it be derived")
        for url in options.worker_urls:
            self.groups.append(
                EngineGroup(
                    url,
                    backend=options.backend,
                    ranks=options.ranks,
                    min_ready=options.min_ready,
                    handshake_address=options.handshake_address,
                    max_inflight=options.max_inflight,
                    stall_timeout=options.stall_timeout,
                    log_request_ids=options.log_request_ids,
                    model=self._engine_model(model),
                )
            )
        self.front = Front(Router(self.groups, options.policy), model, options.front)
        self.front.open()
        app = App(
            self.front,
            api_keys=options.api_keys,
            cors_origins=options.cors_origins,
            request_id_headers=options.request_id_headers,
            limits=options.connection,
        )
        server = Server(app.handle, options.connection, ENDPOINTS.keys())
        self.port = await self._listen(server, options.host, options.port, tls)
        self.url = f"{'http' if tls is None else 'https'}://{_spelled(options.host)}:{self.port}"
        metrics = Server(MetricsApp(Metrics(self.front, server)).handle, options.connection)
        self.metrics_port = await self._listen(metrics, options.prometheus_host, options.prometheus_port)
        self.metrics_url = f"http://{_spelled(options.prometheus_host)}:{self.metrics_port}/metrics"

    def _engine_model(self, model: tokenizer.ModelTokenizer) -> Model | None:
        """What vLLM's engines leave to their frontend to know."""
        if self.options.backend != "vllm":
            return None
        return Model(
            eos_token_ids=tuple(model.end_ids),
            vocab_size=model.vocab_size,
            max_logprobs=self.options.max_logprobs,
            structured_backend=self.options.structured_backend,
        )

    async def _listen(self, server: Server, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        listener, bound = await listen(server, host, port, tls)
        self._servers.append(server)
        self._listeners.append(listener)
        return bound

    async def drain(self, grace: float, hurry: asyncio.Event | None = None) -> None:
        """Take nothing new, wait up to `grace` seconds (or until `hurry`), end what is left with an error."""
        front = self.front
        front.draining = True
        waits: list[asyncio.Future[object]] = [asyncio.ensure_future(front.admission.idle())]
        if hurry is not None:
            waits.append(asyncio.ensure_future(hurry.wait()))
        await asyncio.wait(waits, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        if front.admission.active:
            log.warning("%d requests were cut off by the shutdown", front.admission.active)
            front.end_all(unavailable("shutting_down", "the server shut down before the request was complete", 5))
            await asyncio.wait(waits[:1], timeout=LAST_WORDS)
        for wait in waits:
            wait.cancel()

    async def _stop(self) -> None:
        for listener in self._listeners:
            listener.close()
        for server in self._servers:
            server.pre_shutdown()
        if hasattr(self, "front"):
            self.front.close()
        for server in self._servers:
            await server.shutdown(LAST_WORDS)
        for group in self.groups:
            await group.aclose()


def _spelled(host: str) -> str:
    return f"[{host}]" if ":" in host else host
