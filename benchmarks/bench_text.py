"""Detokenising and stop strings: CPU per token at 256 streams, beside the tokenizers library's DecodeStream.

    python -m pytest benchmarks/bench_text.py

Round-robin, as a front does it that writes each engine step to all its streams: one token per stream and
step, every stream somewhere else in the same English text, two stop strings that begin like common text.
`push_tokens` is the call from C that SSE rendering makes; its loop is compiled here, into a temporary folder.
"""

from __future__ import annotations

import importlib.util
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tokenizers
from Cython.Build import cythonize
from setuptools import Distribution, Extension
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

import smg
from smg._text import Detokenizer, StopStrings, TokenTable

STREAMS, STEPS = 256, 500
STOPS = ["\n\nUser:", "the end of"]
BAR = 150  # ns per token

LOOP = """
from libc.stdint cimport uint32_t
from smg._text cimport Buffer, Detokenizer, buffer_free

def run(list streams, const uint32_t[:, ::1] ids):
    cdef Buffer out = Buffer(NULL, 0, 0)
    cdef Detokenizer stream
    cdef Py_ssize_t step, i
    cdef size_t total = 0
    for step in range(ids.shape[0]):
        for i, stream in enumerate(streams):
            out.size = 0
            stream.push_tokens(&ids[step, i], 1, &out)
            total += out.size
    buffer_free(&out)
    return total
"""


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("loop")
    source = folder / "text_loop.pyx"
    source.write_text(LOOP)
    [extension] = cythonize(
        [Extension("text_loop", [str(source)], extra_compile_args=["-O3"])],
        include_path=[str(Path(smg.__file__).parent.parent)],
        build_dir=str(folder),
        language_level="3",
        quiet=True,
    )
    command: Any = Distribution({"name": "text-loop", "ext_modules": [extension]}).get_command_obj("build_ext")
    command.build_lib = command.build_temp = str(folder)
    command.ensure_finalized()
    command.run()
    spec = importlib.util.spec_from_file_location("text_loop", command.get_ext_fullpath("text_loop"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(smg.__file__).parent / "data" / "demo-model" / "tokenizer.json"))


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """[step, stream] -> token id."""
    text = np.array(tokenizer.encode(topics["assignment"], add_special_tokens=False).ids, np.uint32)
    places = np.arange(STEPS)[:, None] + 61 * np.arange(STREAMS)[None, :]
    return np.ascontiguousarray(text[places % len(text)])


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, float]]:
    """Median ns of CPU per token of each contender; printed when all have run."""
    results: dict[str, float] = {}
    yield results
    print(
        f"\nMedian CPU per token, {STREAMS} streams, {STEPS} steps, Python {platform.python_version()}, tokenizers",
        end="",
    )
    print(f" {tokenizers.__version__}, {platform.processor() or platform.machine()}; bar {BAR} ns with stops")
    rival = results.get("DecodeStream.step, no stops")
    for name, ns in results.items():
        print(f"  {name:32} {ns:7.0f} ns" + (f"   {ns / rival:.3f} of DecodeStream's" if rival else ""))


def measure(benchmark: Any, results: dict[str, float], name: str, fresh: Callable[[], Any], run: Any) -> None:
    benchmark.pedantic(run, setup=lambda: ((fresh(),), {}), rounds=7, warmup_rounds=1)
    results[name] = benchmark.extra_info["ns_per_token"] = benchmark.stats.stats.median / (STREAMS * STEPS) * 1e9


cpu_time = pytest.mark.benchmark(group="detokenise", timer=time.process_time, warmup=True)


@cpu_time
@pytest.mark.parametrize("stops", [None, STOPS], ids=["no stops", "two stops"])
def test_push_tokens(benchmark: Any, loop: Any, tokenizer: Any, ids: Any, results: Any, stops: Any) -> None:
    table = TokenTable(tokenizer)
    stop = StopStrings(stops) if stops else None
    name = f"push_tokens, {'two stops' if stops else 'no stops'}"
    measure(
        benchmark,
        results,
        name,
        lambda: [Detokenizer(table, stop=stop) for _ in range(STREAMS)],
        lambda streams: loop.run(streams, ids),
    )
    assert results[name] <= BAR


@cpu_time
def test_push(benchmark: Any, tokenizer: Any, ids: Any, results: Any) -> None:
    """The same from Python, a str per token."""
    table, stop = TokenTable(tokenizer), StopStrings(STOPS)
    steps = [[[token] for token in step] for step in ids.tolist()]

    def run(streams: list[Detokenizer]) -> None:
        for step in steps:
            for stream, token in zip(streams, step, strict=True):
                stream.push(token)

    measure(
        benchmark,
        results,
        "push from Python, two stops",
        lambda: [Detokenizer(table, stop=stop) for _ in range(STREAMS)],
        run,
    )


@cpu_time
def test_decode_stream(benchmark: Any, tokenizer: Any, ids: Any, results: Any) -> None:
    """The rival; it knows no stop strings."""
    steps = ids.tolist()

    def run(streams: list[DecodeStream]) -> None:
        for step in steps:
            for stream, token in zip(streams, step, strict=True):
                stream.step(tokenizer, token)

    measure(
        benchmark,
        results,
        "DecodeStream.step, no stops",
        lambda: [DecodeStream(skip_special_tokens=True) for _ in range(STREAMS)],
        run,
    )
