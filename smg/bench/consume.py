"""One receiver of ranks' outputs over real ipc sockets, and what it costs; the ranks are processes of their own.

    python -m smg.bench.consume {outlet,streams,pyzmq,receive} [--loop uvloop] [--streams 256] [--step-ms 10] ...

Every request gets TOKENS tokens, one per step and frame (STEP_MS 0: as fast as the ranks can). `outlet` takes
(stream, outputs) in batches, `streams` has an `async for` per request, `pyzmq` is what one would write without smg:
PULL, typed msgspec decode, a dict of `asyncio.Queue`s and a task per request. `receive` takes each frame off its
socket and drops it: what libzmq and the loop cost before anybody looks at a frame. Prints CPU seconds of this process,
libzmq's thread and all, from the first step to the last token; a short round before it is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import zmq

from smg._outlets import Outlet, Output
from smg.bench import frames
from smg.bench.ranks import NEVER, Ranks, groups_with_ranks, pull_socket
from smg.bench.simulator import IDS, Simulator
from smg.engine.group import EngineGroup
from smg.errors import Overloaded
from smg.routing.router import Router
from smg.sampling import SamplingParams

WARM_UP = 10  # tokens per request
PROMPT = range(100)

Work = Callable[["Measured", int, int], Awaitable[None]]  # measured, requests, tokens


class Measured:
    """CPU and wall time of a round, from `start`, which lets the ranks make steps, to `end`."""

    def __init__(self, ranks: Sequence[Ranks], step_ms: float) -> None:
        self._ranks, self._step_ms = ranks, step_ms
        self.result: dict[str, float] = {}

    async def arrived(self, count: int) -> None:
        """Until the ranks have that many more requests than when the round began."""
        while sum(ranks.adds() for ranks in self._ranks) < self._before + count:
            await asyncio.sleep(0.02)

    def prepare(self) -> None:
        for ranks in self._ranks:
            ranks.hold()
        self._before = sum(ranks.adds() for ranks in self._ranks)

    def start(self) -> None:
        self._cpu, self._wall = time.process_time(), time.monotonic()
        for ranks in self._ranks:
            ranks.start(self._step_ms)

    def end(self, tokens: int) -> None:
        self.result = {
            "cpu": time.process_time() - self._cpu,
            "seconds": time.monotonic() - self._wall,
            "tokens": tokens,
        }


async def submit(group: EngineGroup, tokens: int, outlet: Outlet | None = None) -> Any:
    while True:
        try:
            return group.submit(PROMPT, SamplingParams(max_tokens=tokens), outlet=outlet)
        except Overloaded:  # the ranks have not read the last thousand yet
            await asyncio.sleep(0.001)


async def with_outlets(groups: list[EngineGroup], measured: Measured, requests: int, tokens: int) -> None:
    router = Router(groups)
    outlets = {group: group.outlet() for group in groups}
    streams: dict[EngineGroup, list[Any]] = {group: [] for group in groups}
    for _ in range(requests):
        group = router.choose()
        streams[group].append(await submit(group, tokens, outlets[group]))

    async def consume(outlet: Outlet, left: int) -> int:
        seen = 0
        while left:
            await outlet.wait()
            for _stream, out in outlet.take():
                if not isinstance(out, Output):
                    raise out
                seen += len(out.token_ids)
                if out.finish_reason is not None:
                    left -= 1
        return seen

    await measured.arrived(requests)
    measured.start()
    measured.end(sum(await asyncio.gather(*(consume(outlets[group], len(streams[group])) for group in groups))))
    for outlet in outlets.values():
        outlet.close()


async def with_streams(groups: list[EngineGroup], measured: Measured, requests: int, tokens: int) -> None:
    router = Router(groups)
    streams = [await submit(router.choose(), tokens) for _ in range(requests)]

    async def consume(stream: Any) -> int:
        seen = 0
        async for out in stream:
            seen += len(out.token_ids)
        return seen

    tasks = [asyncio.create_task(consume(stream)) for stream in streams]
    await measured.arrived(requests)
    measured.start()
    measured.end(sum(await asyncio.gather(*tasks)))


async def with_queues(pull: zmq.Socket[bytes], measured: Measured, requests: int, tokens: int) -> None:
    waiting: dict[str, asyncio.Queue[tuple[list[int], str]]] = {IDS[i]: asyncio.Queue() for i in range(requests)}
    decode = frames.decoder().decode

    async def consume(queue: asyncio.Queue[tuple[list[int], str]]) -> int:
        seen, finished = 0, ""
        while not finished:
            token_ids, finished = await queue.get()
            seen += len(token_ids)
        return seen

    def receive() -> None:
        while True:
            try:
                batch = decode(pull.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            for rid, token_ids, finished in zip(batch.rids, batch.output_ids, batch.finished_reasons, strict=True):
                waiting[rid].put_nowait((token_ids, finished))

    tasks = [asyncio.create_task(consume(queue)) for queue in waiting.values()]
    receive()  # the descriptor tells of nothing until the socket was found empty once
    loop = asyncio.get_running_loop()
    loop.add_reader(pull.fileno(), receive)
    await asyncio.sleep(0)
    measured.start()
    measured.end(sum(await asyncio.gather(*tasks)))
    loop.remove_reader(pull.fileno())


async def dropping(pull: zmq.Socket[bytes], measured: Measured, requests: int, tokens: int) -> None:
    loop = asyncio.get_running_loop()
    left, done = tokens, loop.create_future()

    def receive() -> None:
        nonlocal left
        while True:
            try:
                pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            left -= 1
        if not left and not done.done():
            done.set_result(None)

    receive()
    loop.add_reader(pull.fileno(), receive)
    measured.start()
    await done
    measured.end(requests * tokens)
    loop.remove_reader(pull.fileno())


def run(work: Coroutine[Any, Any, None], loop: str) -> None:
    if loop == "uvloop":
        import uvloop

        runner: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    else:
        runner = asyncio.new_event_loop()
    asyncio.set_event_loop(runner)
    try:
        runner.run_until_complete(work)
    finally:
        runner.close()


async def rounds(
    work: Work, measured: Measured, args: argparse.Namespace, fill: Callable[[int], object] = lambda tokens: None
) -> None:
    """A short round, then the measured one; with --on-demand one for every line on stdin. Prints what each cost."""

    async def one(tokens: int) -> None:
        measured.prepare()
        fill(tokens)
        await work(measured, args.streams, tokens)

    await one(WARM_UP)
    while not args.on_demand or sys.stdin.readline():
        await one(args.tokens)
        print(json.dumps(measured.result), flush=True)
        if not args.on_demand:
            break


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--on-demand", action="store_true", help="a round for every line on stdin")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="uvloop")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=1, help="of each group")


ON_GROUPS = {"outlet": with_outlets, "streams": with_streams}
ON_A_SOCKET = {"pyzmq": with_queues, "receive": dropping}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m smg.bench.consume", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=[*ON_GROUPS, *ON_A_SOCKET])
    add_arguments(parser)
    parser.add_argument("--engine", choices=("tokenspeed", "vllm"), default="tokenspeed")
    parser.add_argument("--groups", type=int, default=1)
    args = parser.parse_args()
    if args.kind in ON_GROUPS:
        with groups_with_ranks(args.engine, args.groups, args.ranks) as (groups, ranks):
            run(rounds(partial(ON_GROUPS[args.kind], groups), Measured(ranks, args.step_ms), args), args.loop)
        return
    with pull_socket() as (pull, address), Simulator(address, plain=True, start_at=NEVER) as simulator:
        measured = Measured([Ranks(simulator)], args.step_ms)
        work = partial(ON_A_SOCKET[args.kind], pull)
        fill = partial(simulator.call, "fill", count=args.streams)
        run(rounds(work, measured, args, lambda tokens: fill(limit=tokens)), args.loop)


if __name__ == "__main__":
    main()
