"""Reading, templating and tokenizing a chat of one message: on the event loop, or on the front's worker thread.

    python -m benchmarks.admission [--model-path DIR]

The front decides by the body's size; INLINE_BYTES and FAST_INLINE_BYTES in `smg.http.front` rest on this. `inline`: µs
that the loop does nothing else. `thread`: µs from the hand-over to the answer, and of CPU, all threads. `loop held up`:
the longest time meanwhile that the loop did nothing else, for what holds the GIL in a thread holds up the loop as well.
Medians, bodies all different.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvloop

from smg.bench import accounting
from smg.bench.chats import Words
from smg.bench.fronts import MODEL
from smg.http import tokenizer
from smg.http.front import FAST_INLINE_BYTES, INLINE_BYTES, Front

PATH = "/v1/chat/completions"
SIZES = (500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 256_000, 1_000_000)
BYTES = 1_000_000  # of bodies per size, within COUNTS
COUNTS = (6, 100)


def bodies(words: Words, size: int) -> list[bytes]:
    count = min(COUNTS[1], max(COUNTS[0], BYTES // size))
    return [
        json.dumps({"messages": [{"role": "user", "content": words.text(size)}], "max_tokens": 1}).encode()
        for _ in range(count)
    ]


def inline(front: Front, made: list[bytes]) -> float:
    taken = []
    for body in made:
        begin = time.perf_counter()
        front.job(PATH, body)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken) * 1e6


async def threaded(front: Front, made: list[bytes]) -> tuple[float, float, float]:
    """Latency, CPU and longest hold-up of the loop, each the median in µs."""
    latencies, costs, holdups = [], [], []
    for body in made:
        begin, cpu = time.perf_counter(), time.process_time()
        await front.off_loop(front.job, PATH, body)
        latencies.append(time.perf_counter() - begin)
        costs.append(time.process_time() - cpu)
        answer = asyncio.ensure_future(front.off_loop(front.job, PATH, body))
        before, longest = time.perf_counter(), 0.0
        while not answer.done():
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, before = max(longest, now - before), now
        holdups.append(longest)
    return tuple(statistics.median(values) * 1e6 for values in (latencies, costs, holdups))  # type: ignore[return-value]


def measure(model: tokenizer.ModelTokenizer, words: Words) -> list[list[Any]]:
    router: Any = SimpleNamespace(groups=[SimpleNamespace(backend="tokenspeed")])

    async def run() -> list[list[Any]]:
        front = Front(router, model)
        front.loop = asyncio.get_running_loop()
        rows = []
        for size in SIZES:
            made = bodies(words, size)
            inline(front, made[: len(made) // 4])  # the tokenizer's caches
            held = inline(front, made)
            rows.append([size, f"{held:.0f}", *(f"{value:.0f}" for value in await threaded(front, made))])
        return rows

    return uvloop.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.admission", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", type=Path, default=MODEL)
    args = parser.parse_args()
    print(accounting.machine())
    versions = accounting.versions("tokenizers", "fastokens", "uvloop")
    print(f"{versions}; inline up to {INLINE_BYTES} bytes, with fastokens {FAST_INLINE_BYTES}\n")
    header = ["characters", "inline µs", "thread µs", "thread CPU µs", "loop held up µs"]
    model = tokenizer.load(str(args.model_path))
    encoders = {"tokenizers": tokenizer.reference_encoder(model.tokenizer)}
    if model.fast:
        encoders["fastokens"] = model._encode
    for name, encode in encoders.items():
        model._encode = encode
        print(f"{name}\n\n{accounting.table(header, measure(model, Words(args.model_path)))}\n", flush=True)


if __name__ == "__main__":
    main()
