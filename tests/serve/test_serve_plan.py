"""What serve decides before it starts anything: dry runs, and what it refuses."""

import argparse
import itertools
import sys

import pytest
from serve_process import MODEL

from smg.cli import main
from smg.http import flags
from smg.protocol import addresses
from smg.serve import LAUNCHERS, ports
from smg.serve.errors import ServeError
from smg.serve.plan import describe, make_plan, working_directory


@pytest.fixture(autouse=True)
def _sockets(monkeypatch):
    monkeypatch.setenv("SMG_ZMQ_SOCKET_DIR", "/run/smg")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(ports, "is_free", lambda port: True)


@pytest.fixture
def serve(capsys):
    """Run serve in this process: (exit status, stdout, stderr)."""

    def run(*arguments):
        try:
            status = main(["serve", *arguments])
        except SystemExit as ended:
            status = ended.code
        return (status, *capsys.readouterr())

    return run


def parsed(**more):
    given = {
        "model_path": "org/M", "data_parallel_size": 1, "tensor_parallel_size": None, "worker_python": "/e/python",
        "worker_host": "127.0.0.1", "worker_base_port": 31000, "zmq_handshake_address": None, "host": "127.0.0.1",
        "port": 8080, "prometheus_port": 29000,
    }  # fmt: skip
    return argparse.Namespace(**{**given, **more})


def plan(backend, args, backend_args=(), *, environment=None, is_free=lambda port: True):
    return make_plan(
        LAUNCHERS[backend], args, backend_args, environment=environment or {}, is_free=is_free, directory="/home/op"
    )


# ------------------------------------------------------------ plans


def test_the_launchers_data_parallel_size_makes_workers_and_the_engines_makes_ranks():
    made = plan("tokenspeed", parsed(data_parallel_size=2), ["--data-parallel-size", "3"])
    assert [worker.ranks for worker in made.workers] == [3, 3]
    assert made.ranks == 3
    assert len({worker.url for worker in made.workers}) == 2


def test_tokenspeed_workers_are_far_enough_apart_for_the_ports_that_the_engine_takes_beside_its_store():
    made = plan("tokenspeed", parsed(data_parallel_size=3), ["--data-parallel-size", "4"])
    stores = [worker.ports["store"] for worker in made.workers]
    assert all(later - earlier > 6 + 4 for earlier, later in itertools.pairwise(stores))


def test_gpus_are_shared_out_among_the_workers():
    made = plan(
        "tokenspeed",
        parsed(data_parallel_size=2, tensor_parallel_size=2),
        ["--data-parallel-size", "2"],
        environment={"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
    )
    assert [worker.gpus for worker in made.workers] == [list("0123"), list("4567")]
    assert [worker.environment["CUDA_VISIBLE_DEVICES"] for worker in made.workers] == ["0,1,2,3", "4,5,6,7"]


def test_too_few_gpus_are_refused():
    with pytest.raises(ServeError, match=r"worker 1 needs GPUs 1\.\.1 .*allows 1"):
        plan("vllm", parsed(data_parallel_size=2), environment={"CUDA_VISIBLE_DEVICES": "0"})


def test_two_workers_with_one_handshake_port_are_refused_and_both_are_named(monkeypatch):
    monkeypatch.setattr(addresses, "handshake_port", lambda path: 20001)
    with pytest.raises(ServeError) as refused:
        plan("vllm", parsed(data_parallel_size=2))
    assert "port 20001" in str(refused.value)
    for name in ("worker 0 (ipc:///run/smg/engine-31000)", "worker 1 (ipc:///run/smg/engine-31001)"):
        assert name in str(refused.value)


@pytest.mark.parametrize(
    ("args", "holders"),
    [
        ({"zmq_handshake_address": "tcp://127.0.0.1:31233"}, ("the store of worker 0", "the handshake of worker 0")),
        ({"zmq_handshake_address": "tcp://127.0.0.1:31000"}, ("the own port of worker 0", "the handshake of worker 0")),
        ({"port": 31233}, ("the store of worker 0", "the router's --port")),
        ({"prometheus_port": 31000}, ("the own port of worker 0", "the router's --prometheus-port")),
        ({"port": 9000, "prometheus_port": 9000}, ("--port", "--prometheus-port")),
        (
            {"zmq_handshake_address": "tcp://127.0.0.1:30500", "data_parallel_size": 2},
            ("the handshake of worker 0", "the handshake of worker 1"),
        ),
    ],
)
def test_a_port_that_two_need_is_refused_and_both_are_named(args, holders):
    with pytest.raises(ServeError) as refused:
        plan("tokenspeed", parsed(**args))
    assert all(holder in str(refused.value) for holder in holders), refused.value


def test_a_store_on_another_workers_port_is_refused():
    only = {31000, 31233, 31466}  # all other ports are taken
    with pytest.raises(ServeError, match=r"port 31233 is the store of worker 0 .* and the own port of worker 1"):
        plan("tokenspeed", parsed(data_parallel_size=2), is_free=only.__contains__)


def test_engines_run_where_no_module_smg_is_found(tmp_path):
    elsewhere = "/run/smg"
    assert working_directory(str(tmp_path), elsewhere) == str(tmp_path)
    (tmp_path / "smg").mkdir()
    assert working_directory(str(tmp_path), elsewhere) == elsewhere
    assert working_directory(str(tmp_path / "smg"), elsewhere) == elsewhere


# ------------------------------------------------------------ dry runs


def test_a_dry_run_prints_commands_ports_and_environment_and_starts_nothing(serve, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("PYTHONPATH", "/router")
    status, out, err = serve(
        *("--backend", "tokenspeed", "--model", "org/M", "--data-parallel-size", "2", "--worker-python", "/e/python"),
        *("--dry-run", "--", "--port", "5", "--max-num-seqs", "64"),
    )
    assert (status, err) == (0, "")
    rows = dict(
        line.strip().split(None, 1) for line in out.split("worker 1\n")[0].splitlines() if line.startswith("  ")
    )
    assert rows["url"] == "ipc:///run/smg/engine-31000"
    assert rows["handshake"] == "tcp://127.0.0.1:21205"
    assert rows["ports"] == "31000 (own port), 31233 (store), 21205 (handshake)"
    assert rows["gpus"] == "2"
    assert "CUDA_VISIBLE_DEVICES=2 " in rows["sets"]
    assert "PYTHONSAFEPATH=1" in rows["sets"]
    assert rows["unsets"] == "PYTHONPATH"
    assert rows["command"].startswith("/e/python -m tokenspeed.cli serve --headless --model org/M --port 31000 ")
    assert rows["command"].endswith(" --max-num-seqs 64")
    assert "note: engine argument '--port 5' is left out: the launcher sets it" in out
    assert "python -m smg launch --worker-urls ipc:///run/smg/engine-31000 ipc:///run/smg/engine-31009" in out
    assert "--port 8080" in out


@pytest.mark.parametrize("backend", list(LAUNCHERS))
def test_every_backend_has_a_dry_run(serve, backend):
    status, out, _ = serve("--backend", backend, "--model", "org/M", "--dry-run")
    assert status == 0
    assert "worker 0" in out


def test_what_serve_does_not_know_goes_to_the_engine_in_its_order(serve):
    given = ["--max-num-seqs", "64", "--kv-cache-dtype=fp8", "-O3", "--no-enable-chunked-prefill"]
    _, out, _ = serve("--backend", "vllm", *given[:3], "--model", "org/M", "--dry-run", *given[3:], "--", "--swap", "1")
    assert f"{' '.join(given)} --swap 1" in out


def test_router_options_are_taken_with_the_rust_gateways_prefix_too(serve):
    _, out, _ = serve(
        *("--backend", "mock", "--model", "org/M", "--dry-run", "--router-prometheus-port", "29001"),
        *("--router-policy=cache_aware", "--router-selector", "a=b", "--router-retry-max-retries", "1"),
    )
    assert "--prometheus-port 29001" in out
    assert "--router" not in out


def test_help_names_every_option_that_is_serves_own(serve):
    status, out, _ = serve("--help")
    assert status == 0
    own = ["--worker-python", "--worker-restart", "--log-dir", "--dry-run", "--data-parallel-size", "--policy"]
    assert all(f"\n  {option}" in out for option in own)
    assert "--disable-circuit-breaker" not in out  # taken, but means nothing here


def test_the_defaults_are_the_rust_gateways(serve, monkeypatch):
    monkeypatch.setenv("SMG_DEFAULT_BACKEND", "mock")
    _, out, _ = serve("--model", "org/M", "--dry-run")
    assert "engine-31000" in out
    assert "--host 127.0.0.1 --port 8080" in out


def test_the_description_names_a_given_handshake_address():
    args = parsed(zmq_handshake_address="tcp://127.0.0.1:30500")
    assert "--zmq-handshake-address tcp://127.0.0.1:30500" in describe(plan("vllm", args), args, {})


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize("mode", ["grpc", "http"])
def test_another_connection_mode_is_refused_and_points_to_the_rust_gateway(serve, mode):
    status, _, err = serve("--backend", "vllm", "--model", "org/M", "--connection-mode", mode)
    assert status == 2
    assert f"{mode}: this router talks to engines over zmq only" in err
    assert "Rust gateway" in err


def test_an_engine_that_the_router_does_not_speak_is_refused_after_its_dry_run(serve, monkeypatch):
    import smg.engine.group

    monkeypatch.setattr(smg.engine.group, "BACKENDS", {"tokenspeed": None})
    assert serve("--backend", "sglang", "--model", "org/M", "--dry-run")[0] == 0
    status, _, err = serve("--backend", "sglang", "--model", "org/M")
    assert status == 1
    assert "the router does not speak sglang; it speaks tokenspeed" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data-parallel-size", "0"), "at least 1"),
        (("--tensor-parallel-size", "-2"), "at least 1"),
        (("--worker-base-port", "65536"), "--worker-base-port 65536"),
        (("--worker-host", "0.0.0.0"), "worker host 0.0.0.0"),
        (("--zmq-handshake-address", "tcp://127.0.0.1:0"), "--zmq-handshake-address"),
        (("--", "--data-parallel-size", "many"), "--data-parallel-size many"),
    ],
)
def test_what_cannot_be_is_one_clear_line(serve, arguments, message):
    status, out, err = serve("--backend", "tokenspeed", "--model", "org/M", *arguments)
    assert status in (1, 2)
    assert message in err.splitlines()[-1]
    assert out == ""


def test_a_model_and_an_engine_have_to_be_named(serve, monkeypatch):
    monkeypatch.delenv("SMG_DEFAULT_BACKEND", raising=False)
    assert "--backend" in serve("--model", str(MODEL))[2]
    assert "--model" in serve("--backend", "mock")[2]


def test_other_commands_refuse_what_they_do_not_know(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["mock", "--worker-url", "ipc:///run/smg/x", "--max-num-seqs", "1"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --max-num-seqs 1" in capsys.readouterr().err


def test_the_rust_gateways_router_flags_are_taken(serve):
    given = [*flags.SWITCHES, *(word for name in flags.VALUES if name != "--log-dir" for word in (name, "1"))]
    status, out, _ = serve("--backend", "mock", "--model", "org/M", "--dry-run", *given)
    assert status == 0
    assert not any(name in out for name in ("--retry-initial-backoff-ms", "--disable-circuit-breaker"))
    assert sys.executable in out
