"""Builds the C parts of the benchmarks once, outside the source tree."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).parent / "native"


def build(name: str, *, shared: bool = False) -> Path:
    """The compiled `native/<name>.c`: a program, or a shared library. Built again when the source has changed."""
    source = _SOURCES / f"{name}.c"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    made = _cache() / (f"{name}-{digest}" + (".so" if shared else ""))
    if not made.exists():
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise SystemExit("smg bench needs a C compiler: install one (apt install gcc), or set CC to it")
        with tempfile.NamedTemporaryFile(dir=made.parent, delete=False) as unfinished:
            flags = ["-shared", "-fPIC"] if shared else []
            command = [compiler, "-std=gnu11", "-O2", "-Wall", *flags, str(source), "-o", unfinished.name, "-ldl"]
            subprocess.run(command, check=True)
        os.chmod(unfinished.name, 0o755)
        os.replace(unfinished.name, made)
    return made


def _cache() -> Path:
    """A directory of the user's own, since what lies there is executed."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(base) / "smg-benchmarks"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path
