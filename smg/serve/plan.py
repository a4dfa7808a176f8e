"""What `serve` is going to start: all commands, ports and environments, decided and checked before anything runs."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smg.serve import gpus, ports
from smg.serve.errors import ServeError
from smg.serve.launchers import WorkerLauncher, model


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker: the process that is started and the group of ranks that it will be.

    `ports`: TCP ports by what they are for. `environment`: all of the process's variables. `gpus`: its share, None
    when it is not told of any.
    """

    index: int
    url: str
    ranks: int
    handshake: str
    ports: Mapping[str, int]
    gpus: Sequence[str] | None
    command: Sequence[str]
    environment: Mapping[str, str]
    directory: str

    @property
    def name(self) -> str:
        return f"worker {self.index}"

    @property
    def rank_names(self) -> str:
        return "rank 0" if self.ranks == 1 else f"ranks 0-{self.ranks - 1}"


@dataclass(frozen=True, slots=True)
class Plan:
    """All workers, the wire that the router speaks with them, and what the operator should know."""

    workers: Sequence[WorkerPlan]
    wire: str
    notes: Sequence[str]

    @property
    def ranks(self) -> int:
        """Ranks of each worker."""
        return self.workers[0].ranks


def make_plan(
    launcher: WorkerLauncher,
    args: argparse.Namespace,
    backend_args: Sequence[str],
    *,
    environment: Mapping[str, str] = os.environ,
    is_free: Callable[[int], bool] | None = None,
    directory: str | None = None,
) -> Plan:
    """Decide everything. `args`: the command line of `serve`; `backend_args`: the engine's part of it.

    Touches nothing; `is_free` (default: binding there) says which ports an engine may take. Raises ServeError.
    """
    if args.data_parallel_size < 1:
        raise ServeError(f"--data-parallel-size {args.data_parallel_size}: must be at least 1 worker")
    ranks = launcher.ranks(backend_args)
    args = argparse.Namespace(**{**vars(args), "gpus_per_worker": launcher.gpus_per_worker(args, backend_args)})
    chosen = ports.choose_ports(
        args.worker_base_port,
        args.data_parallel_size,
        launcher.ports_apart(backend_args),
        lambda port: list(launcher.listens_on(port).values()),
        is_free or ports.is_free,
    )
    directory = working_directory(directory or os.getcwd(), ports.socket_directory())
    workers = []
    for index, port in enumerate(chosen):
        host, handshake = launcher.handshake(args, port)
        variables = launcher.gpu_env(args, index, environment)
        workers.append(
            WorkerPlan(
                index=index,
                url=launcher.worker_url(args, args.worker_host, port),
                ranks=ranks,
                handshake=f"tcp://{f'[{host}]' if ':' in host else host}:{handshake}",
                ports={**launcher.listens_on(port), "handshake": handshake},
                gpus=gpus.partition(gpus.devices_of(environment), index, args.gpus_per_worker),
                command=launcher.build_command(args, backend_args, args.worker_host, port),
                environment=launcher.start_env(variables),
                directory=directory,
            )
        )
    ports.refuse_clashes(_claims(args, workers))
    return Plan(workers, launcher.router_wire(backend_args), _notes(launcher, args, backend_args, directory))


def working_directory(here: str, instead: str) -> str:
    """Where engines run: `here`, unless a module `smg` would be found there before the engine's own."""
    holds = any(os.path.lexists(os.path.join(here, name)) for name in ("smg", "smg.py"))
    return instead if holds or "smg" in Path(here).parts else here


def describe(plan: Plan, args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> str:
    """The plan in words and commands, for --dry-run."""
    lines = [f"note: {note}" for note in plan.notes]
    for worker in plan.workers:
        changed = [
            f"{name}={value}" for name, value in sorted(worker.environment.items()) if environment.get(name) != value
        ]
        missing = [name for name in sorted(environment) if name not in worker.environment]
        rows = {
            "url": worker.url,
            "ranks": str(worker.ranks),
            "handshake": worker.handshake,
            "ports": ", ".join(f"{port} ({purpose})" for purpose, port in worker.ports.items()),
            "gpus": "as they are" if worker.gpus is None else ",".join(worker.gpus),
            "directory": worker.directory,
            "sets": shlex.join(changed),
            "unsets": " ".join(missing) or "-",
            "command": shlex.join(worker.command),
        }
        lines += [worker.name, *(f"  {name:10} {value}" for name, value in rows.items())]
    router = [
        *("python", "-m", "smg", "launch", "--worker-urls", *(worker.url for worker in plan.workers)),
        *("--backend", plan.wire, "--zmq-engine-count", str(plan.ranks), "--model-path", model(args)),
        *("--host", args.host, "--port", str(args.port), "--prometheus-port", str(args.prometheus_port)),
    ]
    if args.zmq_handshake_address:
        router += ["--zmq-handshake-address", args.zmq_handshake_address]
    return "\n".join([*lines, "router", "  in this process, as by", f"  {'command':10} {shlex.join(router)}"])


def _claims(args: argparse.Namespace, workers: Sequence[WorkerPlan]) -> list[tuple[int, str]]:
    claims = [
        (port, f"the {purpose} of {worker.name} ({worker.url})")
        for worker in workers
        for purpose, port in worker.ports.items()
    ]
    for port, holder in ((args.port, "--port"), (args.prometheus_port, "--prometheus-port")):
        if port:
            claims.append((port, f"the router's {holder}"))
    return claims


def _notes(
    launcher: WorkerLauncher, args: argparse.Namespace, backend_args: Sequence[str], directory: str
) -> list[str]:
    _, dropped = launcher.split(args, backend_args)
    notes = [
        f"engine argument {argument!r} is left out: the launcher sets it"
        for argument in dropped
        if argument.partition("=")[0].partition(" ")[0].replace("_", "-") not in launcher.data_parallel
    ]
    if directory != os.getcwd():
        notes.append(
            f"engines run in {directory}, since a directory `smg` is here or around here: "
            "write paths in their arguments in full"
        )
    return notes
