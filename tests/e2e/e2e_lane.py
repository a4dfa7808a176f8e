"""Which engine the suite runs against: a lane, as the environment names it.

    E2E_ENGINE             mock (default), mock-vllm, vllm, tokenspeed, tokenspeed-transport
    E2E_ZMQ_ENGINE_COUNT   ranks of the worker (default: 2 simulated ones, 1 real one)
    E2E_MODEL              a model directory or name (default: the demo model; for vllm a tiny one, made on the spot)
    E2E_WORKER_PYTHON      the Python of the engine's environment (default: this one)
    E2E_ENGINE_ARGS        further arguments of the engine
    E2E_MIN_SELECTED       with fewer tests than this the run fails; and then an engine that is missing fails it too
    E2E_STARTUP_TIMEOUT    seconds until the engine has to take work

`mock` and `mock-vllm` are the simulator on either wire. `vllm` and `tokenspeed` are the engines, as `serve` starts
them. `tokenspeed-transport` is TokenSpeed's own transport without its GPU part, behind the launch command of the
real one.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from serve_process import MODEL, ROOT

HERE = Path(__file__).parent
# vLLM on this machine's CPUs: small, and without compiling anything
VLLM_CPU_ARGS = (
    "--dtype=float32 --enforce-eager --max-model-len=1024 --max-num-seqs=16 --seed=1 --distributed-executor-backend=uni"
)
VLLM_CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Engine:
    """One kind of lane. `backend`: of `serve`; `alternatives`: the most top logprobs that its wire carries."""

    backend: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    simulated: bool = False
    alternatives: int = 0
    module: str | None = None


ENGINES = {
    "mock": Engine("mock", ("--step-ms", "2"), simulated=True),
    "mock-vllm": Engine("mock", ("--step-ms", "2", "--backend", "vllm"), simulated=True, alternatives=5),
    "vllm": Engine("vllm", alternatives=5, module="vllm"),
    "tokenspeed": Engine("tokenspeed", module="tokenspeed.cli"),
    "tokenspeed-transport": Engine("tokenspeed", simulated=True, module="tokenspeed"),
}


@dataclass(frozen=True)
class Lane:
    """The engine, its ranks and its model; `model` is None when it has to be made first."""

    name: str
    ranks: int
    model: str | None
    python: str
    engine_args: tuple[str, ...]
    min_selected: int
    startup_timeout: float

    @property
    def engine(self) -> Engine:
        return ENGINES[self.name]

    @property
    def grouped(self) -> bool:
        return self.ranks > 1

    def __str__(self) -> str:
        return f"{self.name} x {self.ranks}, {self.model or 'a tiny model'}"

    def missing(self, ask: Callable[[str, str], str | None] | None = None) -> str | None:
        """Why the lane cannot run here, or None. `ask`: what keeps a Python from importing a module."""
        if self.engine.module is None:
            return None
        reason = (ask or cannot_import)(self.python, self.engine.module)
        if reason is None:
            return None
        return f"{self.name} is not installed for {self.python} ({reason}); name another one in E2E_WORKER_PYTHON"

    def serve_arguments(self, directory: Path) -> list[str]:
        """What `serve` gets for this lane; files that it needs are made in the directory."""
        python = self.python
        if self.name == "tokenspeed-transport":
            python = str(stand_in_python(directory / "python", self.python))
        return [
            *("--worker-python", python, "--worker-startup-timeout", str(self.startup_timeout)),
            *("--", *self.engine.arguments, *self.engine_args, "--data-parallel-size", str(self.ranks)),
        ]

    @property
    def environment(self) -> dict[str, str]:
        return VLLM_CPU_ENVIRONMENT if self.name == "vllm" and self.model is None else {}

    def make_model(self, directory: Path) -> str:
        """The model's directory or name; one with random weights is made when none is named."""
        if self.model is not None:
            return self.model
        make = ROOT / "scripts" / "make_tiny_models.py"
        subprocess.run([self.python, str(make), str(directory)], check=True, capture_output=True, timeout=300)
        return str(directory / "llama")


def lane_from(environment: Mapping[str, str]) -> Lane:
    """Raises ValueError for what names no lane."""
    name = environment.get("E2E_ENGINE") or "mock"
    if name not in ENGINES:
        raise ValueError(f"E2E_ENGINE={name}: must be one of {', '.join(ENGINES)}")
    engine = ENGINES[name]
    model = environment.get("E2E_MODEL") or None
    if model is None and name == "tokenspeed":
        raise ValueError("E2E_ENGINE=tokenspeed: needs a model; name a directory in E2E_MODEL")
    if model is None and name != "vllm":
        model = str(MODEL)
    further = environment.get("E2E_ENGINE_ARGS") or (VLLM_CPU_ARGS if model is None else "")
    return Lane(
        name=name,
        ranks=_number(environment, "E2E_ZMQ_ENGINE_COUNT", 2 if engine.simulated else 1, least=1),
        model=model,
        python=environment.get("E2E_WORKER_PYTHON") or sys.executable,
        engine_args=tuple(shlex.split(further)),
        min_selected=_number(environment, "E2E_MIN_SELECTED", 0, least=0),
        startup_timeout=float(environment.get("E2E_STARTUP_TIMEOUT") or (60 if engine.simulated else 600)),
    )


def _number(environment: Mapping[str, str], name: str, default: int, *, least: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{name}={text}: must be a number, at least {least}")
    return int(text)


def cannot_import(python: str, module: str) -> str | None:
    """Why that Python cannot import the module; None: it can. Only looks for it, which takes no time."""
    question = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        run = subprocess.run(
            [python, "-c", question], capture_output=True, text=True, timeout=60, cwd="/", env=environment
        )
    except OSError as error:
        return str(error.strerror)
    if run.returncode == 0:
        return None
    return (run.stderr.strip().splitlines() or ["it has no such module"])[-1]


def stand_in_python(path: Path, python: str) -> Path:
    """A program that passes for the Python of TokenSpeed's environment, and runs its transport alone."""
    path.write_text(
        f"#!{python}\n"
        "import os, sys\n"
        "if sys.argv[1] == '-c':  # serve asks whether the engine can be imported\n"
        '    print(\'{"smg": [], "ours": false}\', file=sys.stderr)\n'
        "else:\n"
        f"    os.execv({python!r}, [{python!r}, {str(HERE / 'tokenspeed_engine.py')!r}, *sys.argv[1:]])\n"
    )
    path.chmod(0o755)
    return path
