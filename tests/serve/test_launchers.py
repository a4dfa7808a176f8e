"""Launch commands: each engine's own spelling, what the launcher owns, the operator's share, GPUs and environment."""

import argparse
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import smg
from smg.serve import (
    LAUNCHERS,
    MockWorkerLauncher,
    SglangWorkerLauncher,
    TokenspeedWorkerLauncher,
    VllmWorkerLauncher,
)
from smg.serve.arguments import has_flag, size_of, split_owned, value_of
from smg.serve.errors import ServeError
from smg.serve.gpus import devices_of, partition

HOST = "127.0.0.1"
ALL = list(LAUNCHERS.values())


@pytest.fixture(autouse=True)
def _sockets(monkeypatch):
    monkeypatch.setenv("SMG_ZMQ_SOCKET_DIR", "/run/smg")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def arguments(**more):
    return argparse.Namespace(connection_mode="zmq", model="org/M", **more)


def test_tokenspeed_is_told_its_ports_and_where_to_dial():
    command = TokenspeedWorkerLauncher().build_command(arguments(worker_python="/e/python"), [], HOST, 31000)
    assert command == [
        *("/e/python", "-m", "tokenspeed.cli", "serve", "--headless", "--model", "org/M"),
        *("--port", "31000", "--dist-init-addr", "127.0.0.1:31233"),
        *("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", "21205", "--zmq-engine-index", "0"),
        *("--grammar-backend", "xgrammar", "--enable-output-logprobs"),
    ]


def test_vllm_is_told_how_many_ranks_and_where_to_dial():
    command = VllmWorkerLauncher().build_command(arguments(), ["--data-parallel-size", "4"], HOST, 31000)
    assert command == [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "org/M", "--headless"),
        *("--data-parallel-size", "4", "--data-parallel-size-local", "4"),
        *("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", "21205"),
    ]


def test_sglang_is_told_its_port_and_where_to_dial():
    command = SglangWorkerLauncher().build_command(arguments(), ["--mem-fraction-static", "0.8"], HOST, 31000)
    assert command == [
        *(sys.executable, "-m", "smg_grpc_servicer.sglang.headless"),
        *("--zmq-handshake-address", "tcp://127.0.0.1:21205", "--zmq-engine-index", "0"),
        *("--model-path", "org/M", "--port", "31000", "--mem-fraction-static", "0.8"),
    ]


def test_mock_gets_the_url_the_address_and_the_ranks():
    command = MockWorkerLauncher().build_command(arguments(), ["--data-parallel-size=2", "--step-ms", "5"], HOST, 31000)
    assert command == [
        *(sys.executable, "-m", "smg", "mock", "--worker-url", "ipc:///run/smg/engine-31000"),
        *("--handshake-address", "tcp://127.0.0.1:21205", "--ranks", "2", "--model-path", "org/M"),
        *("--grammar-backend", "--enable-output-logprobs", "--step-ms", "5"),
    ]


def test_a_given_handshake_address_is_dialed_instead_of_the_derived_one():
    args = arguments(zmq_handshake_address="tcp://10.0.0.7:30500")
    command = TokenspeedWorkerLauncher().build_command(args, [], HOST, 31000)
    assert value_of(command, ["--data-parallel-address"]) == "10.0.0.7"
    assert value_of(command, ["--data-parallel-rpc-port"]) == "30500"
    assert "tcp://10.0.0.7:30500" in SglangWorkerLauncher().build_command(args, [], HOST, 31000)


def test_every_worker_url_is_the_rust_gateways():
    assert {launcher.worker_url(arguments(), HOST, 31000) for launcher in ALL} == {"ipc:///run/smg/engine-31000"}


def test_a_model_that_is_a_path_is_given_in_full(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    args = argparse.Namespace(model_path="m")
    for launcher in ALL:
        assert str(tmp_path / "m") in launcher.build_command(args, [], HOST, 31000)


def test_workers_listen_on_loopback_only():
    with pytest.raises(ServeError, match=r"0\.0\.0\.0"):
        TokenspeedWorkerLauncher().build_command(arguments(), [], "0.0.0.0", 31000)


# ------------------------------------------------------------ what the launcher owns


@pytest.mark.parametrize("launcher", ALL, ids=LAUNCHERS)
def test_an_owned_flag_is_there_once_with_the_launchers_value_however_it_is_given(launcher):
    plain = launcher.build_command(arguments(), [], HOST, 31000)
    for flag, takes_value in launcher.owned.items():
        if flag in (*launcher.data_parallel, "-dp"):
            continue
        underscored = flag[:2] + flag[2:].replace("-", "_")
        for spelled in [flag, "7"], [f"{flag}=7"], [flag], [underscored, "7"]:
            if len(spelled) == 2 and not takes_value:
                continue
            command = launcher.build_command(arguments(), [*spelled, "--other", "1"], HOST, 31000)
            assert command == [*plain, "--other", "1"], spelled
            assert launcher.split(arguments(), [*spelled, "--other", "1"])[1] == [" ".join(spelled)]


def test_a_boolean_flag_takes_nothing_with_it():
    command = TokenspeedWorkerLauncher().build_command(arguments(), ["--headless", "positional"], HOST, 31000)
    assert command[-1] == "positional"


def test_what_the_operator_set_is_not_set_again_by_default():
    args = ["--grammar-backend=none", "--enable-output-logprobs"]
    command = TokenspeedWorkerLauncher().build_command(arguments(), args, HOST, 31000)
    assert command[-2:] == args
    assert "xgrammar" not in command
    assert command.count("--enable-output-logprobs") == 1


def test_the_tensor_parallel_size_of_serve_takes_the_place_of_the_engines():
    args = arguments(tensor_parallel_size=4)
    for launcher, theirs in (TokenspeedWorkerLauncher(), "--tp"), (VllmWorkerLauncher(), "-tp"):
        command = launcher.build_command(args, [theirs, "2"], HOST, 31000)
        assert value_of(command, ["--tensor-parallel-size"]) == "4"
        assert theirs not in command
        assert [theirs, "2"] == launcher.build_command(arguments(), [theirs, "2"], HOST, 31000)[-2:]


TOKENS = st.sampled_from(["--a", "--b", "--b=1", "-c", "--d_e", "1", "-1", "x", "--f=--b", "--"])


@given(st.lists(TOKENS))
def test_splitting_keeps_order_and_loses_nothing(tokens):
    kept, taken = split_owned(tokens, {"--b": True, "-c": False, "--d-e": True})
    assert not any(has_flag(kept, flag) for flag in ("--b", "-c", "--d-e"))
    rest = iter(tokens)
    assert all(token in rest for token in kept)  # a subsequence
    assert len(kept) + sum(len(words.split()) for words in taken) == len(tokens)


def test_the_last_of_several_values_counts():
    given = ["--n", "1", "--n=2", "-m", "7"]
    assert (value_of(given, ["--n"]), value_of(given, ["--n", "-m"]), value_of(given, ["-x"])) == ("2", "7", None)


# ------------------------------------------------------------ ranks


def test_an_engine_level_data_parallel_size_is_the_ranks_of_one_worker():
    for launcher in (TokenspeedWorkerLauncher(), VllmWorkerLauncher(), MockWorkerLauncher()):
        assert launcher.ranks(["--data-parallel-size", "3"]) == 3
        assert launcher.ranks([]) == 1
    assert VllmWorkerLauncher().ranks(["-dp", "2"]) == 2


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", ""])
def test_a_size_that_is_none_is_refused(value):
    with pytest.raises(ServeError, match="--data-parallel-size"):
        size_of([f"--data-parallel-size={value}"], ["--data-parallel-size"])


@pytest.mark.parametrize("flag", ["--data-parallel-size", "--dp-size", "--dp"])
def test_sglang_has_one_rank(flag):
    with pytest.raises(ServeError, match="one rank"):
        SglangWorkerLauncher().ranks([flag, "2"])


def test_mock_speaks_the_wire_that_it_is_told_to():
    assert MockWorkerLauncher().router_wire([]) == "tokenspeed"
    assert MockWorkerLauncher().router_wire(["--backend", "vllm"]) == "vllm"
    assert "--backend" in MockWorkerLauncher().build_command(arguments(), ["--backend", "vllm"], HOST, 31000)


# ------------------------------------------------------------ GPUs and environment


@pytest.mark.parametrize(
    ("launcher", "more", "backend_args", "count"),
    [
        (TokenspeedWorkerLauncher(), {}, [], 1),
        (TokenspeedWorkerLauncher(), {"tensor_parallel_size": 2}, ["--data-parallel-size", "2"], 4),
        (TokenspeedWorkerLauncher(), {}, ["--attn-tp-size", "2", "--data-parallel-size", "2"], 4),
        (TokenspeedWorkerLauncher(), {}, ["--tp", "2", "--world-size", "8"], 8),
        (VllmWorkerLauncher(), {}, ["-tp", "2", "-pp", "2", "-dp", "2"], 8),
        (SglangWorkerLauncher(), {}, ["--tp-size", "4"], 4),
        (MockWorkerLauncher(), {"tensor_parallel_size": 8}, ["--data-parallel-size", "2"], 0),
    ],
)
def test_a_worker_takes_tensor_times_pipeline_times_ranks_gpus(launcher, more, backend_args, count):
    assert launcher.gpus_per_worker(arguments(**more), backend_args) == count


def test_each_worker_sees_its_share_of_what_is_visible():
    args = arguments(gpus_per_worker=2)
    visible = {"CUDA_VISIBLE_DEVICES": "4, GPU-b,6,7"}
    shares = [TokenspeedWorkerLauncher().gpu_env(args, worker, visible)["CUDA_VISIBLE_DEVICES"] for worker in (0, 1)]
    assert shares == ["4,GPU-b", "6,7"]
    with pytest.raises(ServeError, match=r"worker 2 needs GPUs 4\.\.5 .* allows 4 \(4,GPU-b,6,7\)"):
        TokenspeedWorkerLauncher().gpu_env(args, 2, visible)


def test_the_tensor_parallel_size_alone_makes_a_share_for_a_caller_that_says_no_more():
    environment = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    found = VllmWorkerLauncher().gpu_env(arguments(tensor_parallel_size=2), 1, environment)
    assert found["CUDA_VISIBLE_DEVICES"] == "2,3"


@given(st.integers(0, 16), st.integers(1, 4), st.integers(1, 5))
def test_shares_do_not_overlap_and_are_refused_when_there_are_too_few(available, per_worker, workers):
    devices = [str(device) for device in range(available)]
    if workers * per_worker > available:
        with pytest.raises(ServeError):
            [partition(devices, worker, per_worker) for worker in range(workers)]
    else:
        shares = [partition(devices, worker, per_worker) for worker in range(workers)]
        assert sum(shares, []) == devices[: workers * per_worker]


def test_without_the_variable_the_machines_devices_are_shared_out(tmp_path):
    assert devices_of({}, tmp_path) is None
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert devices_of({}, tmp_path) == ["0", "1"]
    assert devices_of({"CUDA_VISIBLE_DEVICES": "5"}, tmp_path) == ["5"]
    assert devices_of({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def test_no_gpu_is_hidden_from_a_worker_that_is_not_told_of_any():
    assert "CUDA_VISIBLE_DEVICES" not in MockWorkerLauncher().gpu_env(arguments(gpus_per_worker=0), 0, {"A": "b"})
    assert partition(None, 3, 4) is None


def test_an_engine_finds_only_its_own_environments_modules():
    given = {"PYTHONPATH": "/router", "HOME": "/h"}
    for launcher in (TokenspeedWorkerLauncher(), VllmWorkerLauncher(), SglangWorkerLauncher()):
        assert launcher.start_env(given) == {"HOME": "/h", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    assert MockWorkerLauncher().start_env(given)["PYTHONPATH"] == str(Path(smg.__file__).parents[1])
