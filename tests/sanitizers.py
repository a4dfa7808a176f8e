"""Builds with AddressSanitizer and UndefinedBehaviorSanitizer, and what a Python needs to load them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPILER = "gcc"
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")


def environment() -> dict[str, str]:
    """The variables under which Python can import what was built with the sanitizers.

    Their runtime has to be in the process first, and with it the C++ library that libzmq throws through. Python's
    own allocator is off, so that each object has its borders watched.
    """
    libraries = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [COMPILER, f"-print-file-name={name}"]
        libraries.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:strict_string_checks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }


def build_package(directory: Path) -> None:
    """A copy of the package and its tests in `directory`, compiled with the sanitizers."""
    ignored = shutil.ignore_patterns("*.so", "*.c", "__pycache__")
    shutil.copytree(ROOT / "smg", directory / "smg", ignore=ignored)
    shutil.copytree(ROOT / "tests", directory / "tests", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, directory)
    run_logged(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace", f"-j{os.cpu_count() or 1}"],
        directory,
        {**os.environ, "SMG_SANITIZE": "1", "CC": COMPILER},
    )


def run_logged(command: list[str], directory: Path, variables: dict[str, str]) -> None:
    """Run a step of a build; an error shows what it said."""
    done = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
