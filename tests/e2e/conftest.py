"""The lane of this run, its server, and the clients that talk to it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
from e2e_faults import split_faulty, too_few
from e2e_lane import Lane, lane_from
from serve_process import ServeProcess, private_directory

HERE = Path(__file__).parent
TIMEOUT = 120.0  # seconds for one request


def _lane() -> Lane:
    try:
        return lane_from(os.environ)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def _ours(items: list[pytest.Item]) -> list[pytest.Item]:
    return [item for item in items if HERE in item.path.parents]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours, lane = _ours(items), _lane()
    for item in ours:  # the first of them waits for the engine too
        item.add_marker(pytest.mark.timeout(lane.startup_timeout + 2 * TIMEOUT))
    _, faulty = split_faulty(ours, lane)
    if faulty:
        items[:] = [item for item in items if item not in faulty]
        config.hook.pytest_deselected(items=faulty)


def pytest_collection_finish(session: pytest.Session) -> None:
    complaint = too_few(len(_ours(session.items)), _lane())
    if complaint:
        raise pytest.UsageError(complaint)


@pytest.fixture(scope="session")
def lane() -> Lane:
    return _lane()


@pytest.fixture(scope="session")
def server(lane: Lane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """`serve` with the lane's engine."""
    missing = lane.missing()
    if missing is not None:
        if lane.min_selected:
            pytest.fail(missing)
        pytest.skip(missing)
    files = tmp_path_factory.mktemp("lane")
    with private_directory() as directory:
        process = ServeProcess(
            directory,
            *lane.serve_arguments(files),
            backend=lane.engine.backend,
            model=lane.make_model(files),
            env=lane.environment,
        )
        try:
            process.wait_ready(lane.startup_timeout)
            yield process
        finally:
            process.close()


@pytest.fixture
def client(server: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="not-used", max_retries=0, timeout=TIMEOUT) as client:
        yield client


@pytest.fixture
async def async_client(server: ServeProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="not-used", max_retries=0, timeout=TIMEOUT
    ) as client:
        yield client
