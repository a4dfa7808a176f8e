"""Compiled parts of smg. Everything else about the package is in pyproject.toml.

Environment variables, each off unless set to 1:

    SMG_DEBUG      assertions on, no optimisation, debug symbols
    SMG_ANNOTATE   write the .html files that show where Cython calls into Python
    SMG_COVERAGE   line tracing, for coverage.py's Cython plugin
    SMG_SANITIZE   AddressSanitizer and UndefinedBehaviorSanitizer (run with libasan preloaded)

    SMG_ONLY       comma-separated module names to build, e.g. SMG_ONLY=_fastpath
"""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup


def flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


DEBUG, COVERAGE, SANITIZE = flag("SMG_DEBUG"), flag("SMG_COVERAGE"), flag("SMG_SANITIZE")

DIRECTIVES = {
    "language_level": "3",
    "cdivision": True,
    "initializedcheck": False,
    "embedsignature": True,
    "emit_code_comments": False,
    "auto_pickle": False,
    "linetrace": COVERAGE,
}

compile_args = ["-std=c11", "-Wall", "-Wno-unused-function"]
link_args: list[str] = []
macros: list[tuple[str, str | None]] = []
if DEBUG:
    compile_args += ["-O0", "-g", "-UNDEBUG"]
else:
    compile_args += ["-O3"]
if SANITIZE:
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    compile_args += [*sanitizers, "-g", "-O1", "-fno-omit-frame-pointer"]
    link_args += sanitizers
if COVERAGE:
    macros += [("CYTHON_TRACE", "1"), ("CYTHON_TRACE_NOGIL", "1")]

only = [name for name in os.environ.get("SMG_ONLY", "").split(",") if name]
modules = only or sorted(path.stem for path in Path("smg").glob("*.pyx"))

setup(
    ext_modules=cythonize(
        [
            Extension(
                f"smg.{name}",
                [f"smg/{name}.pyx"],
                extra_compile_args=compile_args,
                extra_link_args=link_args,
                define_macros=macros,
                libraries=["pthread"],
            )
            for name in modules
        ],
        compiler_directives=DIRECTIVES,
        annotate=flag("SMG_ANNOTATE"),
        gdb_debug=DEBUG,
        force=SANITIZE or COVERAGE,
    )
)
