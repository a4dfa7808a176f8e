"""Lets TokenSpeed's own ZeroMQ transport be imported without a GPU.

Nothing of the transport, its structs or its sampling parameters is replaced: only the compiled packages of
kernels and of the scheduler are, which its import chain names and never calls.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import logging
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

VERSION = "0.1.1"
GPU_ONLY = (
    "tokenspeed_kernel",
    "tokenspeed_scheduler",
    "tokenspeed_triton",
    "tokenspeed_mooncake",
    "torch_memory_saver",
)


class StandIn:
    """What a stand-in module has under every name: takes any argument, decorates, and has no answer."""

    def __new__(cls, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else super().__new__(cls)

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return StandIn(*arguments)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name}: the test stands in for this, so nothing may depend on it")


class StandInModule(types.ModuleType):
    def __getattr__(self, name: str) -> type[StandIn]:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the GPU-only packages."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in GPU_ONLY:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> StandInModule:
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_transport() -> types.SimpleNamespace:
    """TokenSpeed's `zmq_msgpack`, `zmq_wire`, `io_struct`, `request_types` and `sampling_params`, by those names.

    Takes about 5 s of CPU, torch and transformers being most of it. Raises ImportError, saying what to run,
    where the wheel is missing.
    """
    try:
        found = importlib.metadata.version("tokenspeed")
    except importlib.metadata.PackageNotFoundError:
        advice = "run scripts/make_engines_env.py, and pytest in the environment that it makes"
        raise ImportError(f"tokenspeed is not installed: {advice}") from None
    if found != VERSION:
        raise ImportError(f"tokenspeed {found} is installed; these tests know {VERSION}")
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's and transformers' own
        from tokenspeed.runtime.engine import io_struct, request_types, zmq_msgpack, zmq_wire
        from tokenspeed.runtime.sampling import sampling_params
    logging.getLogger("tokenspeed").propagate = False  # it says why it refuses, at length
    return types.SimpleNamespace(
        zmq_msgpack=zmq_msgpack,
        zmq_wire=zmq_wire,
        io_struct=io_struct,
        request_types=request_types,
        sampling_params=sampling_params,
    )
