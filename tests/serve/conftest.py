"""`python -m smg serve` as a process, with simulated engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from serve_process import ServeProcess


@pytest.fixture
def start(ipc_dir: Path) -> Iterator[Callable[..., ServeProcess]]:
    """Start serve: `start("--data-parallel-size", "2", "--", "--step-ms", "1")`; ended with the test."""
    with ExitStack() as stack:

        def run(*arguments: str, **options) -> ServeProcess:
            process = ServeProcess(ipc_dir, *arguments, **options)
            stack.callback(process.close)
            return process

        yield run
