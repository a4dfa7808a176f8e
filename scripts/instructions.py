#!/usr/bin/env python3
"""Counts machine instructions of the hot paths under valgrind, which no noise of the machine moves.

    python scripts/instructions.py [--json FILE]

Each path runs twice in a process of its own, with few and with many rounds: the difference is what the rounds took,
without the interpreter's start. Needs valgrind (apt install valgrind).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS = 256
FEW, MANY = 20, 220
DECODE = f"""
import sys
from smg.bench.decode import live_core
core, outlet, streams, frame = live_core({ROWS}, sys.argv[2])
for _ in range(int(sys.argv[1]) // 20):
    core.feed(0, frame, times=20)
    outlet.take()
"""
SSE = """
import sys
from pathlib import Path
import smg
from tokenizers import Tokenizer
from smg._sse import Choice, Wire
from smg._text import Detokenizer, TokenTable
class Null:
    def write(self, data): pass
    def get_write_buffer_size(self): return 0
    def get_extra_info(self, name): return None
class Protocol:
    transport = Null()
class Shape:
    def first(self, choice): return None
    def part(self, choice, text, entries): return text
    def last(self, choice): return b""
class Owner:
    def ended(self, choice): pass
    def retried(self, choice, exc): return False
    def failed(self, choice, exc): raise exc
table = TokenTable(Tokenizer.from_file(str(Path(smg.__file__).parent / "data" / "demo-model" / "tokenizer.json")))
wire = Wire(Protocol(), True)
around = {"before": b'{"choices":[{"delta":{"content":"', "after": b'"}}]}'}
choice = Choice(0, Detokenizer(table), Owner(), wire=wire, shape=Shape(), **around)
for _ in range(int(sys.argv[1]) * 256):
    choice.feed([1000])
"""
#: name -> (program, its arguments after the rounds, units in a round)
PATHS = {
    "decode and apply a row, tokenspeed": (DECODE, ["tokenspeed"], ROWS),
    "decode and apply a row, vllm": (DECODE, ["vllm"], ROWS),
    "render a token as an event": (SSE, [], ROWS),
}


def collected(program: str, *arguments: str) -> int:
    """Instructions of a Python program, from start to end."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise SystemExit("valgrind is not there: apt install valgrind")
    command = [
        valgrind,
        "--tool=callgrind",
        "--callgrind-out-file=/dev/null",
        sys.executable,
        "-c",
        program,
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "PYTHONMALLOC": "malloc"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or found is None:
        raise SystemExit(f"{' '.join(command[:3])} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return int(found[1])


def measure(name: str) -> float:
    """Instructions of one unit of a path."""
    program, arguments, units = PATHS[name]
    few, many = (collected(program, str(rounds), *arguments) for rounds in (FEW, MANY))
    return (many - few) / (MANY - FEW) / units


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there")
    args = parser.parse_args()
    counts = {}
    for name in PATHS:
        counts[name] = round(measure(name), 1)
        print(f"{name}: {counts[name]:.0f} instructions", flush=True)
    if args.json:
        args.json.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
