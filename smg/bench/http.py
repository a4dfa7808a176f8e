"""`smg bench http`: OpenAI-compatible servers under load, any that there are, or both gateways on simulated ranks.

With --url, each server named is sent the same requests, turn by turn, from this process; the first is the one that the
others are compared with. Without it the front is measured beside its rivals (fronts.py).
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from smg.bench import fronts, loadtest
from smg.bench.loadtest import Load, Objective, Target
from smg.bench.results import Measurement
from smg.bench.trace import SHAPES, Lengths
from smg.bench.turns import BenchError, Plan

API_KEY = "OPENAI_API_KEY"
METRICS = {
    "ttft_p50": ("TTFT, p50", "ms"),
    "ttft_p90": ("TTFT, p90", "ms"),
    "ttft_p99": ("TTFT, p99", "ms"),
    "itl_p50": ("between pieces of text, p50", "ms"),
    "itl_p90": ("between pieces of text, p90", "ms"),
    "itl_p99": ("between pieces of text, p99", "ms"),
    "e2e_p50": ("whole request, p50", "ms"),
    "e2e_p90": ("whole request, p90", "ms"),
    "e2e_p99": ("whole request, p99", "ms"),
    "throughput": ("tokens", "per second"),
    "goodput": ("requests {objective}", "per second"),
    "good": ("requests {objective}", "%"),
    "errors": ("errors{kinds}", "requests"),
    "late_p99": ("this client began late by, p99", "ms"),
}
OPEN_ONLY = "late_p99"


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--model-path",
        type=Path,
        default=fronts.MODEL,
        metavar="DIR",
        help="without --url: tokenizer and chat template of the gateways (default: the demo's)",
    )
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="a server to test, up to where /v1 begins; several are sent the same requests turn by turn",
    )
    parser.add_argument("--model", metavar="NAME", help="model to ask for (default: the first that it lists)")
    parser.add_argument("--completions", action="store_true", help="/v1/completions instead of chats")
    parser.add_argument(
        "--api-key", default=os.environ.get(API_KEY), help=f"sent as a bearer token (default ${API_KEY})"
    )
    parser.add_argument(
        "--concurrency", type=_counts, metavar="LIST", help="closed loop: requests at once (default 16)"
    )
    parser.add_argument("--rate", type=_rates, metavar="LIST", help="open loop: requests per second, Poisson")
    parser.add_argument("--requests", type=int, metavar="N", help="of each run (default 200, 50 with --quick)")
    parser.add_argument("--lengths", choices=SHAPES, default="sharegpt", help="kind of traffic (default sharegpt)")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="every prompt has about this many words")
    parser.add_argument(
        "--output-tokens", type=int, metavar="N", help="every request asks for this many (also --tokens)"
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="ask for all of them, of servers that know ignore_eos"
    )
    parser.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="goodput: highest time to the first token")
    parser.add_argument("--slo-token-ms", type=float, metavar="MS", help="goodput: highest mean time per further token")
    parser.add_argument("--slo-e2e-ms", type=float, metavar="MS", help="goodput: highest time of a whole request")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="for a request (default 300)")
    parser.add_argument("--warm-up", type=int, default=8, metavar="N", help="requests before, not counted (default 8)")


def configured(args: argparse.Namespace) -> Callable[[Plan], Iterator[Measurement]]:
    """The measurement that these options ask for."""
    if not args.url:
        return partial(fronts.measure, model=args.model_path)
    return partial(_load_test, args)


def _load_test(args: argparse.Namespace, plan: Plan) -> Iterator[Measurement]:
    targets = dict(_target(args, url) for url in args.url)
    if len(targets) < len(args.url):
        raise ValueError("--url: two servers have the same name; give each its own, as in NAME=http://…")
    shape = SHAPES[args.lengths]
    if args.prompt_tokens:
        shape = replace(shape, prompt=Lengths(args.prompt_tokens, 0.0, args.prompt_tokens))
    if tokens := args.output_tokens or plan.tokens:
        shape = replace(shape, output=Lengths(tokens, 0.0, tokens))
    objective = Objective(
        *(None if ms is None else ms / 1e3 for ms in (args.slo_ttft_ms, args.slo_token_ms, args.slo_e2e_ms))
    )
    count = args.requests or (50 if plan.quick else 200)
    for name, target in targets.items():
        warm_up = _run(loadtest.run(target, Load(shape, args.warm_up, concurrency=args.warm_up), plan.seed - 1))
        if warm_up.sent and warm_up.errors.total() == len(warm_up.sent):
            raise BenchError(f"{name} answered none of {args.warm_up} requests to warm up: {warm_up.complaint}")
    closed = args.concurrency or ([] if args.rate else [plan.streams or 16])
    loads = [(f"http.closed.{n}", {"concurrency": n}, Load(shape, max(count, n), concurrency=n)) for n in closed]
    loads += [(f"http.open.{rate:g}", {"rate": rate}, Load(shape, count, rate=rate)) for rate in args.rate or []]
    for name, facts, load in loads:
        yield from _point(plan, name, facts, load, targets, objective)


def _point(
    plan: Plan, name: str, facts: dict[str, Any], load: Load, targets: dict[str, Target], objective: Objective
) -> Iterator[Measurement]:
    """One load, sent to every server in turn, with a seed for each repeat."""
    given: dict[str, dict[str, list[float]]] = {metric: {} for metric in METRICS}
    kinds: dict[str, Counter[str]] = {server: Counter() for server in targets}
    for repeat in range(plan.repeats):
        for server in list(targets) if repeat % 2 == 0 else reversed(list(targets)):
            run = _run(loadtest.run(targets[server], load, plan.seed + repeat))
            figures = run.figures(objective)
            kinds[server] += run.errors
            for metric, value in figures.items():
                given[metric].setdefault(server, []).append(value)
            plan.progress(
                f"{name}: {repeat + 1}/{plan.repeats}, {server}: TTFT p50 {figures['ttft_p50']:.1f} ms, "
                f"{figures['throughput']:.0f} tokens/s, errors: {run.complaint or 'none'}"
            )
    shown = ", ".join(f"{server}: {_counted(found)}" for server, found in kinds.items() if found)
    what = f"{facts['concurrency']} at once" if "concurrency" in facts else f"{facts['rate']:g} a second"
    for metric, (title, unit) in METRICS.items():
        if metric == OPEN_ONLY and load.rate is None:
            continue
        samples = {server: given[metric][server] for server in targets}
        title = title.format(objective=objective, kinds=f" ({shown})" if shown else "")
        yield Measurement(
            f"{name}.{metric}",
            f"{what}: {title}",
            unit,
            {server: [value for value in values if value == value] for server, values in samples.items()},
            {**facts, "requests": load.count, "errors": {server: dict(found) for server, found in kinds.items()}},
        )


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common())


def _target(args: argparse.Namespace, given: str) -> tuple[str, Target]:
    name, equals, url = given.partition("=")
    if not equals or "://" in name:
        name, url = "", given
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"--url {given}: must be http://HOST:PORT or https://…, with NAME= before it or not")
    url = url.rstrip("/").removesuffix("/v1") + "/"
    model = args.model
    if model is None:
        try:
            model = _run(loadtest.first_model(url, args.api_key))
        except (aiohttp.ClientError, OSError, LookupError, ValueError, TypeError) as error:
            raise BenchError(
                f"--url {given}: cannot list its models ({error}); is it up? --model NAME goes without"
            ) from None
    return name or parts.netloc, Target(
        url,
        model,
        chat=not args.completions,
        api_key=args.api_key,
        ignore_eos=args.ignore_eos,
        timeout=args.timeout,
    )


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def _counts(text: str) -> list[int]:
    return [int(value) for value in _rates(text)]


def _rates(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: must be numbers above 0 with commas between")
    return values
