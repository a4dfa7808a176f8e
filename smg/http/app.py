"""Routes: who may ask what, and what is answered."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from smg.errors import InvalidRequest
from smg.http import admin, info
from smg.http.errors import ApiError, describe
from smg.http.exchange import REQUEST_ID_HEADERS, Exchange
from smg.http.front import ENDPOINTS, Front, name_field
from smg.http.metrics import CONTENT_TYPE as METRICS_TYPE
from smg.http.metrics import Metrics
from smg.http.openapi import document
from smg.http.server import ConnectionLimits, read_body

log = logging.getLogger(__name__)

PUBLIC = {"/health", "/liveness", "/readiness", "/v1/models"}
CLIENT_CLOSED = 499  # counted for a client that left before its answer

Route = Callable[[Exchange], Awaitable[web.StreamResponse]]


class App:
    """Answers the HTTP requests of one listener for one front."""

    def __init__(
        self,
        front: Front,
        *,
        api_keys: Sequence[str] = (),
        cors_origins: Sequence[str] = (),
        request_id_headers: Sequence[str] = REQUEST_ID_HEADERS,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self.front = front
        self.limits = limits or ConnectionLimits()
        self._keys = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._origins = frozenset(cors_origins)
        self._id_headers = tuple(name.lower() for name in request_id_headers)
        self._openapi = document(front.backend)
        get: dict[str, Route] = {path: self._info(answer) for path, answer in info.ROUTES.items()}
        get["/openapi.json"] = self._document
        post: dict[str, Route] = dict.fromkeys(ENDPOINTS, self._complete)
        post |= {path: self._text(answer) for path, answer in info.TEXT_ROUTES.items()}
        for (method, path), operation in admin.OPERATIONS.items():
            (get if method == "GET" else post)[path] = self._admin(operation)
        self._routes = {"GET": get, "HEAD": get, "POST": post}
        self._paths = get.keys() | post.keys()

    # ------------------------------------------------------------ every request

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        exchange = Exchange(request, path if path in self._paths else "other")
        exchange.identify(ENDPOINTS[path].id_prefix if path in ENDPOINTS else "req-", self._id_headers)
        try:
            if self._origins:
                self._allow_origin(exchange)
                if request.method == "OPTIONS":
                    return self._preflight(exchange)
            return await self._route(request.method, path)(exchange)
        except asyncio.CancelledError:
            exchange.status, exchange.code = CLIENT_CLOSED, "client_closed"
            raise
        except Exception as exc:
            return self._failed(exchange, exc)
        finally:
            self.front.counts.answered(request.method, exchange, time.monotonic() - exchange.arrived)

    def _failed(self, exchange: Exchange, exc: Exception) -> web.StreamResponse:
        """Answer with what went wrong. A frame that `exc` went through must not hold the error, or both need a gc."""
        error = describe(exc)
        if error.status == 500:
            log.error("%s %s failed", exchange.request.method, exchange.path, exc_info=exc)
        return exchange.refuse(error)

    def _route(self, method: str, path: str) -> Route:
        route = self._routes.get(method, {}).get(path)
        if route is not None:
            return route if not self._keys or path in PUBLIC else self._guarded(route)
        if path not in self._paths:
            raise ApiError(404, "not_found", "no such path; see /openapi.json")
        allowed = [name for name, routes in self._routes.items() if path in routes]
        raise ApiError(405, "method_not_allowed", f"use {' or '.join(allowed)}", headers={"Allow": ", ".join(allowed)})

    def _guarded(self, route: Route) -> Route:
        async def checked(exchange: Exchange) -> web.StreamResponse:
            scheme, _, given = exchange.request.headers.get("authorization", "").partition(" ")
            digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
            # Every key is compared, so that the time tells nothing about which one is close.
            matches = [hmac.compare_digest(digest, key) for key in self._keys]
            if scheme.lower() != "bearer" or not any(matches):
                raise ApiError(
                    401,
                    "invalid_api_key",
                    "a valid API key is needed: Authorization: Bearer KEY",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            return await route(exchange)

        return checked

    def _allow_origin(self, exchange: Exchange) -> None:
        origin = exchange.request.headers.get("origin")
        if origin is not None and (origin in self._origins or "*" in self._origins):
            allowed = "*" if "*" in self._origins else origin
            exchange.extra += (
                b"Access-Control-Allow-Origin: %b\r\nVary: Origin\r\n"
                b"Access-Control-Expose-Headers: X-Request-Id, X-SMG-Rank, X-SMG-Error-Code\r\n"
            ) % allowed.encode()

    def _preflight(self, exchange: Exchange) -> web.StreamResponse:
        return exchange.answer(
            b"",
            200,
            more=b"Access-Control-Allow-Methods: GET, POST, OPTIONS\r\n"
            b"Access-Control-Allow-Headers: Authorization, Content-Type, X-Request-Id\r\n"
            b"Access-Control-Max-Age: 86400\r\n",
        )

    # ------------------------------------------------------------ completions

    async def _complete(self, exchange: Exchange) -> web.StreamResponse:
        front, path = self.front, exchange.path
        body = await read_body(exchange.request, self.limits.body_timeout)
        front.check_takes_work()
        if not front.admission.enter():
            await front.admission.wait()
        try:
            front.check_takes_work()
            job = await front.prepare(path, body)
            del body
            front.counts.routed[path, job.stream] += 1
            completion = front.completion(path, job, exchange)
            try:
                completion.start()
                await completion.done
            finally:
                completion.close()
            front.counts.completed(path, completion.choices, job.n, exchange.arrived)
            if completion.wire is not None and completion.wire.started:
                return exchange.sent()
            if completion.error is not None:
                return exchange.refuse(completion.error)
            answer = completion.shape.body(completion.choices)
            return exchange.answer(answer, more=completion.rank_header)
        except InvalidRequest as exc:
            raise name_field(path, exc) from None
        finally:
            front.admission.leave()

    # ------------------------------------------------------------ the rest

    def _info(self, answer: Callable[[Front], tuple[int, Any]]) -> Route:
        async def route(exchange: Exchange) -> web.StreamResponse:
            status, found = answer(self.front)
            return exchange.answer(info.encode(found), status)

        return route

    def _text(self, answer: Callable[[Front, bytes], Any]) -> Route:
        async def route(exchange: Exchange) -> web.StreamResponse:
            body = await read_body(exchange.request, self.limits.body_timeout)
            found = await self.front.off_loop(answer, self.front, body)
            return exchange.answer(info.encode(found))

        return route

    def _admin(self, operation: admin.Operation) -> Route:
        async def route(exchange: Exchange) -> web.StreamResponse:
            body = await read_body(exchange.request, self.limits.body_timeout)
            return exchange.answer(info.encode(await admin.operate(self.front, operation, body)))

        return route

    async def _document(self, exchange: Exchange) -> web.StreamResponse:
        return exchange.answer(self._openapi)


class MetricsApp:
    """Answers `GET /metrics`, on a listener of its own."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        exchange = Exchange(request, request.path)
        if request.path != "/metrics":
            return exchange.refuse(ApiError(404, "not_found", "this port has /metrics only"))
        if request.method not in ("GET", "HEAD"):
            return exchange.refuse(ApiError(405, "method_not_allowed", "use GET"))
        return exchange.answer(self.metrics.text(), content_type=METRICS_TYPE)
