"""`EngineGroup`: N ranks behind one worker URL, as a serving app uses them."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from smg import _fastpath
from smg._outlets import Outlet, new_outlet
from smg._streams import Stream, submit
from smg.engine import address
from smg.engine.lifecycle import State
from smg.engine.loop import Loop
from smg.errors import InvalidRank, InvalidRequest, NoRank, NotReady, UtilityTimeout
from smg.protocol import addresses, tokenspeed, vllm
from smg.sampling import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

BACKENDS: dict[str, ModuleType] = {"tokenspeed": tokenspeed, "vllm": vllm}
_DEFAULTS = SamplingParams()
_PLACEHOLDER = "0" * 24
_open_loops: weakref.WeakSet[Loop] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank as it stands.

    `state`: absent, hello, live, stalled, draining or dead. `incarnation`: how many processes have dialed in
    as this rank. `engine`: what it says it is, e.g. "tokenspeed-0.1.1". `max_model_len` in tokens, 0 = not
    said. `fault`: why the last incarnation ended or was refused.
    """

    index: int
    state: str
    incarnation: int
    engine: str
    max_model_len: int
    in_flight: int
    fault: str
    duplicate_hello: int
    refused: int


class EngineGroup:
    """N data-parallel ranks behind one worker URL: binds, lets the ranks dial in, routes requests to them.

    `url` is `ipc://<path>`; its directory must be private to the user (it is made when missing). `backend`
    names the engine's wire. `ranks`: engine processes to expect; the group serves with `min_ready` of them
    (default all). `handshake_address` (`tcp://host:port`) replaces the one derived from the path.
    `max_inflight`: requests per rank before `Overloaded`, None = unbounded. `stall_timeout`: seconds of
    silence with work in flight after which a rank gets nothing new while others live; 0 = never.
    `handshake_timeout`: seconds without progress after which a dialer is given up. `log_request_ids`: let
    request ids follow the router's own id on the wire. Of vLLM only: `model`, what the engine leaves to its
    frontend to know (without its `eos_token_ids` nothing ends a completion but its own limits), and
    `parallel_config`, what INIT sets in the ranks of a model with experts that were not launched by one command.

    Listening begins here, on loopback and in that directory only. Use it as `async with` or `with`, or
    `close` it. Raises AddressError when the URL, the directory or the address cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        backend: str,
        ranks: int = 1,
        min_ready: int | None = None,
        handshake_address: str | None = None,
        max_inflight: int | None = None,
        stall_timeout: float = 60.0,
        handshake_timeout: float = 600.0,
        log_request_ids: bool = False,
        model: vllm.Model | None = None,
        parallel_config: Mapping[str, Any] | None = None,
        use_epoll: bool = True,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}")
        if not 1 <= ranks <= 65536:
            raise ValueError(f"ranks={ranks}: must be in 1..65536")
        if min_ready is not None and not 1 <= min_ready <= ranks:
            raise ValueError(f"min_ready={min_ready}: must be in 1..{ranks}")
        if max_inflight is not None and max_inflight < 1:
            raise ValueError(f"max_inflight={max_inflight}: must be at least 1, or None")
        own = {"model": model, "parallel_config": parallel_config}
        if backend != "vllm" and any(value is not None for value in own.values()):
            raise ValueError(f"{' and '.join(own)} are for backend='vllm', not {backend!r}")
        self.url = url
        self.backend = backend
        self.min_ready = ranks if min_ready is None else min_ready
        self._protocol = BACKENDS[backend]
        self._encode_add: Callable[..., bytes] = self._protocol.encode_add
        if model is not None:
            self._encode_add = partial(self._encode_add, model=model)
        self._log_ids = log_request_ids
        self._ranks = ranks
        self._core = _fastpath.Core(
            ranks,
            backend=backend,
            decode_cold=self._protocol.decode_logprobs,
            stall_timeout=stall_timeout,
            max_inflight=max_inflight or 0,
            probes=backend == "vllm",
            use_epoll=use_epoll,
        )
        directory = address.SocketDirectory(url, ranks)
        self._loop = Loop(
            self._core,
            directory,
            address.handshake_address(addresses.worker_path(url), handshake_address),
            backend=backend,
            ranks=ranks,
            handshake_timeout=handshake_timeout,
            parallel_config=parallel_config,
        )
        _open_loops.add(self._loop)
        finalizer = weakref.finalize(self, self._loop.stop)
        finalizer.atexit = False  # _close_all does it, and waits

    # ---------------------------------------------------------- life

    async def ready(self, timeout: float | None = None, *, ranks: int | None = None) -> None:
        """Wait until `ranks` (default `min_ready`) ranks take work.

        `timeout` in seconds, over all of them. Raises NotReady, which names every rank's state, or Closed.
        """
        wanted = self.min_ready if ranks is None else ranks
        future = self._loop.when_live(wanted)
        try:
            await asyncio.wait_for(asyncio.wrap_future(future), timeout)
        except (asyncio.TimeoutError, TimeoutError):
            raise self._not_ready(wanted, timeout) from None

    def wait_ready(self, timeout: float | None = None, *, ranks: int | None = None) -> None:
        """`ready` for code without an event loop."""
        wanted = self.min_ready if ranks is None else ranks
        future = self._loop.when_live(wanted)
        try:
            future.result(timeout)
        except (concurrent.futures.TimeoutError, TimeoutError):
            future.cancel()
            raise self._not_ready(wanted, timeout) from None

    def _not_ready(self, wanted: int, timeout: float | None) -> NotReady:
        states = [life.describe() for life in self._loop.lives]
        return NotReady(
            f"{self.live} of {wanted} ranks were live after {timeout:g} s. "
            + "; ".join(states)
            + f". Engines dial {self._loop.address} once, when they start: engines that were started for an "
            "earlier router must be restarted.",
            states,
        )

    def close(self) -> None:
        """End every stream with `Closed`, stop the thread, unlink the sockets. Idempotent."""
        self._loop.close()

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or the group's thread failed."""
        return self._loop.closing

    def __enter__(self) -> EngineGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> EngineGroup:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ---------------------------------------------------------- requests

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        rank: int | None = None,
        priority: int = 0,
        deadline: float | None = None,
        outlet: Outlet | None = None,
    ) -> Stream:
        """Send one request to the least-loaded rank, or to `rank`. Never blocks; any thread may call it.

        `prompt_token_ids`: ints, one dimension. `deadline`: seconds from now, after which the request is
        aborted and its stream raises DeadlineExceeded. `request_id` is the caller's own name for it; it need
        not be unique. With `outlet` the outputs come out of that outlet. Raises InvalidRequest (which field,
        which value, what is allowed), NoRank, InvalidRank, Overloaded or Closed.
        """
        if request_id is not None and not isinstance(request_id, str):
            raise InvalidRequest("request_id", request_id, "text")
        if deadline is not None and not deadline > 0:
            raise InvalidRequest("deadline", deadline, "a number of seconds above 0")
        if rank is not None:
            self._check_rank(rank)
        more = {}
        if priority:
            if not self._protocol.HAS_PRIORITY:
                raise InvalidRequest("priority", priority, f"0: {self.backend} has no priorities")
            more = {"priority": priority, "version": self._loop.version}
        if params is None:
            params = _DEFAULTS
        suffix = ""
        if self._log_ids and request_id:
            suffix = "-" + re.sub(r"[^A-Za-z0-9._-]", "_", request_id[:32])
        payload = self._encode_add(
            _PLACEHOLDER + suffix, prompt_token_ids, params, context_length=self._loop.context_length, **more
        )
        return submit(
            self._core,
            payload,
            self._protocol.RID_OFFSET,
            request_id=request_id,
            rank=-1 if rank is None else rank,
            deadline=deadline or 0.0,
            outlet=outlet,
            suffix=suffix,
            prompt_tokens=len(prompt_token_ids),
            logprobs=params.logprobs,
        )

    def outlet(self) -> Outlet:
        """An outlet of the caller's own: one place where the outputs of many streams become ready."""
        return new_outlet(self._core)

    def drain(self, rank: int) -> None:
        """Give `rank` nothing new; when its requests have ended it is let go and may be restarted."""
        self._check_rank(rank)
        if self._loop.lockstep:
            raise InvalidRank("ranks that step together cannot be drained one by one; restart the group")
        self._loop.drain(rank)

    # ---------------------------------------------------------- utilities

    async def utility(self, method: str, *args: Any, rank: int | None = None, timeout: float | None = 60.0) -> Any:
        """What an engine's utility answers: of `rank`, or a list over all live ranks, which are asked at once.

        vLLM has them: `reset_prefix_cache`, `sleep`, `wake_up`, `is_sleeping`, `add_lora`, `remove_lora`,
        `list_loras`, `profile` and others in `smg.protocol.vllm_utilities`, which has their arguments. `timeout` in
        seconds; `sleep` and `pause_scheduler` answer when they are done. Raises InvalidRequest, InvalidRank, NoRank,
        UtilityError in the engine's words, UtilityTimeout, RankDied or Closed.
        """
        calls = self._start_calls(method, args, rank)
        _, late = await asyncio.wait([asyncio.wrap_future(call) for call in calls.values()], timeout=timeout)
        for future in late:
            future.cancel()
        return self._answers(method, calls, timeout, rank)

    def wait_utility(self, method: str, *args: Any, rank: int | None = None, timeout: float | None = 60.0) -> Any:
        """`utility` for code without an event loop."""
        calls = self._start_calls(method, args, rank)
        concurrent.futures.wait(calls.values(), timeout)
        return self._answers(method, calls, timeout, rank)

    def _start_calls(
        self, method: str, args: tuple[Any, ...], rank: int | None
    ) -> dict[int, concurrent.futures.Future[Any]]:
        if self.backend != "vllm":
            raise InvalidRequest("method", method, f"nothing: {self.backend} has no utilities")
        if rank is not None:
            self._check_rank(rank)
            return {rank: self._loop.call_utility(rank, method, args)}
        takes_work = (State.LIVE, State.STALLED, State.DRAINING)
        live = [life.index for life in self._loop.lives if life.state in takes_work]
        if not live:
            raise NoRank("no rank is live; ask the group's `ranks` for their states")
        return {index: self._loop.call_utility(index, method, args) for index in live}

    def _answers(
        self, method: str, calls: dict[int, concurrent.futures.Future[Any]], timeout: float | None, rank: int | None
    ) -> Any:
        for index, call in calls.items():
            if call.cancel():
                raise UtilityTimeout(f"rank {index} did not answer {method} within {timeout:g} s", index, method)
        answers = [call.result() for call in calls.values()]
        if method in ("resume_scheduler", "wake_up") and self._loop.lockstep:
            self._core.start_wave()  # starts that came while the ranks paused were dropped
        return answers if rank is None else answers[0]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._ranks:
            raise InvalidRank(f"rank {rank} is not one of 0..{self._ranks - 1}")

    # ---------------------------------------------------------- what it knows

    @property
    def handshake_address(self) -> str:
        """Where engines dial in."""
        return self._loop.address

    @property
    def max_model_len(self) -> int | None:
        """Context length in tokens, prompt and completion: the least any rank registered; None = unknown."""
        return self._loop.context_length

    @property
    def live(self) -> int:
        """Ranks that take work now."""
        return self._loop.live

    @property
    def requests(self) -> int:
        """Requests in flight, over all ranks."""
        return self._core.live

    @property
    def in_flight(self) -> npt.NDArray[np.int64]:
        """Requests in flight, one int64 per rank."""
        return self._snapshot()[0]

    @property
    def load(self) -> npt.NDArray[Any]:
        """Each rank's last report: running i8, waiting i8, kv_usage f8 (0..1), reported ? (any yet)."""
        return self._snapshot()[1]

    def _snapshot(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        import numpy as np  # here, since a server that never asks need not hold its 10 MB

        in_flight = np.zeros(self._ranks, np.int64)
        load = np.zeros(self._ranks, _fastpath.RANK_DTYPE)
        self._core.snapshot(in_flight, load)
        return in_flight, load

    @property
    def ranks(self) -> list[RankInfo]:
        """Every rank's state."""
        infos = []
        for life, registration in zip(self._loop.lives, self._loop.registrations, strict=True):
            infos.append(
                RankInfo(
                    index=life.index,
                    state=life.state.value,
                    incarnation=life.incarnation,
                    engine=registration.vllm_version if registration else "",
                    max_model_len=registration.max_model_len if registration else 0,
                    in_flight=self._core.in_flight(life.index),
                    fault=life.fault,
                    duplicate_hello=life.duplicate_hello,
                    refused=life.refused,
                )
            )
        return infos

    @property
    def counters(self) -> dict[str, list[int]]:
        """Totals since the start: name -> one int per rank."""
        return self._core.counters()

    def __repr__(self) -> str:
        return f"<EngineGroup {self.url} {self.backend} {self.live}/{self._ranks} live>"


def _close_all() -> None:
    for loop in list(_open_loops):
        loop.close(exiting=True)


atexit.register(_close_all)
