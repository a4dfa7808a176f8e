"""How long faults last: each drill of tests/drills with its times, beside what the Rust gateway 1.13.0 was seen to do.

    python -m benchmarks.drills [--rounds N] [--only WORDS] [--write docs/reliability.md]

The rival's column was observed once, on another day, with the same kind of simulated ranks (two per group) and its
default options; ours is measured now. Each drill runs in a process of its own, most with its simulated ranks in further
processes. Median and worst over the rounds.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks import faults
from benchmarks.faults import Bench
from smg.bench import accounting


@dataclass(frozen=True)
class Drill:
    event: str
    rival: str
    run: Callable[[Bench], str]


NOT_MEASURED = "not measured"

DRILLS = [
    Drill("SIGKILL of one rank of two, streams running, over HTTP",
          "its streams hang, no error in 330 s; every 2nd new request is a 500", faults.kill_behind_http),
    Drill("SIGKILL of one rank of four, 100 streams running, embedded", "has no embedded use",
          faults.kill_one_of_four),
    Drill("SIGKILL of one rank, no token out yet, over HTTP",
          "hangs likewise; a send to the dead rank is a 500, not retried", faults.retry),
    Drill("that rank is restarted", "never rejoined in 200 s; the dead rank keeps drawing traffic", faults.restart_one),
    Drill("a process dies while its model loads", NOT_MEASURED, faults.crash_in_load),
    Drill("SIGKILL of all ranks mid-stream, restarted at once",
          "error after 300 s; served again 61 s later with a health check every 5 s", faults.kill_all),
    Drill("a restart in the instant of its predecessor's SIGKILL", NOT_MEASURED, faults.restart_in_the_same_instant),
    Drill("two restarts within milliseconds", NOT_MEASURED, faults.restart_twice),
    Drill("SIGSTOP of a rank", NOT_MEASURED, faults.stop),
    Drill("ENGINE_CORE_DEAD from one rank",
          "both ranks' streams fail; engines restarted, served after 10.1 s (health check every 5 s) or 64 s",
          faults.sentinel),
    Drill("three undecodable frames from one rank",
          "all in flight of both ranks fails, the group is closed, the next request is a 500", faults.bad_frames),
    Drill("a second dialer with rank 0's identity",
          "requests for rank 0 stop reaching the real engine (2 of 2), nothing logged", faults.second_dialer),
    Drill("a connection with rank 0's identity that says nothing, before the rank is READY", NOT_MEASURED,
          faults.silent_claim),
    Drill("HELLO of an index outside the group, garbage",
          "takes a slot, so that the real group could not form in 20 s; garbage aborts the whole handshake",
          faults.bad_hellos),
    Drill("a client leaves a stream that is stalled", "no ABORT within 70 s (3 of 3)",
          lambda bench: faults.leave(bench, hold=True)),
    Drill("a client leaves while tokens flow, 20 ms steps", "ABORT after 2–24 ms",
          lambda bench: faults.leave(bench, step_ms=20)),
    Drill("64 clients that never read, 32k tokens each", "RSS grows by 345 MB (170 B per token)", faults.slow_readers),
    Drill("1,000 embedded streams that nobody reads", "has no embedded use", faults.unread),
    Drill("another thread of the host process spins: frame sent to counters up to date", "has no embedded use",
          faults.spinning),
    Drill("collections over 5 M objects, one after another: the same", "has no embedded use", faults.collecting),
    Drill("20,000 requests to an engine that is stopped", NOT_MEASURED, faults.full_engine),
]  # fmt: skip


def rendered(machine: str, results: list[tuple[Drill, str]]) -> str:
    """The page."""
    lines = [
        "# Faults: what lasts how long",
        "",
        "Every row is a drill with a test of its name in `tests/drills`; this page is what",
        "`python -m benchmarks.drills --write docs/reliability.md` printed. Times are median and worst of the rounds,",
        "on a machine that other work shared. The Rust gateway's column was observed once, on another day, with the",
        "same kind of simulated ranks, two per group; it is not measured again here.",
        "",
        f"{machine}.",
        "",
        "| event | Rust gateway 1.13.0 | smg |",
        "|---|---|---|",
        *(f"| {drill.event} | {drill.rival} | {ours} |" for drill, ours in results),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="of each drill (default 10)")
    parser.add_argument("--only", default="", metavar="WORDS", help="drills whose name has these words")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page there")
    parser.add_argument("--here", type=int, metavar="I", help=argparse.SUPPRESS)  # run that drill in this process
    args = parser.parse_args()
    if args.here is not None:
        logging.disable()  # faults are what is wanted here
        with closing(Bench(args.rounds)) as bench:
            print(DRILLS[args.here].run(bench))
        return
    machine, results = accounting.machine(), []
    for index, drill in enumerate(DRILLS):
        if args.only in drill.event:
            command = [sys.executable, "-m", "benchmarks.drills", f"--here={index}", f"--rounds={args.rounds}"]
            ours = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
            results.append((drill, ours))
            print(f"{drill.event}\n    rust: {drill.rival}\n    smg:  {ours}", flush=True)
    if args.write:
        args.write.write_text(rendered(machine, results))


if __name__ == "__main__":
    main()
