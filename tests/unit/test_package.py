"""What holds for the package as a whole: its build, its layers, its version, and what may not be in it."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import io
import re
import shutil
import subprocess
import sys
import tokenize
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import smg
from smg import _compiled

PACKAGE = Path(smg.__file__).parent
SOURCES = sorted(path for suffix in ("py", "pyi", "pyx", "pxd") for path in PACKAGE.rglob(f"*.{suffix}"))

# Bottom first. A module imports from the lines above its own here, and from its own folder.
LAYERS = [
    ["errors", "_version", "_compiled"],
    ["sampling", "_decoded", "_spelling"],
    ["_msgpack", "_frame", "_wait", "_zmq", "_stops", "_escape"],
    ["_batch", "_table"],
    ["_tensor"],
    ["_vllm_row"],
    ["_tokenspeed", "_vllm", "_sglang", "_choice", "_delivery"],
    ["_pump"],
    ["_codec", "_fastpath"],
    ["_outlets"],
    ["_streams"],
    ["_text"],
    ["_sse"],
    ["protocol"],
    ["mock", "engine"],
    ["routing"],
    [""],  # smg itself, whose names the layers above may use
    ["http", "bench"],
    ["serve", "demo"],
    ["cli"],
    ["__main__"],
]


def layer_of(module: str) -> tuple[int, str]:
    top = module.partition(".")[0]
    for level, names in enumerate(LAYERS):
        if top in names:
            return level, top
    raise AssertionError(f"smg.{module} is in no layer; give it one in LAYERS")


def name_of(path: Path) -> str:
    """Dotted name below smg; "" for smg itself."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.is_dir() or any(path.with_suffix(f".{suffix}").exists() for suffix in ("py", "pyx", "pxd"))


def imports(path: Path) -> Iterator[str]:
    """Every module of smg that the file names in an import or cimport, wherever in the file."""
    if path.suffix in (".py", ".pyi"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name[4:] for alias in node.names if alias.name.split(".")[0] == "smg")
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno}: relative import"
                if node.module == "smg":
                    yield from (alias.name if is_module(alias.name) else "" for alias in node.names)
                elif (node.module or "").startswith("smg."):
                    yield (node.module or "")[4:]
        return
    for line in path.read_text().splitlines():
        if match := re.match(r"\s*from\s+smg(?:\.([\w.]+))?\s+c?import\s+(.*)", line):
            if match[1]:
                yield match[1]
            else:
                yield from (name if is_module(name) else "" for name in re.findall(r"\w+", match[2]))
        elif match := re.match(r"\s*c?import\s+smg(?:\.([\w.]+))?", line):
            yield match[1] or ""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards_only(path: Path) -> None:
    module = name_of(path)
    level, top = layer_of(module)
    for target in imports(path):
        below, other = layer_of(target)
        assert below < level or top == other, f"smg.{module} imports smg.{target}, which is not below it"


def test_the_layer_check_sees_imports_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import smg.http.app\ndef f():\n    from smg import cli, SamplingParams\n")
    assert list(imports(tmp_path / "a.py")) == ["http.app", "cli" if is_module("cli") else "", ""]
    (tmp_path / "a.pyx").write_text("from smg._table cimport Slot\n  from smg import _text\ncimport smg._zmq\n")
    assert list(imports(tmp_path / "a.pyx")) == ["_table", "_text", "_zmq"]


UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


def unsafe_names(path: Path) -> Iterator[str]:
    """What could run or unpickle bytes that came from elsewhere."""
    source = path.read_text()
    if path.suffix in (".py", ".pyi"):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                yield from (name for name in names if name.partition(".")[0] in UNSAFE_MODULES)
            elif isinstance(node, ast.Name) and node.id in UNSAFE_CALLS:
                yield node.id
            elif isinstance(node, ast.Attribute) and node.attr in (
                "send_pyobj",
                "recv_pyobj",
                "allow_pickle",
            ):
                yield node.attr
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                yield node.arg
        return
    # Cython is no Python to a parser, but its words are the same
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string in UNSAFE_MODULES | UNSAFE_CALLS:
            yield token.string


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_unpickles_or_evaluates(path: Path) -> None:
    assert list(unsafe_names(path)) == []


def test_the_search_for_unsafe_names_finds_them(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import pickle\nfrom marshal import loads\neval('1')\nsocket.recv_pyobj()\n")
    assert sorted(unsafe_names(tmp_path / "a.py")) == ["eval", "marshal", "pickle", "recv_pyobj"]
    (tmp_path / "a.pyx").write_text("cdef int x = 1  # eval\nimport pickle\n")
    assert list(unsafe_names(tmp_path / "a.pyx")) == ["pickle"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_source_file_has_more_than_600_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600


def test_the_package_is_typed_and_every_compiled_module_has_a_stub() -> None:
    assert (PACKAGE / "py.typed").exists()
    compiled = {path.stem for path in PACKAGE.rglob("*.pyx")}
    assert compiled == {path.stem for path in PACKAGE.rglob("*.pyi")}
    assert compiled == set(_compiled.MODULES)


def test_the_version_is_the_installed_distributions() -> None:
    assert smg.__version__ == importlib.metadata.version("smg-fastpath")


def test_an_import_that_is_not_compiled_says_what_to_run(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "smg", ignore=shutil.ignore_patterns("*.so", "*.c", "__pycache__"))
    # -S: an editable install's import hook would find the compiled modules that the copy lacks
    command = [sys.executable, "-S", "-c", "import smg"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: smg is not compiled for Python 3.")
    assert all(name in last for name in _compiled.MODULES)
    assert f"`{sys.executable} -m pip install -e .`" in last


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """An environment of nothing but what is added to it: `environment(name, record=..., top_level=...)`."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def add(name: str, **files: str) -> None:
        directory = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        directory.mkdir()
        (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        for file, content in files.items():
            (directory / {"record": "RECORD", "top_level": "top_level.txt"}[file]).write_text(content)

    return add


def test_an_environment_of_its_own_passes_the_distribution_check(environment: Callable[..., None]) -> None:
    environment("smg-fastpath", record="smg/__init__.py,,\nsmg/cli.py,,\n")
    environment("SMG.FastPath", top_level="smg\n")
    environment("pyzmq", record="zmq/__init__.py,,\nzmq/smg/__init__.py,,\n", top_level="zmq\nzmq_smg\n")
    environment("nothing")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert smg.check_distribution() == []


def test_another_owner_of_the_import_name_is_warned_about_by_name(environment: Callable[..., None]) -> None:
    environment("smg-fastpath", record="smg/__init__.py,,\n")
    environment("tokenspeed-smg", record="smg/_native.so,,\nsmg/__init__.py,,\n")
    environment("smg", top_level="other\nsmg\n")
    with pytest.warns(RuntimeWarning, match=r"also belongs to smg, tokenspeed-smg .* environment of its own"):
        assert smg.check_distribution() == ["smg", "tokenspeed-smg"]


def test_no_compiled_class_is_made_to_unpickle() -> None:
    for module in _compiled.MODULES:
        for kind in vars(importlib.import_module(f"smg.{module}")).values():
            if isinstance(kind, type):
                assert "__setstate_cython__" not in vars(kind), f"{kind.__qualname__} unpickles"
