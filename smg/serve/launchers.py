"""How each engine is started so that its ranks dial this router: one class per engine, and the table of them.

`args` is a namespace with `model` (or `model_path`) and, as far as they are set, `worker_python`,
`tensor_parallel_size` and `zmq_handshake_address`; `backend_args` are the engine's own arguments, as the operator
gave them. Flags that the launcher sets are taken out of those, others pass as they are.
"""

from __future__ import annotations

import argparse
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import smg
from smg.protocol import addresses
from smg.serve import gpus, ports
from smg.serve.arguments import has_flag, size_of, split_owned, value_of
from smg.serve.errors import ServeError


class WorkerLauncher(ABC):
    """What one engine needs to be told. The tables say what is its own; `build_command` puts it together."""

    #: what the router has to speak with it
    wire: str
    #: imported by the engine's Python before the launch, to see that it can be
    module: str
    #: whether its environment has another package called `smg`, which this one would overwrite
    needs_other_smg: bool
    #: flags that are the launcher's, and whether each takes a value
    owned: ClassVar[Mapping[str, bool]]
    #: flags that the API's promises need, unless the operator set them
    defaults: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    tensor_parallel: Sequence[str] = ("--tensor-parallel-size",)
    pipeline_parallel: Sequence[str] = ("--pipeline-parallel-size",)
    data_parallel: Sequence[str] = ("--data-parallel-size",)

    @abstractmethod
    def own_command(self, args: argparse.Namespace, backend_args: Sequence[str], port: int) -> list[str]:
        """The command as far as the launcher decides it."""

    def build_command(self, args: argparse.Namespace, backend_args: Sequence[str], host: str, port: int) -> list[str]:
        """The command that starts the worker on a worker port. `host`: loopback, the one place it may listen.

        Raises ServeError when the arguments ask for what cannot be over this wire.
        """
        if host not in (ports.LOOPBACK, "localhost"):
            raise ServeError(f"worker host {host}: workers listen on {ports.LOOPBACK} only, beside their router")
        kept, _ = self.split(args, backend_args)
        command = self.own_command(args, backend_args, port)
        if self.tensor_parallel and (size := getattr(args, "tensor_parallel_size", None)) is not None:
            command += [self.tensor_parallel[0], str(size)]
        for flag, words in self.defaults.items():
            if not has_flag(kept, flag):
                command += words
        return command + kept

    def split(self, args: argparse.Namespace, backend_args: Sequence[str]) -> tuple[list[str], list[str]]:
        """The engine arguments that are passed through, and those that the launcher's own take the place of."""
        owned = dict(self.owned)
        if getattr(args, "tensor_parallel_size", None) is not None:
            owned.update(dict.fromkeys(self.tensor_parallel, True))
        return split_owned(backend_args, owned)

    def worker_url(self, args: argparse.Namespace, host: str, port: int) -> str:
        """The URL under which the router serves the worker; its path gives the handshake port."""
        return ports.worker_url(port, ports.socket_directory())

    def handshake(self, args: argparse.Namespace, port: int) -> tuple[str, int]:
        """Host and port that the worker's ranks dial."""
        address: str | None = getattr(args, "zmq_handshake_address", None)
        if address is None:
            url = self.worker_url(args, ports.LOOPBACK, port)
            address = addresses.handshake_address(addresses.worker_path(url))
        return ports.handshake_host_port(address)

    def listens_on(self, port: int) -> dict[str, int]:
        """The TCP ports that the engine itself takes for a worker port, by what they are for."""
        return {}

    def ports_apart(self, backend_args: Sequence[str]) -> int:
        """How far worker ports have to be from each other, for what the engine derives from its own."""
        return 1

    def ranks(self, backend_args: Sequence[str]) -> int:
        """Ranks of one worker: the engine-level data-parallel size."""
        return size_of(backend_args, self.data_parallel) or 1

    def router_wire(self, backend_args: Sequence[str]) -> str:
        """The backend that the router speaks to these workers."""
        return self.wire

    def gpus_per_worker(self, args: argparse.Namespace, backend_args: Sequence[str]) -> int:
        """GPUs that one worker takes: tensor-parallel size x pipeline-parallel size x ranks."""
        tensor = getattr(args, "tensor_parallel_size", None) or size_of(backend_args, self.tensor_parallel) or 1
        pipeline = size_of(backend_args, self.pipeline_parallel) or 1
        return int(tensor) * pipeline * self.ranks(backend_args)

    def gpu_env(self, args: argparse.Namespace, dp_rank: int, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of the worker numbered `dp_rank`: `env` (default: this process's) with its share of GPUs.

        A share is `args.gpus_per_worker`, else the tensor-parallel size. Raises ServeError: there are too few.
        """
        environment = dict(os.environ if env is None else env)
        per_worker = getattr(args, "gpus_per_worker", None)
        if per_worker is None:
            per_worker = getattr(args, "tensor_parallel_size", None) or 1
        share = gpus.partition(gpus.devices_of(environment), dp_rank, per_worker)
        if share is not None:
            environment[gpus.VARIABLE] = ",".join(share)
        return environment

    def needs_check(self, python: str) -> bool:
        """Whether that Python has to be asked for the engine before the launch."""
        return True

    def start_env(self, env: Mapping[str, str]) -> dict[str, str]:
        """`env` without what would let the engine import modules that are not its own environment's."""
        environment = {**env, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
        environment.pop("PYTHONPATH", None)
        return environment


class TokenspeedWorkerLauncher(WorkerLauncher):
    """TokenSpeed's scheduler without its frontend.

    Its control-plane ports follow from `--port`, so that each worker gets one of its own; the store is named too,
    since the engine does not derive it with several ranks.
    """

    wire = "tokenspeed"
    module = "tokenspeed.cli"
    needs_other_smg = True
    owned: ClassVar[Mapping[str, bool]] = {
        "--headless": False,
        "--model": True,
        "--model-path": True,
        "--port": True,
        "--dist-init-addr": True,
        "--data-parallel-address": True,
        "--data-parallel-rpc-port": True,
        "--zmq-engine-index": True,
    }
    # without the first, constraints that reach the engine are dropped; without the second, logprobs are empty
    defaults: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "--grammar-backend": ("--grammar-backend", "xgrammar"),
        "--enable-output-logprobs": ("--enable-output-logprobs",),
    }
    tensor_parallel = ("--tensor-parallel-size", "--tp", "--attn-tp-size")

    def own_command(self, args: argparse.Namespace, backend_args: Sequence[str], port: int) -> list[str]:
        host, handshake = self.handshake(args, port)
        return [
            *(python(args), "-m", "tokenspeed.cli", "serve", "--headless"),
            *("--model", model(args)),
            *("--port", str(port)),
            *("--dist-init-addr", f"{ports.LOOPBACK}:{ports.store_port(port)}"),
            *("--data-parallel-address", host),
            *("--data-parallel-rpc-port", str(handshake)),
            *("--zmq-engine-index", "0"),
        ]

    def listens_on(self, port: int) -> dict[str, int]:
        return {"own port": port, "store": ports.store_port(port)}

    def ports_apart(self, backend_args: Sequence[str]) -> int:
        # the engine takes up to six ports from the store on, and one more for each rank
        return 8 + self.ranks(backend_args)

    def gpus_per_worker(self, args: argparse.Namespace, backend_args: Sequence[str]) -> int:
        return size_of(backend_args, ("--world-size",)) or super().gpus_per_worker(args, backend_args)


class VllmWorkerLauncher(WorkerLauncher):
    """vLLM's EngineCores without its API server. It listens on no port that a launcher could choose."""

    wire = "vllm"
    module = "vllm"
    needs_other_smg = False
    owned: ClassVar[Mapping[str, bool]] = {
        "--headless": False,
        "--model": True,
        "--data-parallel-size": True,
        "-dp": True,
        "--data-parallel-size-local": True,
        "-dpl": True,
        "--data-parallel-address": True,
        "-dpa": True,
        "--data-parallel-rpc-port": True,
        "-dpp": True,
        "--data-parallel-start-rank": True,
        "-dpr": True,
    }
    tensor_parallel = ("--tensor-parallel-size", "-tp")
    pipeline_parallel = ("--pipeline-parallel-size", "-pp")
    data_parallel = ("--data-parallel-size", "-dp")

    def own_command(self, args: argparse.Namespace, backend_args: Sequence[str], port: int) -> list[str]:
        host, handshake = self.handshake(args, port)
        ranks = str(self.ranks(backend_args))
        return [
            *(python(args), "-m", "vllm.entrypoints.cli.main", "serve", model(args), "--headless"),
            *("--data-parallel-size", ranks, "--data-parallel-size-local", ranks),
            *("--data-parallel-address", host),
            *("--data-parallel-rpc-port", str(handshake)),
        ]


class SglangWorkerLauncher(WorkerLauncher):
    """SGLang's scheduler without its frontend; a plugin in it dials."""

    wire = "sglang"
    module = "smg_grpc_servicer.sglang.headless"
    needs_other_smg = True
    owned: ClassVar[Mapping[str, bool]] = {
        "--model-path": True,
        "--model": True,
        "--host": True,
        "--port": True,
        "--zmq-handshake-address": True,
        "--zmq-engine-index": True,
        "--grpc-mode": False,
    }
    tensor_parallel = ("--tensor-parallel-size", "--tp-size", "--tp")
    pipeline_parallel = ("--pipeline-parallel-size", "--pp-size")
    data_parallel = ("--data-parallel-size", "--dp-size", "--dp")

    def own_command(self, args: argparse.Namespace, backend_args: Sequence[str], port: int) -> list[str]:
        host, handshake = self.handshake(args, port)
        spelled = f"[{host}]" if ":" in host else host
        return [
            *(python(args), "-m", self.module),
            *("--zmq-handshake-address", f"tcp://{spelled}:{handshake}"),
            *("--zmq-engine-index", "0"),
            *("--model-path", model(args)),
            *("--port", str(port)),
        ]

    def listens_on(self, port: int) -> dict[str, int]:
        return {"own port": port}

    def ranks(self, backend_args: Sequence[str]) -> int:
        ranks = super().ranks(backend_args)
        if ranks > 1:
            raise ServeError(
                f"{self.data_parallel[0]} {ranks}: an SGLang worker dials with one rank; for more of them start more "
                "workers, with --data-parallel-size before `--`"
            )
        return ranks


class MockWorkerLauncher(WorkerLauncher):
    """Simulated ranks of this package. They need no GPU, of the model only its tokenizer, and this very `smg`."""

    wire = "tokenspeed"
    module = "smg.mock.command"
    needs_other_smg = False
    owned: ClassVar[Mapping[str, bool]] = {
        "--worker-url": True,
        "--handshake-address": True,
        "--ranks": True,
        "--data-parallel-size": True,
        "--start-index": True,
        "--model-path": True,
        "--control": False,
    }
    defaults: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "--grammar-backend": ("--grammar-backend",),
        "--enable-output-logprobs": ("--enable-output-logprobs",),
    }
    tensor_parallel = ()

    def own_command(self, args: argparse.Namespace, backend_args: Sequence[str], port: int) -> list[str]:
        host, handshake = self.handshake(args, port)
        return [
            *(python(args), "-m", "smg", "mock"),
            *("--worker-url", self.worker_url(args, ports.LOOPBACK, port)),
            *("--handshake-address", f"tcp://{host}:{handshake}"),
            *("--ranks", str(self.ranks(backend_args))),
            *("--model-path", model(args)),
        ]

    def router_wire(self, backend_args: Sequence[str]) -> str:
        return value_of(backend_args, ("--backend",)) or self.wire

    def gpus_per_worker(self, args: argparse.Namespace, backend_args: Sequence[str]) -> int:
        return 0

    def needs_check(self, python: str) -> bool:
        return python != sys.executable  # which runs this

    def start_env(self, env: Mapping[str, str]) -> dict[str, str]:
        # a checkout need not be installed
        return {**super().start_env(env), "PYTHONPATH": str(Path(smg.__file__).parents[1])}


#: `--backend` -> how it is started
LAUNCHERS: dict[str, WorkerLauncher] = {
    "tokenspeed": TokenspeedWorkerLauncher(),
    "vllm": VllmWorkerLauncher(),
    "sglang": SglangWorkerLauncher(),
    "mock": MockWorkerLauncher(),
}


def python(args: argparse.Namespace) -> str:
    return getattr(args, "worker_python", None) or sys.executable


def model(args: argparse.Namespace) -> str:
    """The model as engines are given it: a path in full, since they may run in another directory."""
    named: str = getattr(args, "model", None) or getattr(args, "model_path", None) or ""
    return os.path.abspath(named) if os.path.exists(named) else named
