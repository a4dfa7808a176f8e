"""The OpenAPI document, made from the request types themselves."""

from __future__ import annotations

from typing import Any

import msgspec

from smg._version import __version__
from smg.http import requests
from smg.http.admin import BACKENDS, OPERATIONS
from smg.http.info import ROUTES

BODIES: dict[str, tuple[type[Any], str]] = {
    "/v1/chat/completions": (requests.ChatRequest, "Continue a conversation"),
    "/v1/completions": (requests.CompletionRequest, "Continue one or several prompts"),
    "/generate": (requests.GenerateRequest, "Continue prompts, in SGLang's native shape"),
    "/v1/tokenize": (requests.TokenizeRequest, "Text to token ids"),
    "/v1/detokenize": (requests.DetokenizeRequest, "Token ids to text"),
}
STREAMS = {"/v1/chat/completions", "/v1/completions", "/generate"}
SUMMARIES = {
    "/health": "The process is up",
    "/liveness": "The process is up",
    "/readiness": "Whether requests can be served now",
    "/v1/models": "The model that is served",
    "/workers": "Engine groups, their ranks and the ranks' states",
    "/get_loads": "What each rank reported last, and what is in flight to it",
    "/get_server_info": "How the server was started",
    "/get_model_info": "The model and its context length",
}
ERROR = {
    "description": "An error",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": "string"},
                        },
                    }
                },
            }
        }
    },
}
JSON_ANSWER: dict[str, Any] = {"description": "The answer", "content": {"application/json": {"schema": {}}}}


def document(backend: str) -> bytes:
    """The OpenAPI 3.1 document as JSON, with what the backend's engines can be asked."""
    schemas, components = msgspec.json.schema_components(
        [kind for kind, _ in BODIES.values()], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    for path in ROUTES:
        answers = {"200": JSON_ANSWER, "401": ERROR}
        if path == "/readiness":
            answers["503"] = JSON_ANSWER
        paths[path] = {"get": {"summary": SUMMARIES[path], "responses": answers}}
    for (path, (_, summary)), schema in zip(BODIES.items(), schemas, strict=True):
        content: dict[str, Any] = {"application/json": {"schema": {}}}
        if path in STREAMS:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"200": {**JSON_ANSWER, "content": content}, "default": ERROR},
            }
        }
    for (method, path), operation in OPERATIONS.items() if backend in BACKENDS else ():
        described: dict[str, Any] = {"summary": operation.summary, "responses": {"200": JSON_ANSWER, "default": ERROR}}
        if method == "POST":
            (schema,), more = msgspec.json.schema_components(
                [operation.body], ref_template="#/components/schemas/{name}"
            )
            components |= more
            described["requestBody"] = {"required": False, "content": {"application/json": {"schema": schema}}}
        paths[path] = {method.lower(): described}
    paths["/openapi.json"] = {"get": {"summary": "This document", "responses": {"200": JSON_ANSWER}}}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "smg", "version": __version__},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    )
