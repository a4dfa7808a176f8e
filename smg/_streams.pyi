"""Types of requests and their streams; public through `smg`."""

from collections.abc import AsyncIterator, Iterator
from typing import Any, final

from smg._fastpath import Core
from smg._outlets import Outlet, Output

def submit(
    core: Core,
    payload: bytes,
    id_offset: int,
    *,
    request_id: str | None = None,
    rank: int = -1,
    deadline: float = 0,
    outlet: Outlet | None = None,
    suffix: str = "",
    prompt_tokens: int = 0,
    logprobs: int | None = None,
) -> Stream: ...

@final
class Stream:
    data: Any
    @property
    def request_id(self) -> str: ...
    @property
    def rank(self) -> int: ...
    def abort(self) -> None: ...
    def __aiter__(self) -> AsyncIterator[Output]: ...
    def blocking(self, timeout: float | None = None) -> Iterator[Output]: ...
