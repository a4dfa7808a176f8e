"""What the front tells about itself, and the tokenizer as a service."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from smg._version import __version__
from smg.engine.group import EngineGroup
from smg.http.requests import DetokenizeRequest, TokenizeRequest, token_lists

if TYPE_CHECKING:
    from smg.http.front import Front

encode = msgspec.json.Encoder().encode

Answer = Callable[["Front"], tuple[int, Any]]


def alive(front: Front) -> tuple[int, Any]:
    return 200, {"status": "ok"}


def readiness(front: Front) -> tuple[int, Any]:
    """Whether a load balancer should send work here."""
    groups = front.router.groups
    healthy = sum(group.live >= group.min_ready for group in groups)
    counts = {"healthy_workers": healthy, "total_workers": len(groups)}
    if front.draining:
        return 503, {"status": "not ready", "reason": "draining", **counts}
    if not healthy:
        return 503, {"status": "not ready", "reason": "insufficient healthy workers", **counts}
    return 200, {"status": "ready", **counts}


def models(front: Front) -> tuple[int, Any]:
    card = {
        "id": front.model_name,
        "object": "model",
        "created": front.started,
        "owned_by": "smg",
        "root": front.model.name,
        "max_model_len": context_length(front),
    }
    return 200, {"object": "list", "data": [card]}


def workers(front: Front) -> tuple[int, Any]:
    """Every group and its ranks."""
    found = [_worker(front, i, group) for i, group in enumerate(front.router.groups)]
    total = len(found)
    stats = {"prefill_count": 0, "decode_count": 0, "regular_count": total}
    return 200, {"workers": found, "total": total, "stats": stats}


def _worker(front: Front, i: int, group: EngineGroup) -> dict[str, Any]:
    ready = group.live >= group.min_ready
    ranks = [
        {
            "dp_rank": rank.index,
            "state": rank.state,
            "incarnation": rank.incarnation,
            "engine": rank.engine,
            "in_flight": rank.in_flight,
            "fault": rank.fault,
        }
        for rank in group.ranks
    ]
    return {
        "id": str(i),
        "url": group.url,
        "model_id": front.model_name,
        "model": front.model_name,
        "worker_type": "regular",
        "connection_mode": "zmq",
        "runtime_type": group.backend,
        "handshake_address": group.handshake_address,
        "is_healthy": ready,
        "status": "ready" if ready else "not_ready",
        "load": group.requests,
        "dp_size": len(ranks),
        "ranks": ranks,
    }


def loads(front: Front) -> tuple[int, Any]:
    """What the ranks reported last, beside what is in flight to them."""
    found = []
    for group in front.router.groups:
        load, in_flight = group.load, group.in_flight
        ranks = [
            {
                "dp_rank": rank,
                "num_running_reqs": int(load["running"][rank]),
                "num_waiting_reqs": int(load["waiting"][rank]),
                "token_usage": float(load["kv_usage"][rank]),
                "in_flight": int(in_flight[rank]),
                "reported": bool(load["reported"][rank]),
            }
            for rank in range(len(in_flight))
        ]
        found.append(
            {
                "worker": group.url,
                "load": int(in_flight.sum()),
                "dp_rank_count": sum(rank["reported"] for rank in ranks),
                "loads": ranks,
            }
        )
    return 200, {"workers": found}


def server_info(front: Front) -> tuple[int, Any]:
    options = front.options
    return 200, {
        "version": __version__,
        "model_path": front.model.name,
        "served_model_name": front.model_name,
        "backend": front.backend,
        "policy": front.router.policy,
        "worker_urls": [group.url for group in front.router.groups],
        "max_model_len": context_length(front),
        "max_concurrent_requests": options.max_concurrent_requests,
        "queue_size": options.queue_size,
        "request_timeout_secs": options.request_timeout_secs,
        "active_requests": front.admission.active,
    }


def model_info(front: Front) -> tuple[int, Any]:
    return 200, {
        "model_path": front.model.name,
        "tokenizer_path": front.model.name,
        "is_generation": True,
        "max_context_length": context_length(front),
        "vocab_size": front.model.vocab_size,
    }


def context_length(front: Front) -> int | None:
    known = [front.context(group) for group in front.router.groups]
    return min((length for length in known if length), default=None)


ROUTES: dict[str, Answer] = {
    "/health": alive,
    "/liveness": alive,
    "/readiness": readiness,
    "/v1/models": models,
    "/workers": workers,
    "/get_loads": loads,
    "/get_server_info": server_info,
    "/get_model_info": model_info,
}

_tokenize_body = msgspec.json.Decoder(TokenizeRequest).decode
_detokenize_body = msgspec.json.Decoder(DetokenizeRequest).decode


def tokenize(front: Front, body: bytes) -> Any:
    request = _tokenize_body(body)
    front.check_model(request.model)
    several = not isinstance(request.prompt, str)
    texts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
    lists = [list(front.model.encode(text, add_special_tokens=request.add_special_tokens)) for text in texts]
    counts = [len(ids) for ids in lists]
    return {
        "tokens": lists if several else lists[0],
        "count": counts if several else counts[0],
        "char_count": [len(text) for text in texts] if several else len(texts[0]),
        "max_model_len": context_length(front),
    }


def detokenize(front: Front, body: bytes) -> Any:
    request = _detokenize_body(body)
    front.check_model(request.model)
    if not request.tokens:
        return {"text": ""}
    lists = token_lists(request.tokens, "tokens", front.model.vocab_size)
    texts = [front.model.decode(ids, skip_special_tokens=request.skip_special_tokens) for ids in lists]
    return {"text": texts if isinstance(request.tokens[0], list) else texts[0]}


TEXT_ROUTES: dict[str, Callable[[Front, bytes], Any]] = {
    "/v1/tokenize": tokenize,
    "/v1/detokenize": detokenize,
}
