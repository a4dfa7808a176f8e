"""`python -m smg serve`: engines and the router in front of them, from the command line."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import TYPE_CHECKING, Any

from smg.http.launch import add_router_arguments, run_service
from smg.serve.errors import ServeError
from smg.serve.launchers import LAUNCHERS, python
from smg.serve.plan import Plan, describe, make_plan

if TYPE_CHECKING:
    from smg.http.service import Service, ServiceOptions
    from smg.serve.supervisor import Supervisor

PASSES_ON = True

DESCRIPTION = """\
Start engines and the router in front of them, wait until all ranks take work, and keep them up: a worker that ends
is started again and joins while the others serve on. SIGTERM or Ctrl-C lets requests come to their end, then ends
every engine process; again to hurry.

  two workers of one rank each:
    python -m smg serve --backend tokenspeed --worker-python ENGINE_ENV/bin/python --model DIR \\
        --data-parallel-size 2
  one worker of two ranks, which the engine makes; what is behind -- goes to the engine as it is:
    python -m smg serve --backend vllm --worker-python ENGINE_ENV/bin/python --model DIR -- --data-parallel-size 2
  what would be started:
    python -m smg serve ... --dry-run
  without a GPU or an engine (mock options behind --, see `python -m smg mock --help`):
    python -m smg serve --backend mock --model DIR --data-parallel-size 2 -- --step-ms 20

Options that are not listed here go to the engine too. Router options are those of `launch`; each is also taken as
--router-OPTION, as the Rust gateway's `serve` spells them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter

    workers = parser.add_argument_group("workers")
    default = os.environ.get("SMG_DEFAULT_BACKEND")
    workers.add_argument(
        "--backend",
        choices=list(LAUNCHERS),
        default=default,
        required=default is None,
        help="the engine to start; mock: simulated ranks (default: $SMG_DEFAULT_BACKEND)",
    )
    workers.add_argument(
        "--connection-mode", type=_connection_mode, default="zmq", metavar="zmq", help="zmq is the one there is"
    )
    workers.add_argument(
        "--data-parallel-size",
        "--dp-size",
        type=_at_least_one,
        default=1,
        metavar="N",
        help="workers, each with its own URL (default 1). Ranks in a worker: the same option behind --",
    )
    workers.add_argument(
        "--tensor-parallel-size",
        "--tp-size",
        type=_at_least_one,
        metavar="N",
        help="GPUs of each rank, handed to the engine; each worker sees its share of CUDA_VISIBLE_DEVICES",
    )
    workers.add_argument(
        "--worker-python",
        metavar="PATH",
        default=sys.executable,
        help="the Python of the engine's environment (default: this one); TokenSpeed needs one of its own",
    )
    workers.add_argument("--worker-host", default="127.0.0.1", metavar="HOST", help="where workers listen (127.0.0.1)")
    workers.add_argument(
        "--worker-base-port",
        type=int,
        default=31000,
        metavar="PORT",
        help="the first worker's port, from which its URL and other ports follow (default 31000)",
    )
    workers.add_argument(
        "--worker-startup-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="until every rank has to take work (default 600)",
    )
    workers.add_argument(
        "--worker-restart",
        choices=["on-failure", "never"],
        default="on-failure",
        help="what to do when a worker ends that was not told to, whatever its exit code (default on-failure: start "
        "it again)",
    )
    workers.add_argument(
        "--worker-restart-limit",
        type=int,
        default=5,
        metavar="K",
        help="restarts of a worker within the window; then it is given up (default 5)",
    )
    workers.add_argument(
        "--worker-restart-window-secs", type=float, default=600.0, metavar="S", help="that window (default 600)"
    )
    workers.add_argument(
        "--worker-shutdown-timeout-secs",
        type=float,
        default=30.0,
        metavar="S",
        help="between SIGTERM and SIGKILL (default 30)",
    )
    workers.add_argument(
        "--log-dir",
        metavar="DIR",
        help="what engines print goes to engine-PORT.log there, in turns of 64 MiB (default: to stderr)",
    )
    workers.add_argument("--dry-run", action="store_true", help="print commands, ports and environments; start nothing")
    # means nothing over this wire, or is always so
    workers.add_argument("--servicer-impl", help=argparse.SUPPRESS)
    workers.add_argument("--enable-token-usage-details", action="store_true", help=argparse.SUPPRESS)

    own = set(parser._option_string_actions)
    add_router_arguments(parser, parser.add_argument_group("ranks"), port=8080, own=own)
    for name, action in list(parser._option_string_actions.items()):
        if name.startswith("--") and name not in own:
            parser._option_string_actions.setdefault(f"--router-{name[2:]}", action)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP. Returns the exit status: 1 also when no worker is left."""
    from smg.engine.group import BACKENDS

    try:
        plan = make_plan(LAUNCHERS[args.backend], args, args.passed_on)
        if args.dry_run:
            print(describe(plan, args))
            return 0
        if plan.wire not in BACKENDS:
            raise ServeError(
                f"the router does not speak {plan.wire}; it speaks {', '.join(BACKENDS)}. --dry-run prints what would "
                "be started"
            )
    except ServeError as error:
        print(f"smg serve: {error}", file=sys.stderr)
        return 1
    backend = args.backend
    args.worker_urls, args.backend, args.zmq_engine_count = [w.url for w in plan.workers], plan.wire, plan.ranks
    return run_service("serve", args, lambda options: _serve(options, plan, backend, args))


async def _serve(options: ServiceOptions, plan: Plan, backend: str, args: argparse.Namespace) -> int:
    from smg.http.service import Service
    from smg.serve.console import EngineLogs, make_console
    from smg.serve.guard import Guard
    from smg.serve.preflight import check_python
    from smg.serve.supervisor import Policy, Supervisor

    signals = Signals()
    if not await signals.meanwhile(check_python(backend, python(args), plan.workers[0].environment)):
        return signals.status
    console = make_console()
    policy = Policy(
        startup_timeout=args.worker_startup_timeout,
        restart=args.worker_restart == "on-failure",
        restart_limit=args.worker_restart_limit,
        restart_window=args.worker_restart_window_secs,
        end_grace=args.worker_shutdown_timeout_secs,
    )
    for note in plan.notes:
        console.say(note)
    with closing(EngineLogs(args.log_dir, console)) as logs, Guard(policy.end_grace) as guard:
        async with Service(options) as service:
            supervisor = Supervisor(plan.workers, service.groups, policy, console, logs, guard)
            try:
                return await _supervise(service, supervisor, signals, args.shutdown_grace_period_secs, console.say)
            finally:
                await supervisor.stop(signals.hurry)


async def _supervise(
    service: Service, supervisor: Supervisor, signals: Signals, grace: float, say: Callable[[str], None]
) -> int:
    if not await signals.meanwhile(supervisor.start()):
        say("stopped during start-up; ending the workers")
        return signals.status
    say(f"ready; answering on {service.url}, metrics on {service.metrics_url}")
    left = await signals.meanwhile(supervisor.watch())
    say("no worker is left" if left else "shutting down; again to hurry")
    await service.drain(grace, signals.hurry)
    return 1 if left else 0


class Signals:
    """SIGTERM, SIGINT and SIGHUP as events of this loop: the first stops, a second one sets `hurry`."""

    def __init__(self) -> None:
        self.hurry = asyncio.Event()
        self.status = 0
        self._stop = asyncio.get_running_loop().create_future()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
                asyncio.get_running_loop().add_signal_handler(number, self._received, number)

    async def meanwhile(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do the work to its end and return True, or give it up for a signal and return False."""
        task = asyncio.ensure_future(work)
        await asyncio.wait([task, self._stop], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            return False
        task.result()
        return True

    def _received(self, number: int) -> None:
        if self._stop.done():
            self.hurry.set()
        else:
            self.status = 128 + number
            self._stop.set_result(None)


def _connection_mode(text: str) -> str:
    if text != "zmq":
        raise argparse.ArgumentTypeError(
            f"{text}: this router talks to engines over zmq only; for engines behind grpc or http use the Rust gateway "
            "(pip install smg, in an environment of its own), whose `smg serve` takes the same flags"
        )
    return text


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)
