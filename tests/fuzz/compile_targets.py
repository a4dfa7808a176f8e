"""Builds the fuzz targets: the decoders with sanitizers and coverage, the driver without."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import sanitizers

HERE = Path(__file__).parent
COVERAGE = "-fsanitize-coverage=trace-pc"


def build(directory: Path) -> None:
    """Puts the extension module `_fuzz` into `directory`, which exists."""
    module = f"_fuzz{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = [f"-I{HERE}", f"-I{sysconfig.get_path('include')}"]
    compile_c = [sanitizers.COMPILER, "-std=gnu11", "-fPIC", "-g", "-c", *include]
    cython = [sys.executable, "-m", "cython", "-3", "-X", "cdivision=True", "-X", "initializedcheck=False"]
    for command in (
        [*cython, f"-I{sanitizers.ROOT}", str(HERE / "_fuzz.pyx"), "-o", "_fuzz.c"],
        [*compile_c, "-O2", "-w", *sanitizers.FLAGS, COVERAGE, "_fuzz.c", "-o", "_fuzz.o"],
        [*compile_c, "-O2", "-Wall", "-Werror", str(HERE / "driver.c"), "-o", "driver.o"],
        [sanitizers.COMPILER, "-shared", *sanitizers.FLAGS, "_fuzz.o", "driver.o", "-o", module],
    ):
        sanitizers.run_logged(command, directory, dict(os.environ))
