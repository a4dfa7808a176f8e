"""The command line: `python -m smg COMMAND`. Each command's code is imported when it is used."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys

from smg._version import __version__

#: command -> module with add_arguments(parser) and run(args) -> exit status. With PASSES_ON true it gets what it
#: does not know itself, and all that comes after `--`, as `args.passed_on`.
COMMANDS = {
    "launch": "smg.http.launch",
    "serve": "smg.serve.command",
    "mock": "smg.mock.command",
    "bench": "smg.bench.command",
    "demo": "smg.demo",
}
#: shown in the list of commands, without importing any of them
SUMMARIES = {
    "launch": "answer OpenAI-style HTTP with engine ranks that dial in",
    "serve": "start engines and the router in front of them, and keep them up",
    "mock": "simulated engine ranks that dial a router, without GPU or model",
    "bench": "what smg costs beside its rivals, and a load tester for OpenAI-compatible servers",
    "demo": "simulated ranks, router and a few streamed chats on this machine",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit status; 2 when none was given."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m smg",
        description="A router between LLM serving code and data-parallel engine ranks.",
    )
    parser.add_argument("--version", action="version", version=f"smg-fastpath {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    # Only the command that is asked for brings its options, and with them its imports.
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    modules = {}
    passed_on: list[str] = []
    for name, summary in SUMMARIES.items():
        command = commands.add_parser(name, help=summary, allow_abbrev=False)
        if name == asked:
            modules[name] = importlib.import_module(COMMANDS[name])
            modules[name].add_arguments(command)
    passes_on = getattr(modules.get(asked or ""), "PASSES_ON", False)
    if passes_on and "--" in arguments:
        end = arguments.index("--")
        arguments, passed_on = arguments[:end], arguments[end + 1 :]
    args, unknown = parser.parse_known_args(arguments)
    if unknown and not passes_on:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.passed_on = unknown + passed_on
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return int(modules[args.command].run(args))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
