"""Lanes, the table of known faults and the floor, which need no engine."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from e2e_faults import KNOWN_FAULTS, Fault, split_faulty, too_few
from e2e_lane import ENGINES, VLLM_CPU_ARGS, lane_from
from serve_process import MODEL, ROOT

QWEN = {"E2E_ENGINE": "tokenspeed", "E2E_MODEL": "/models/Qwen/Qwen3-4B-Instruct-2507"}
ITEMS = [
    SimpleNamespace(name="test_chat[1]", fixturenames=["client", "server", "lane"]),
    SimpleNamespace(name="test_async", fixturenames=["async_client"]),
    SimpleNamespace(name="test_of_the_table", fixturenames=["tmp_path"]),
]


def names(items):
    return [item.name for item in items]


def test_without_a_word_it_is_two_simulated_ranks_with_the_demo_model():
    lane = lane_from({})
    assert (lane.name, lane.ranks, lane.model) == ("mock", 2, str(MODEL))
    assert lane.missing() is None


@pytest.mark.parametrize("name", list(ENGINES))
def test_every_lane_can_be_named(name, tmp_path):
    lane = lane_from({"E2E_ENGINE": name, "E2E_ZMQ_ENGINE_COUNT": "3", "E2E_MODEL": "/m"})
    assert (lane.ranks, lane.model, lane.grouped) == (3, "/m", True)
    arguments = lane.serve_arguments(tmp_path)
    assert arguments[-2:] == ["--data-parallel-size", "3"]
    assert arguments.index("--") < len(arguments) - 2


def test_vllm_without_a_model_runs_a_tiny_one_on_cpus():
    lane = lane_from({"E2E_ENGINE": "vllm"})
    assert lane.model is None
    assert lane.engine_args == tuple(VLLM_CPU_ARGS.split())
    assert lane.environment["HF_HUB_OFFLINE"] == "1"
    assert lane_from({"E2E_ENGINE": "vllm", "E2E_MODEL": "/m"}).engine_args == ()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"E2E_ENGINE": "llama.cpp"}, "E2E_ENGINE=llama.cpp: must be one of mock"),
        ({"E2E_ENGINE": "tokenspeed"}, "E2E_MODEL"),
        ({"E2E_ZMQ_ENGINE_COUNT": "0"}, "E2E_ZMQ_ENGINE_COUNT=0"),
        ({"E2E_MIN_SELECTED": "-1"}, "E2E_MIN_SELECTED=-1"),
    ],
)
def test_what_names_no_lane_is_refused(environment, message):
    with pytest.raises(ValueError, match=message):
        lane_from(environment)


def test_a_lane_whose_engine_is_not_there_says_so():
    lane = lane_from({"E2E_ENGINE": "vllm", "E2E_WORKER_PYTHON": "/e/python"})
    assert lane.missing(lambda python, module: None) is None
    missing = lane.missing(lambda python, module: f"no {module}")
    assert missing == "vllm is not installed for /e/python (no vllm); name another one in E2E_WORKER_PYTHON"
    assert "No such file" in lane_from({"E2E_ENGINE": "vllm", "E2E_WORKER_PYTHON": "/nowhere"}).missing()


# ------------------------------------------------------------ known faults


def test_a_known_fault_leaves_out_the_tests_that_need_the_engine_and_no_others():
    kept, left_out = split_faulty(ITEMS, lane_from({**QWEN, "E2E_ZMQ_ENGINE_COUNT": "2"}))
    assert names(left_out) == ["test_chat[1]", "test_async"]
    assert names(kept) == ["test_of_the_table"]


@pytest.mark.parametrize(
    "environment",
    [
        {**QWEN, "E2E_ZMQ_ENGINE_COUNT": "1"},
        {**QWEN, "E2E_ZMQ_ENGINE_COUNT": "2", "E2E_MODEL": "/models/Llama-3.1-8B-Instruct"},
        {**QWEN, "E2E_ZMQ_ENGINE_COUNT": "2", "E2E_ENGINE": "vllm"},
        {},
    ],
)
def test_a_fault_concerns_its_own_engine_grouping_and_model_only(environment):
    assert split_faulty(ITEMS, lane_from(environment)) == (ITEMS, [])


def test_a_fault_may_concern_some_tests_of_any_model_or_grouping():
    faults = [Fault("mock", None, None, "test_chat*", "for this test")]
    for count in ("1", "2"):
        kept, left_out = split_faulty(ITEMS, lane_from({"E2E_ZMQ_ENGINE_COUNT": count}), faults)
        assert names(left_out) == ["test_chat[1]"]
        assert len(kept) == 2


def test_every_known_fault_names_a_lane_and_its_reason():
    for fault in KNOWN_FAULTS:
        assert fault.engine in ENGINES
        assert fault.reason


# ------------------------------------------------------------ the floor


def test_fewer_tests_than_the_floor_are_too_few():
    lane = lane_from({"E2E_MIN_SELECTED": "10"})
    assert too_few(10, lane) is None
    assert "9 end-to-end tests are selected for mock x 2" in too_few(9, lane)
    assert too_few(0, lane_from({})) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "status", "message"),
    [
        ({"E2E_MIN_SELECTED": "10"}, 0, ""),
        ({"E2E_MIN_SELECTED": "1000"}, 4, "E2E_MIN_SELECTED asks for 1000"),
        ({**QWEN, "E2E_ZMQ_ENGINE_COUNT": "2", "E2E_MIN_SELECTED": "60"}, 4, "E2E_MIN_SELECTED asks for 60"),
        ({"E2E_ENGINE": "nope"}, 4, "E2E_ENGINE=nope"),
    ],
)
def test_a_run_with_too_few_tests_fails_before_its_first_test(environment, status, message):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", str(Path(__file__).parent)],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == status, run.stdout + run.stderr
    assert message in run.stderr + run.stdout
