"""Asks the engine's Python, before anything is launched, whether it can import the engine at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from smg.serve.errors import ServeError
from smg.serve.launchers import LAUNCHERS

TIMEOUT = 300.0  # seconds; the first import of an engine reads gigabytes

# Run by that Python. Where a module `smg` would come from is looked up before the engine brings its own.
_QUESTION = """
import importlib, importlib.util, json, os, sys
found = importlib.util.find_spec("smg")
places = list(found.submodule_search_locations or []) if found else []
ours = any(os.path.exists(os.path.join(place, "_fastpath.pyi")) for place in places)
print(json.dumps({"smg": places, "ours": ours}), file=sys.stderr, flush=True)
importlib.import_module(sys.argv[1])
"""


async def check_python(backend: str, python: str, environment: Mapping[str, str]) -> None:
    """Raises ServeError when `python` cannot import the engine, or has this `smg` where the engine needs another."""
    launcher = LAUNCHERS[backend]
    if not launcher.needs_check(python):
        return
    try:
        process = await asyncio.create_subprocess_exec(
            *(python, "-c", _QUESTION, launcher.module),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise ServeError(f"--worker-python {python}: cannot be run: {error.strerror}") from None
    try:
        _, told = await asyncio.wait_for(process.communicate(), TIMEOUT)
    except (asyncio.TimeoutError, TimeoutError):
        raise ServeError(
            f"--worker-python {python}: importing {launcher.module} took longer than {TIMEOUT:g} s"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    first, _, rest = told.decode("utf-8", "replace").partition("\n")
    own = "give the Python of an environment that has it: --worker-python DIR/bin/python"
    try:
        found = json.loads(first)
    except ValueError:
        raise ServeError(f"--worker-python {python}: is no Python that works: {first}") from None
    if found["ours"] and launcher.needs_other_smg:
        raise ServeError(
            f"--worker-python {python}: its `smg` is this router's ({found['smg'][0]}), and {backend} needs the one "
            f"that it requires. Install {backend} in an environment without smg-fastpath and {own}"
        )
    if process.returncode:
        reason = rest.strip().rpartition("\n")[2]
        raise ServeError(f"--worker-python {python}: cannot import {launcher.module} ({reason}); {own}")
