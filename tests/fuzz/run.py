"""Fuzzes one decoder: python tests/fuzz/run.py TARGET [--executions N] [--seconds S] [--seed N] [--keep DIR]

Builds the targets into --build (a temporary directory when not given), starts itself again with the sanitizers'
runtime, and mutates the vectors, guided by coverage. Ends with 0 and one line of figures; a finding ends it with
the sanitizer's report, another status, and the input in --crash, which `--replay FILE` runs by itself.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import compile_targets  # noqa: E402
import sanitizers  # noqa: E402
import vectors  # noqa: E402

TARGETS = ("tokenspeed", "vllm", "overread")  # the last is wrong on purpose
RUNNING = "SMG_FUZZ_RUNNING"


def seeds(target: str, longest: int) -> list[bytes]:
    """The vectors as inputs of the target, good ones and those to be refused."""
    if target != "vllm":
        found = [v.frame for v in vectors.load("tokenspeed") if v.kind.startswith("slim_")]
    else:
        kinds = ("outputs", "utility_output", "dp_control")
        found = [parts_input(v.frame, v.aux) for v in vectors.load(target) if v.kind.startswith(kinds)]
    return [data for data in found if len(data) <= longest]


def parts_input(frame: bytes, aux: tuple[bytes, ...] = ()) -> bytes:
    """A message of several parts as one input; see `fuzz_core` in _fuzz.pyx."""
    return bytes([len(aux)]) + b"".join(len(part).to_bytes(2, "big") for part in aux) + frame + b"".join(aux)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz one of the compiled decoders.")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--executions", type=int, default=2**63, help="stop after so many")
    parser.add_argument("--seconds", type=float, default=60.0, help="or after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--build", type=Path, help="where the targets are, or are to be built")
    parser.add_argument("--keep", type=Path, help="folder for the inputs that reached something new")
    parser.add_argument("--crash", type=Path, default=Path("crash-input"), help="file for the input of a finding")
    parser.add_argument("--replay", type=Path, help="run this one input instead")
    args = parser.parse_args()
    if os.environ.get(RUNNING):
        return fuzz(args)
    with tempfile.TemporaryDirectory(prefix="smg-fuzz-") as temporary:
        directory = args.build or Path(temporary)
        directory.mkdir(exist_ok=True)
        if not list(directory.glob("_fuzz*.so")):
            compile_targets.build(directory)
        again = [sys.executable, *sys.argv, "--build", str(directory)]
        return subprocess.run(again, env={**sanitizers.environment(), RUNNING: "1"}).returncode


def fuzz(args: argparse.Namespace) -> int:
    sys.path.insert(0, str(args.build))
    targets = importlib.import_module("_fuzz")
    if args.replay:
        targets.execute(args.target, args.replay.read_bytes())
        print(f"{args.target}: nothing found")
        return 0
    corpus = seeds(args.target, targets.LONGEST)
    started = time.monotonic()
    executions, places, found = targets.mutate(
        args.target, corpus, args.executions, args.seconds, args.seed, os.fsencode(args.crash)
    )
    took = time.monotonic() - started
    if args.keep:
        args.keep.mkdir(exist_ok=True)
        for at, data in enumerate(found):
            (args.keep / f"{at:05}").write_bytes(data)
    print(
        f"{args.target}: {executions} executions in {took:.1f} s ({executions / took:.0f} per second), "
        f"{places} places, {len(found) - len(corpus)} inputs beyond {len(corpus)} vectors"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
