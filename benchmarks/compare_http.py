"""The HTTP front beside the Rust gateway: `python -m smg bench http`, with that gateway installed.

    python -m benchmarks.compare_http [--rival-env DIR] [options of `python -m smg bench http`]

The Rust gateway goes into an environment of its own, once. What is measured, and how, is in `smg/bench/fronts.py`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

from smg.bench.gateways import RIVAL
from smg.bench.turns import ROOT
from smg.cli import main


def rival_python(environment: Path) -> str:
    """The interpreter of an environment that has the Rust gateway, made when it is missing."""
    python = environment / "bin" / "python"
    installed = [python, "-c", "from importlib import metadata; metadata.version('smg')"]
    if not python.exists() or subprocess.run(installed, stderr=subprocess.DEVNULL).returncode:
        print(f"installing {RIVAL} in {environment}", file=sys.stderr)
        venv.create(environment, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", RIVAL], check=True)
    return str(python)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_http",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--rival-env", type=Path, default=ROOT / ".venv-rival", metavar="DIR", help="where the Rust gateway is, or goes"
    )
    args, options = parser.parse_known_args()
    sys.exit(main(["bench", "http", "--rust-python", rival_python(args.rival_env), *options]))
