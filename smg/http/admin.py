"""Routes that ask the engines themselves: caches, sleep, profiles, adapters. Every rank of every group is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from smg.http.errors import ApiError

if TYPE_CHECKING:
    from smg.http.front import Front


class Nothing(Struct):
    """A body that says nothing."""


class ResetRequest(Struct, kw_only=True):
    reset_running_requests: bool = False


class SleepRequest(Struct, kw_only=True):
    level: Annotated[int, Meta(ge=0, le=2)] = 1
    mode: str = "abort"  # abort, wait or keep


class WakeRequest(Struct, kw_only=True):
    tags: list[str] | None = None  # None: everything


class LoadAdapterRequest(Struct, kw_only=True):
    lora_name: str
    lora_path: str
    lora_int_id: Annotated[int, Meta(ge=1)]


class UnloadAdapterRequest(Struct, kw_only=True):
    lora_int_id: Annotated[int, Meta(ge=1)]


class Operation(NamedTuple):
    """One route: what its body holds, and the utility and arguments that it becomes."""

    summary: str
    body: type[Any]
    call: Callable[[Any], tuple[Any, ...]]


def _reset(request: ResetRequest) -> tuple[Any, ...]:
    return "reset_prefix_cache", request.reset_running_requests


BACKENDS = frozenset(("vllm",))  # whose wire has a way to ask this of an engine
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/flush_cache"): Operation("Empty the ranks' prefix caches", ResetRequest, _reset),
    ("POST", "/reset_prefix_cache"): Operation("Empty the ranks' prefix caches", ResetRequest, _reset),
    ("POST", "/sleep"): Operation(
        "Give the ranks' memory back, and their weights at level 2",
        SleepRequest,
        lambda request: ("sleep", request.level, request.mode),
    ),
    ("POST", "/wake_up"): Operation("End a sleep", WakeRequest, lambda request: ("wake_up", request.tags)),
    ("GET", "/is_sleeping"): Operation("Whether ranks sleep", Nothing, lambda _: ("is_sleeping",)),
    ("POST", "/start_profile"): Operation("Begin a profile", Nothing, lambda _: ("profile", True)),
    ("POST", "/stop_profile"): Operation("End a profile and write it", Nothing, lambda _: ("profile", False)),
    ("POST", "/v1/load_lora_adapter"): Operation(
        "Load an adapter",
        LoadAdapterRequest,
        lambda request: ("add_lora", [request.lora_name, request.lora_int_id, request.lora_path]),
    ),
    ("POST", "/v1/unload_lora_adapter"): Operation(
        "Unload an adapter", UnloadAdapterRequest, lambda request: ("remove_lora", request.lora_int_id)
    ),
    ("GET", "/v1/lora_adapters"): Operation("Ids of the adapters that are loaded", Nothing, lambda _: ("list_loras",)),
}


async def operate(front: Front, operation: Operation, body: bytes) -> dict[str, Any]:
    """Do it on all ranks at once; what each answered, group by group."""
    if front.backend not in BACKENDS:
        raise ApiError(501, "not_supported", f"{front.backend}'s wire has no way to ask this of an engine")
    method, *args = operation.call(msgspec.json.decode(body or b"{}", type=operation.body))
    answers = await asyncio.gather(*(group.utility(method, *args) for group in front.router.groups))
    found = zip(front.router.groups, answers, strict=True)
    return {"workers": [{"url": group.url, "results": results} for group, results in found]}
