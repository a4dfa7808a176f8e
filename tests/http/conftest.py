"""A service that answers on a real port, with simulated ranks behind it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from scripted import MODEL
from serving import Served

from smg.http import tokenizer

# Reading the model takes longer than everything else a service does at its start.
_model = tokenizer.load(str(MODEL))


@pytest.fixture(scope="session", autouse=True)
def _model_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "load", lambda *paths: copy.copy(_model))
        yield


@pytest.fixture
def serve(ipc_dir: Path) -> Iterator[Callable[..., Served]]:
    """Start a service: `serve(front={...}, ranks=2, mock={...}, **ServiceOptions)`; mock=None: no ranks."""
    with ExitStack() as stack:

        def start(ranks: int = 2, mock: dict[str, Any] | None = {}, **options: Any) -> Served:  # noqa: B006
            served = Served(ipc_dir, options, ranks, mock)
            stack.callback(served.close)
            return served

        yield start


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service for tests that change nothing about it."""
    directory = tmp_path_factory.mktemp("s")
    directory.chmod(0o700)
    served = Served(directory, {}, 2, {"enable_output_logprobs": True, "grammar_backend": True, "step_ms": 0.5})
    yield served
    served.close()
