"""Who measures when: contestants take turns, and each receiver is a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # where the package lies
CHILD_LIMIT = 600  # seconds, after which a measurement's process is ended

Contestants = Mapping[str, Callable[[], float]]


class BenchError(Exception):
    """Something that a measurement needs is not there; the text says what to do."""


@dataclass(frozen=True)
class Plan:
    """What a run was asked for. `streams`, `ranks`, … are None where the part has values of its own."""

    repeats: int = 5
    quick: bool = False
    seed: int = 1
    only: tuple[str, ...] = ()
    streams: int | None = None
    step_ms: float | None = None
    tokens: int | None = None
    ranks: int | None = None
    engines: tuple[str, ...] = ("tokenspeed", "vllm")
    vllm_python: str | None = None
    rust_python: str | None = None
    progress: Callable[[str], None] = field(default=lambda line: None)

    def wants(self, name: str) -> bool:
        """Whether a measurement of that name is asked for."""
        return not self.only or any(part in name or name in part for part in self.only)

    def turns(self, what: str, contestants: Contestants) -> dict[str, list[float]]:
        """What each contestant gave, turn by turn and in both directions."""
        given: dict[str, list[float]] = {name: [] for name in contestants}
        for repeat in range(self.repeats):
            for name in list(contestants) if repeat % 2 == 0 else reversed(list(contestants)):
                value = contestants[name]()
                given[name].append(value)
                self.progress(f"{what}: {repeat + 1}/{self.repeats}, {name}: {value:.4g}")
        return given


def printed() -> Callable[[str], None]:
    """Progress as plain lines on stderr, each with the seconds since now."""
    begin = time.monotonic()
    return lambda line: print(f"[{time.monotonic() - begin:6.1f} s] {line}", file=sys.stderr, flush=True)


def environment() -> dict[str, str]:
    """A child's environment in which this smg is the one that is imported."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def child(module: str, *arguments: object, python: str = sys.executable) -> Any:
    """What a module of this package, run in a process of its own, prints as JSON."""
    command = [python, "-m", f"smg.bench.{module}", *map(str, arguments)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, env=environment(), timeout=CHILD_LIMIT)
    except subprocess.TimeoutExpired:
        raise BenchError(f"`{' '.join(command)}` did not end within {CHILD_LIMIT} s") from None
    if done.returncode:
        raise BenchError(f"`{' '.join(command)}` ended with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


class Receiver:
    """A receiver's process that measures a round whenever it is asked to, so that starting it costs once."""

    def __init__(self, module: str, *arguments: object, python: str = sys.executable) -> None:
        self._command = [python, "-m", f"smg.bench.{module}", *map(str, arguments), "--on-demand"]
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
            )
        except OSError as error:
            raise BenchError(f"{python}: {error.strerror}") from None

    def per_token(self) -> float:
        """µs of its CPU per token, in a round."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its status says more
        limit = threading.Timer(CHILD_LIMIT, self._process.kill)
        limit.start()
        try:
            for line in self._process.stdout:
                if line.startswith(b"{"):
                    result = json.loads(line)
                    return float(result["cpu"] / result["tokens"] * 1e6)
        finally:
            limit.cancel()
        raise BenchError(f"`{' '.join(self._command)}` ended with status {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
