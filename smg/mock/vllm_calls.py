"""vLLM's utility calls: methods of the engine that its frontend calls by name, and what they do here.

The engine finds time for them between two steps. What a method raises is told as its failure, with the engine's
words around it. Pausing is answered when it is done, which running requests may put off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from smg.mock.dialect import Deafening
from smg.mock.lockstep import Member
from smg.mock.model import Engine
from smg.mock.settings import Settings
from smg.mock.vllm_request import read_lora

MEMORY = ("weights", "kv_cache")  # what a sleeping engine has given away
PAUSE_MODES = ("abort", "wait", "keep")

Say = Callable[[list[Any]], None]  # takes [call_id, failure, [type, result]]


class Later(NamedTuple):
    """A method's result that is not there yet."""

    ready: Callable[[], bool]
    finish: Callable[[], Any] = lambda: None


class Calls:
    """The methods of one engine, with what they remember.

    `abort_all` ends all requests with the reason "abort"; `member` is the engine's part in a lockstep group.
    """

    def __init__(
        self, engine: Engine, settings: Settings, member: Member | None, abort_all: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._member = member
        self._abort_all = abort_all
        self._queued: list[tuple[Any, Any, Any]] = []
        self._later: list[tuple[Any, str, Later]] = []
        self._paused = False
        self._asleep: set[str] = set()
        self._loras: dict[int, str] = {}
        self._weight_version = "default"
        self._methods: dict[Any, Callable[..., Any]] = {
            method.__name__: method
            for method in (
                self.get_supported_tasks,
                self.is_sleeping,
                self.is_scheduler_paused,
                self.sleep,
                self.wake_up,
                self.pause_scheduler,
                self.resume_scheduler,
                self.reset_prefix_cache,
                self.reset_mm_cache,
                self.reset_encoder_cache,
                self.execute_dummy_batch,
                self.add_lora,
                self.remove_lora,
                self.pin_lora,
                self.list_loras,
                self.profile,
                self.collective_rpc,
                self.set_weight_version,
                self.get_weight_version,
            )
        }

    def put(self, call_id: Any, method: Any, args: Any) -> None:
        """Queue a call."""
        self._queued.append((call_id, method, args))

    def run(self, say: Say) -> None:
        """Do what was called for, and answer what is done."""
        queued, self._queued = self._queued, []
        for call_id, method, args in queued:
            self._answer(say, call_id, method, partial(self._invoke, method, args))
        later, self._later = self._later, []
        for call_id, method, result in later:
            if result.ready():
                self._answer(say, call_id, method, result.finish)
            else:
                self._later.append((call_id, method, result))

    def _answer(self, say: Say, call_id: Any, method: Any, work: Callable[[], Any]) -> None:
        try:
            result = work()
        except Exception as error:  # of whatever kind, as the engine has it
            say([call_id, f"Call to {method} method failed: {error}", None])
            return
        if isinstance(result, Later):
            self._later.append((call_id, method, result))
        else:
            say([call_id, None, [None, result]])

    def _invoke(self, method: Any, args: Any) -> Any:
        if type(method) is not str or method not in self._methods:
            raise AttributeError(f"'EngineCoreProc' object has no attribute {method!r:.80}")
        return self._methods[method](*args)

    # Methods

    def get_supported_tasks(self) -> list[str]:
        return ["generate"]

    def is_scheduler_paused(self) -> bool:
        return self._paused

    def is_sleeping(self) -> bool:
        return self._paused or bool(self._asleep)

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> Any:
        if mode not in PAUSE_MODES:
            raise ValueError(f"Invalid pause mode: {mode}")
        if mode == "abort":
            self._abort_all()
        self._paused = True
        self._engine.admitting = False
        if mode == "keep":
            self._engine.halt()
        if self._member is not None:
            self._member.pause()
        return Later(self._idle)

    def _idle(self) -> bool:
        return not self._engine.unfinished and not (self._member is not None and self._member.running)

    def resume_scheduler(self) -> Any:
        if self._member is not None and not self._member.resume():
            return None
        self._paused = False
        self._engine.go(time.monotonic())
        return None if self._member is None else Later(self._member.resumed)

    def sleep(self, level: int = 1, mode: str = "abort") -> Any:
        pause = self.pause_scheduler(mode, level >= 1)
        return Later(pause.ready, lambda: self._asleep.update(MEMORY if level >= 1 else ()))

    def wake_up(self, tags: list[str] | None = None) -> Any:
        self._asleep.difference_update(MEMORY if tags is None else tags)
        if self._asleep:
            return False
        resumed = self.resume_scheduler()
        return True if resumed is None else Later(resumed.ready, lambda: True)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        if reset_running_requests:
            self._engine.preempt_all()
        return not self._engine.running

    def reset_mm_cache(self) -> None:
        pass

    def reset_encoder_cache(self) -> None:
        pass

    def execute_dummy_batch(self) -> None:
        pass

    def add_lora(self, lora_request: list[Any]) -> bool:
        self._need_loras()
        try:
            lora = read_lora(lora_request, self._settings.vllm_version)
        except Deafening as error:  # here it is guarded
            raise ValueError(str(error)) from None
        self._loras[lora["lora_int_id"]] = lora["lora_name"]
        return True

    def remove_lora(self, lora_id: int) -> bool:
        self._need_loras()
        return self._loras.pop(lora_id, None) is not None

    def pin_lora(self, lora_id: int) -> bool:
        self._need_loras()
        if lora_id not in self._loras:
            raise ValueError(f"Pinning failed. LoRA {lora_id} is not registered.")
        return True

    def list_loras(self) -> list[int]:
        self._need_loras()
        return sorted(self._loras)

    def _need_loras(self) -> None:
        if not self._settings.max_loras:
            raise RuntimeError("LoRA is not enabled. Use --enable-lora to enable LoRA.")

    def profile(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        delay: int | None = None,
        most: int | None = None,
    ) -> None:
        pass

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        return [None]  # one worker, which gives nothing

    def set_weight_version(self, weight_version: str) -> None:
        self._weight_version = weight_version

    def get_weight_version(self) -> str:
        return self._weight_version
