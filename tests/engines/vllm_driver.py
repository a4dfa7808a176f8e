"""Real vLLM engines for the tests: processes of the `vllm` command, on this machine's CPUs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil

CONTEXT = 512  # tokens
PATIENCE = 300.0  # seconds for a start; one takes 20 to 30 on two cores that nothing else uses
COMMAND = Path(sys.executable).with_name("vllm")
CACHE = Path(sys.prefix) / "cache"  # of what the engines compile, for the next run
FLAGS = (
    "--dtype=float32",  # bfloat16 takes instructions that not every CPU has, and dies of it at the first request
    "--enforce-eager",
    f"--max-model-len={CONTEXT}",
    "--max-num-seqs=16",
    "--seed=1",
    "--distributed-executor-backend=uni",  # with the variable below: the model runs in the engine's own process
)
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
    "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"),
}


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Poll for what has no event to wait for; fails loudly."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


def free_port() -> int:
    """A port that nobody had a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Command:
    """A running `vllm serve`, in a process group of its own, whose output goes to a file."""

    def __init__(self, log: Path, model: Path, *flags: str) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [str(COMMAND), "serve", str(model), *FLAGS, *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **VARIABLES},
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        """End it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)

    def told(self) -> str:
        """The end of its output, for the message of a failure."""
        return f"the end of {self.log}:\n" + "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])


class Engines(Command):
    """`ranks` engines that dial `address`, a group's handshake address, all from one `vllm serve --headless`."""

    def __init__(self, log: Path, model: Path, ranks: int, address: str, *flags: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.ranks = ranks
        super().__init__(
            log,
            model,
            "--headless",
            f"--data-parallel-size={ranks}",
            f"--data-parallel-size-local={ranks}",
            f"--data-parallel-address={host}",
            f"--data-parallel-rpc-port={port}",
            *flags,
        )

    def processes(self) -> dict[int, psutil.Process]:
        """The engines by rank, as long as they live."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if title := re.match(r"VLLM::EngineCore(?:_DP(\d+))?\b", " ".join(child.cmdline())):
                    found[int(title[1] or 0)] = child
        return found

    def signal(self, number: int) -> None:
        """To the parent alone, which takes its engines with it when it ends."""
        self.process.send_signal(number)


class Server(Command):
    """vLLM's own OpenAI server."""

    def __init__(self, log: Path, model: Path, port: int, *flags: str) -> None:
        super().__init__(log, model, f"--port={port}", "--host=127.0.0.1", "--served-model-name=tiny", *flags)
        self.url = f"http://127.0.0.1:{port}"

    def wait_ready(self) -> None:
        def answers() -> bool:
            assert self.running, self.told()
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                    return bool(response.status == 200)
            except OSError:
                return False

        wait_until(answers, "vLLM's own server", PATIENCE)
