"""Gateways as processes: started with the same flags, on simulated ranks of their own, and accounted for."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from smg.bench import accounting, native
from smg.bench.simulator import Simulator
from smg.bench.turns import ROOT, BenchError
from smg.protocol import addresses

RIVAL = "smg==1.13.0"
READY_TIMEOUT = 90.0  # seconds; the Rust gateway binds its handshake port on a health probe


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A process that a client can be sent to. `simulator` has its ranks, where it has any."""

    name: str
    port: int
    simulator: Simulator | None = None
    _process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu(self) -> float:
        """CPU seconds so far, all threads and child processes."""
        return accounting.tree_cpu(self.pid)

    def rss_mb(self) -> float:
        return accounting.rss_mb(self.pid)

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Gateway(Server):
    """One gateway and its ranks: `python -m smg launch` with this source tree's smg, or with `python`'s own."""

    def __init__(
        self,
        name: str,
        model: Path,
        *,
        python: str = sys.executable,
        engine: str = "tokenspeed",
        token_ids: Sequence[int],
        rows: int,
        columns: int,
        ranks: int = 2,
        wrapper: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.port = free_port()
        self._directory = tempfile.mkdtemp(prefix="smg-bench-")  # 0700, as both gateways want it
        url = f"ipc://{self._directory}/engine-31000"
        self._log = open(f"{self._directory}/log", "w+b")  # noqa: SIM115  closed with the gateway
        self._process = subprocess.Popen(
            [
                *wrapper, python, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(self.port),
                "--worker-urls", url, "--backend", engine, "--zmq-engine-count", str(ranks),
                "--model-path", str(model), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
                "--log-level", "warn", "--health-check-interval-secs", "1",
            ],
            stdout=self._log,
            stderr=self._log,
            cwd="/",  # where no other smg is in reach
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            | ({"PYTHONPATH": str(ROOT)} if python == sys.executable else {}),
        )  # fmt: skip
        try:
            self.simulator = Simulator(
                addresses.handshake_address(addresses.worker_path(url)),
                engine=engine,
                ranks=ranks,
                elements=14,
                token_ids=token_ids,
                rows=rows,
                columns=columns,
            )
            accounting.keep_aside(self.simulator.pid)
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")

    def _wait_ready(self) -> None:
        until = time.monotonic() + READY_TIMEOUT
        while True:
            if self._process.poll() is not None or time.monotonic() > until:
                raise BenchError(f"{self.name} did not become ready:\n{self.log()[-3000:]}")
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
            try:
                connection.request("GET", "/readiness")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.1)

    def close(self) -> None:
        self._process.terminate()
        if self.simulator is not None:
            self.simulator.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class Floor(Server):
    """The C server that writes one ready-made event per stream and step: the kernel's share of every gateway."""

    name = "send"

    def __init__(self, step_ms: float, tokens: int) -> None:
        self.port = free_port()
        self._process = subprocess.Popen(
            [str(native.build("floor")), str(self.port), str(step_ms), str(tokens)], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
