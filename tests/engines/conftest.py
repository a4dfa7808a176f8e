"""The engines' own code, in processes of its own: `make engines` sets up what these tests need."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from tokenspeed_driver import Launcher, Rank

import smg

# Outside of the engines' environment these would not even import.
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_vllm_*.py"]
MAKE_MODELS = Path(__file__).resolve().parents[2] / "scripts" / "make_tiny_models.py"


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of two models with random weights: `llama`, and `moe`, whose ranks run in lockstep."""
    directory = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, str(MAKE_MODELS), str(directory)], check=True, capture_output=True, timeout=300)
    return directory


@pytest.fixture(scope="session")
def tokenspeed() -> Iterator[Launcher]:
    """TokenSpeed's own transport, imported once; ranks are forked from there."""
    with tempfile.TemporaryDirectory(prefix="smg-") as directory, closing(Launcher(Path(directory))) as launcher:
        yield launcher


@pytest.fixture(scope="module")
def decoder(tokenspeed: Launcher) -> Iterator[Rank]:
    """A rank that never dials, only decodes."""
    with closing(tokenspeed.start()) as rank:
        yield rank


@pytest.fixture
def start_rank(tokenspeed: Launcher) -> Iterator[Callable[[], Rank]]:
    """Start ranks, which end with the test."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(tokenspeed.start()))


@pytest.fixture
def make_group(ipc_dir: Path) -> Iterator[Callable[..., smg.EngineGroup]]:
    """Make a group of two TokenSpeed ranks that nobody has dialed yet."""
    with ExitStack() as stack:

        def make(ranks: int = 2) -> smg.EngineGroup:
            url = f"ipc://{ipc_dir}/group"
            return stack.enter_context(
                smg.EngineGroup(url, backend="tokenspeed", ranks=ranks, handshake_address="tcp://127.0.0.1:0")
            )

        yield make


@pytest.fixture
def live(
    make_group: Callable[..., smg.EngineGroup], start_rank: Callable[[], Rank]
) -> tuple[smg.EngineGroup, list[Rank]]:
    """A live group and its two ranks."""
    group = make_group()
    ranks = [start_rank(), start_rank()]
    for index, rank in enumerate(ranks):
        rank.dial(group, index)
    for rank in ranks:
        rank.next("dialed")
    group.wait_ready(30)
    return group, ranks
