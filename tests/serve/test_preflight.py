"""The engine's Python is asked for the engine before anything is launched."""

import asyncio
import os
import sys
import venv
from pathlib import Path

import pytest

import smg
from smg.serve import preflight
from smg.serve.errors import ServeError
from smg.serve.preflight import check_python

ENVIRONMENT = {"PATH": os.environ["PATH"]}


@pytest.fixture(scope="module")
def engine_python(tmp_path_factory):
    """The Python of an environment with nothing in it; `site` is where modules go."""
    path = tmp_path_factory.mktemp("engine")
    venv.create(path, symlinks=True, with_pip=False)
    return str(path / "bin" / "python")


@pytest.fixture
def modules(tmp_path):
    """Make modules that the engine's Python finds: `modules({"a.b": "source"})` -> its environment."""

    def make(sources):
        for name, source in sources.items():
            path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}

    return make


async def test_a_python_that_can_import_the_engine_is_taken(engine_python, modules):
    environment = modules({"tokenspeed.cli": "print('engines print a lot at import')", "smg.__init__": ""})
    await check_python("tokenspeed", engine_python, environment)


async def test_a_python_without_the_engine_is_refused(engine_python):
    with pytest.raises(ServeError) as refused:
        await check_python("tokenspeed", engine_python, ENVIRONMENT)
    assert str(refused.value) == (
        f"--worker-python {engine_python}: cannot import tokenspeed.cli (ModuleNotFoundError: No module named "
        "'tokenspeed'); give the Python of an environment that has it: --worker-python DIR/bin/python"
    )


async def test_an_engine_that_fails_to_import_is_refused_with_its_reason(engine_python, modules):
    environment = modules({"vllm": "import sys\nsys.stderr.write('noise\\n')\nraise RuntimeError('no such driver')"})
    with pytest.raises(ServeError, match=r"cannot import vllm \(RuntimeError: no such driver\)"):
        await check_python("vllm", engine_python, environment)


async def test_this_smg_is_refused_where_the_engine_needs_another_of_that_name(engine_python):
    environment = {**ENVIRONMENT, "PYTHONPATH": str(Path(smg.__file__).parents[1])}
    with pytest.raises(ServeError, match=r"its `smg` is this router's \(/.*\), and tokenspeed needs the one"):
        await check_python("tokenspeed", engine_python, environment)


async def test_vllm_may_live_beside_this_smg(engine_python, modules):
    environment = modules({"vllm": ""})
    environment["PYTHONPATH"] += os.pathsep + str(Path(smg.__file__).parents[1])
    await check_python("vllm", engine_python, environment)


async def test_the_simulator_in_this_python_needs_no_question(monkeypatch):
    monkeypatch.setattr(asyncio, "create_subprocess_exec", None)
    await check_python("mock", sys.executable, {})


async def test_a_python_that_cannot_be_run_is_refused(tmp_path):
    with pytest.raises(ServeError, match="--worker-python /nowhere/python: cannot be run: No such file"):
        await check_python("vllm", "/nowhere/python", ENVIRONMENT)
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho not me >&2\n")
    script.chmod(0o755)
    with pytest.raises(ServeError, match="is no Python that works: not me"):
        await check_python("vllm", str(script), ENVIRONMENT)


async def test_an_import_that_never_ends_is_given_up_and_ended(engine_python, modules, monkeypatch, tmp_path):
    monkeypatch.setattr(preflight, "TIMEOUT", 0.5)
    told = tmp_path / "pid"
    environment = modules(
        {"vllm": f"import os, time\nopen({str(told)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"}
    )
    with pytest.raises(ServeError, match=r"importing vllm took longer than 0\.5 s"):
        await check_python("vllm", engine_python, environment)
    if told.exists():  # it got that far
        with pytest.raises(ProcessLookupError):
            os.kill(int(told.read_text()), 0)
