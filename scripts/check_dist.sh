#!/usr/bin/env bash
# Builds an sdist, a wheel from nothing but that sdist, and installs the wheel in a fresh environment.
# Leaves both in dist/. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/build"
"$work/build/bin/python" -m pip install --quiet build
rm -rf dist
# without further words, build makes the sdist first and the wheel from its contents
"$work/build/bin/python" -m build --quiet --outdir dist .

"$work/build/bin/python" - dist/*.tar.gz dist/*.whl <<'CHECK'
import pathlib
import sys
import tarfile
import zipfile

sdist = {name.partition("/")[2] for name in tarfile.open(sys.argv[1]).getnames()}
wheel = set(zipfile.ZipFile(sys.argv[2]).namelist())
tree = pathlib.Path("smg")
data = {str(path) for path in tree.glob("data/**/*") if path.is_file()}
python = {str(path) for path in tree.rglob("*.py")}
stubs = {str(path) for path in tree.glob("*.pyi")} | {"smg/py.typed"}
cython = {str(path) for suffix in ("pyx", "pxd") for path in tree.glob(f"*.{suffix}")}

for name, got, wanted in (
    ("sdist", sdist, data | python | stubs | cython | {"LICENSE", "README.md", "Makefile", "tests/conftest.py"}),
    ("wheel", wheel, data | python | stubs),
):
    assert wanted <= got, f"missing from the {name}: {sorted(wanted - got)}"
    made = sorted(file for file in got if file.endswith((".c", ".html", ".pyc")))
    assert not made, f"generated files in the {name}: {made}"
modules = {path.stem for path in tree.glob("*.pyx")}
built = {pathlib.Path(file).name.partition(".")[0] for file in wheel if file.endswith(".so")}
assert modules == built, f"compiled in the wheel: {sorted(built)}, not {sorted(modules)}"
assert not any(file.startswith(("tests/", "scripts/")) for file in wheel), "the wheel holds more than the package"
assert not any(file.endswith(".so") for file in sdist), "the sdist holds compiled modules"
print(f"sdist: {len(sdist)} entries; wheel: {len(wheel)} entries, {len(built)} compiled modules")
CHECK

"$python" -m venv "$work/use"
"$work/use/bin/python" -m pip install --quiet dist/*.whl
cd "$work"
"$work/use/bin/python" -W error -c 'import smg; print("installed and imported: smg", smg.__version__)'
