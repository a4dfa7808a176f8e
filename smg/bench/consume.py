"""One receiver of a rank's output over a real ipc socket, and what it costs; the rank is a process of its own.

    python -m smg.bench.consume {outlet,streams,queues} {asyncio,uvloop} STEP_MS TOKENS

256 requests get TOKENS tokens each, one per step and frame (STEP_MS 0: as fast as the rank can). `outlet` takes
(stream, token ids) in batches, `streams` has an `async for` per request, `queues` is the rival: PULL, typed msgspec
decode, a dict of `asyncio.Queue`s and a task per request. Prints CPU seconds of this process, libzmq's thread and
all, from the first frame to the last token.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Coroutine
from typing import Any

import uvloop
import zmq

from smg.bench import frames
from smg.bench.simulator import IDS, Simulator, group_with_ranks
from smg.engine.group import EngineGroup
from smg.sampling import SamplingParams

REQUESTS = 256
NEVER = 1 << 30  # as `start_at`: no step until it is told to


class Measured:
    """CPU and wall time from `start`, which lets the rank make steps, to the end of the block."""

    def __init__(self, simulator: Simulator, step_ms: float) -> None:
        self._simulator, self._step_ms = simulator, step_ms

    def start(self) -> None:
        self.cpu, self.wall = time.process_time(), time.monotonic()
        self._simulator.call("pace", step_ms=self._step_ms, start_at=1)

    def report(self, tokens: int) -> None:
        cpu, wall = time.process_time() - self.cpu, time.monotonic() - self.wall
        print(json.dumps({"cpu": cpu, "seconds": wall, "tokens": tokens}))


async def outlet(group: EngineGroup, measured: Measured, tokens: int) -> None:
    exit_ = group.outlet()
    params = SamplingParams(max_tokens=tokens)
    streams = [group.submit(range(100), params, outlet=exit_) for _ in range(REQUESTS)]
    left, seen = len(streams), 0
    await asyncio.sleep(0.2)  # the requests are on their way
    measured.start()
    while left:
        await exit_.wait()
        for _stream, out in exit_.take():
            seen += len(out.token_ids)
            if out.finish_reason is not None:
                left -= 1
    measured.report(seen)


async def streams(group: EngineGroup, measured: Measured, tokens: int) -> None:
    async def consume() -> int:
        seen = 0
        async for out in group.submit(range(100), SamplingParams(max_tokens=tokens)):
            seen += len(out.token_ids)
        return seen

    tasks = [asyncio.create_task(consume()) for _ in range(REQUESTS)]
    await asyncio.sleep(0.2)
    measured.start()
    measured.report(sum(await asyncio.gather(*tasks)))


async def queues(pull: zmq.Socket[bytes], measured: Measured, tokens: int) -> None:
    waiting: dict[str, asyncio.Queue[tuple[list[int], str]]] = {IDS[i]: asyncio.Queue() for i in range(REQUESTS)}
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
    asyncio.get_running_loop().add_reader(pull.fileno(), receive)
    await asyncio.sleep(0.2)
    measured.start()
    measured.report(sum(await asyncio.gather(*tasks)))


def run(work: Coroutine[Any, Any, None], loop: str) -> None:
    runner = uvloop.new_event_loop() if loop == "uvloop" else asyncio.new_event_loop()
    asyncio.set_event_loop(runner)
    try:
        runner.run_until_complete(work)
    finally:
        runner.close()


def main() -> None:
    kind, loop, step, tokens = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
    if kind in ("outlet", "streams"):
        with group_with_ranks(start_at=NEVER) as (group, simulator):
            receiver = outlet if kind == "outlet" else streams
            run(receiver(group, Measured(simulator, step), tokens), loop)
    elif kind == "queues":
        with (
            tempfile.TemporaryDirectory(prefix="smg-bench-") as directory,
            zmq.Context() as context,
            context.socket(zmq.PULL) as pull,
        ):
            pull.setsockopt(zmq.RCVHWM, 0)
            pull.bind(f"ipc://{directory}/out")
            with Simulator(f"ipc://{directory}/out", plain=True, start_at=NEVER) as simulator:
                simulator.call("fill", count=REQUESTS, limit=tokens)
                run(queues(pull, Measured(simulator, step), tokens), loop)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
