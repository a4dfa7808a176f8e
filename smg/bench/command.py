"""`python -m smg bench`: what smg costs beside its rivals, from the command line."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smg._version import __version__
from smg.bench import accounting
from smg.bench.results import Bars, Measurement, document, hold, read_bars, table
from smg.bench.turns import BenchError, Plan, printed

DESCRIPTION = """\
Measure smg beside its rivals, in the same run and turn by turn. Values are medians (min–max) over the repeats, CPU is
what the operating system accounts to the process that is measured, and what spreads more than it differs is not judged.

  the library and what it costs to decode a step, quickly:
    python -m smg bench decode --quick
    python -m smg bench embed --quick
  everything, with raw data and pictures, held to bars:
    python -m smg bench all --json figures.json --plot plots --assert benchmarks/bars.json
  a load test of any OpenAI-compatible server:
    python -m smg bench http --url http://127.0.0.1:8000 --model NAME --rate 2,4,8 --slo-ttft-ms 500
"""


@dataclass(frozen=True)
class Part:
    """One of the things that can be measured.

    Its module has `measure(plan)` and, where it has options of its own, `add_arguments` and `configured`. `load` names
    the common options that it heeds: an option that would change nothing is refused.
    """

    module: str
    summary: str
    load: tuple[str, ...]
    example: str


PARTS = {
    "decode": Part(
        "smg.bench.decode",
        "a step's frame decoded, checked and applied",
        ("streams", "engines"),
        "python -m smg bench decode --quick --streams 256",
    ),
    "embed": Part(
        "smg.bench.embed",
        "the library in a serving process, over sockets",
        ("streams", "step-ms", "tokens", "ranks", "engines", "vllm-python"),
        "python -m smg bench embed --quick --only paced",
    ),
    "http": Part(
        "smg.bench.http",
        "the HTTP front and its rivals, or any OpenAI-compatible server",
        ("streams", "step-ms", "tokens", "ranks", "engines", "rust-python"),
        "python -m smg bench http --quick --only paced256 --rust-python .venv-rival/bin/python",
    ),
    "policy": Part(
        "smg.bench.policy",
        "rank choice: a simulation of bursty, heavy-tailed load",
        ("ranks",),
        "python -m smg bench policy --shape chat --ranks 8 --load 70",
    ),
    "scaling": Part(
        "smg.bench.scaling",
        "cost per token as streams, ranks and groups grow",
        ("streams", "step-ms", "tokens", "ranks"),
        "python -m smg bench scaling --quick --plot plots",
    ),
}
ALL = "all"
ENGINES = ("tokenspeed", "vllm")
NEEDED = "pip install 'smg-fastpath[bench]'"
VERSIONS = ("pyzmq", "msgpack", "numpy", "msgspec", "uvloop", "aiohttp", "tokenizers", "fastokens")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def _engines(text: str) -> Sequence[str]:
    engines = tuple(text.split(","))
    if not set(engines) <= set(ENGINES):
        raise argparse.ArgumentTypeError(f"{text}: must be tokenspeed, vllm or both, with a comma between")
    return engines


LOAD: dict[str, dict[str, Any]] = {
    "streams": {"type": _count, "metavar": "N", "help": "requests that run at once"},
    "step-ms": {"type": float, "metavar": "MS", "help": "an engine step; 0: as fast as it goes"},
    "tokens": {"type": _count, "metavar": "N", "help": "tokens per request"},
    "ranks": {"type": _count, "metavar": "N", "help": "ranks of a group"},
    "engines": {"type": _engines, "metavar": "LIST", "help": "whose wires: tokenspeed, vllm (default both)"},
}
RIVALS: dict[str, dict[str, Any]] = {
    "vllm-python": {"metavar": "PATH", "help": "a Python that has vllm"},
    "rust-python": {"metavar": "PATH", "help": "a Python that has the Rust gateway, smg==1.13.0"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    for name, part in PARTS.items():
        _part(parts, name, part.summary, part.load, part.example, [name])
    example = "python -m smg bench all --quick --json figures.json --plot plots"
    _part(parts, ALL, "all of these", [*LOAD, *RIVALS], example, list(PARTS))


def _part(
    parts: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    load: Sequence[str],
    example: str,
    measured: Sequence[str],
) -> None:
    parser = parts.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"for example: {example}",
        allow_abbrev=False,
    )
    _common(parser, load)
    for module in _modules(measured):
        if hasattr(module, "add_arguments"):
            module.add_arguments(parser.add_argument_group(module.__name__.rpartition(".")[2]))


def _common(parser: argparse.ArgumentParser, heeded: Sequence[str]) -> None:
    runs = parser.add_argument_group("runs")
    runs.add_argument(
        "--repeats", type=_count, metavar="N", help="turns of each contestant (default 5, 3 with --quick)"
    )
    runs.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    runs.add_argument("--seed", type=int, default=1, metavar="N", help="of everything that is drawn (default 1)")
    runs.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="only measurements whose name (as in --json) has this in it; may be given several times",
    )
    parser.set_defaults(streams=None, step_ms=None, tokens=None, ranks=None, engines=ENGINES)
    parser.set_defaults(vllm_python=None, rust_python=None)
    for title, options in (
        ("load (default: what the part says)", LOAD),
        ("rivals in environments of their own; those that are not given take no part", RIVALS),
    ):
        if named := {name: how for name, how in options.items() if name in heeded}:
            group = parser.add_argument_group(title)
            for name, how in named.items():
                group.add_argument(f"--{name}", **how)
    out = parser.add_argument_group("results")
    out.add_argument("--json", type=Path, metavar="FILE", help="every sample, and what was run where")
    out.add_argument("--plot", type=Path, metavar="DIR", help="pictures, as PNG and SVG (needs matplotlib)")
    out.add_argument(
        "--assert",
        dest="bars",
        type=Path,
        metavar="FILE",
        help="end with status 1 when a ratio in FILE falls short, with 3 when the run cannot tell",
    )


def run(args: argparse.Namespace) -> int:
    """Measure. Returns the exit status: that of the bars, 2 when something is missing."""
    try:
        bars = read_bars(args.bars) if args.bars else {}
        if args.plot:
            _module("smg.bench.plots")  # before the run, not after it
        return _run(args, bars)
    except (BenchError, ValueError, OSError) as error:
        print(f"smg bench: {error}", file=sys.stderr)
    except ImportError as error:
        print(f"smg bench: {error}; {NEEDED}", file=sys.stderr)
    return 2


def _run(args: argparse.Namespace, bars: Bars) -> int:
    say = printed()
    plan = Plan(
        repeats=args.repeats or (3 if args.quick else 5),
        quick=args.quick,
        seed=args.seed,
        only=tuple(args.only),
        streams=args.streams,
        step_ms=args.step_ms,
        tokens=args.tokens,
        ranks=args.ranks,
        engines=args.engines,
        vllm_python=args.vllm_python,
        rust_python=args.rust_python,
        progress=say,
    )
    begin = time.time()
    context: dict[str, Any] = {
        "smg": __version__,
        "command": sys.argv[1:],
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin)),
        "seed": plan.seed,
        "repeats": plan.repeats,
        "machine": accounting.machine_facts(),
        "versions": accounting.version_facts(*VERSIONS),
    }
    print(f"{accounting.line(context['machine'])}\n{accounting.line(context['versions'])}; {plan.repeats} repeats\n")
    measured: list[Measurement] = []
    ended: BenchError | KeyboardInterrupt | None = None
    names = list(PARTS) if args.part == ALL else [args.part]

    def asked(name: str) -> bool:
        part, _, rest = name.partition(".")
        engine = rest.partition(".")[0]
        return part in names and plan.wants(name) and (engine not in ENGINES or engine in plan.engines)

    try:
        for name in names:
            for measurement in _measurements(name, plan, args):
                measured.append(measurement)
        if not measured:
            raise BenchError(f"--only {' '.join(plan.only)}: nothing that {args.part} measures has this in its name")
    except KeyboardInterrupt as interrupt:
        ended = interrupt
        say("stopped; what was measured so far:")
    except BenchError as error:
        if not measured:
            raise
        ended = error
        say("a measurement failed; what was measured before it:")
    context["seconds"] = round(time.time() - begin, 1)
    print(accounting.table(*table(measured, bars)))
    kept = document(measured, context)
    if args.json:
        args.json.write_text(json.dumps(kept, indent=1) + "\n")
    if args.plot:
        for path in _module("smg.bench.plots").draw(kept, args.plot):
            say(f"wrote {path}")
    if ended is not None:
        raise ended
    if not args.bars:
        return 0
    status, why = hold(measured, bars, asked)
    for line in why:
        print(f"smg bench: {line}", file=sys.stderr)
    return status


def _measurements(name: str, plan: Plan, args: argparse.Namespace) -> Iterator[Measurement]:
    module = _module(PARTS[name].module)
    measure = module.configured(args) if hasattr(module, "configured") else module.measure
    yield from measure(plan)


def _modules(parts: Sequence[str]) -> list[Any]:
    """The modules of these parts, for their options; one that cannot be imported brings none."""
    found = []
    for name in parts:
        try:
            found.append(_module(PARTS[name].module))
        except ImportError:
            pass  # said when the part is run
    return found


def _module(name: str) -> Any:
    return importlib.import_module(name)
