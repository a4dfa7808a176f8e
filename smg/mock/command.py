"""`python -m smg mock`: simulated engine ranks from the command line."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys

from smg.errors import Error
from smg.mock.settings import Settings, add_settings
from smg.mock.simulator import RANK_OPERATIONS, Simulator

SUMMARY = "simulated engine ranks that dial a router, without GPU or model"

DESCRIPTION = """\
Run simulated engine ranks in one process. They dial the router's handshake address, which follows from the
worker URL as the router derives it, register, take requests and stream replies with the timing of an engine
that batches continuously. Start order is free: a rank waits until the router is there.

  two ranks, 10 ms per step, answering in English from a tokenizer:
    python -m smg mock --worker-url ipc:///run/user/1000/smg/engine-31000 --ranks 2 --model-path DIR
  the same two ranks as processes of their own, so that one can be killed:
    python -m smg mock --worker-url ... --start-index 0 --data-parallel-size 2
    python -m smg mock --worker-url ... --start-index 1 --data-parallel-size 2
  two ranks of vLLM, and two that step together as those of an MoE model:
    python -m smg mock --worker-url ... --backend vllm --ranks 2
    python -m smg mock --worker-url ... --backend vllm --lockstep --ranks 2
  as fast as it goes, for measuring a router:
    python -m smg mock --worker-url ... --ranks 2 --step-ms 0 --max-running 1024
  rank 1 dies after its hundredth output frame:
    python -m smg mock --worker-url ... --ranks 2 --fault 'die rank=1 after_frames=100'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the simulator's options, description and list of operations."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _operations_help()
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Run the simulator until it is told to end. Returns the exit status."""
    try:
        simulator = Simulator(**dataclasses.asdict(Settings.from_args(args)))
    except (ValueError, Error) as error:
        print(f"smg mock: {error}", file=sys.stderr)
        return 2
    return simulator.run_process()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m smg.mock")
    add_arguments(parser)
    return run(parser.parse_args(argv))


def _operations_help() -> str:
    lines = [
        "operations, for --fault 'OP rank=I KEY=VALUE' and, with --control, as JSON lines on stdin such as",
        '{"id": 1, "op": "die", "rank": 0}. Without a rank they go to all ranks; after_frames=N or',
        "after_adds=N puts one off until the rank has sent or received that many more:",
    ]
    for name, operation in RANK_OPERATIONS.items():
        parameters = list(inspect.signature(operation).parameters.values())[1:]
        shown = " ".join(p.name if p.default is p.empty else f"[{p.name}={p.default}]" for p in parameters)
        lines.append(f"  {name} {shown}".rstrip())
        lines.append(f"      {(inspect.getdoc(operation) or '').splitlines()[0]}")
    lines += [
        "  exit [code=1]",
        "      End the process at once.",
        "  requests",
        "      Decoded ADDs (--record).",
    ]
    return "\n".join(lines)
