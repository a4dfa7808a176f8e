"""Threads that share one group: each takes prompts from a queue and reads its stream with a plain `for`.

python examples/thread_worker.py ipc:///run/user/1000/smg/engine-31000 [ranks]
"""

from __future__ import annotations

import queue
import sys
import threading

import smg

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]


def work(group: smg.EngineGroup, prompts: queue.Queue[list[int]], results: dict[tuple[int, ...], list[int]]) -> None:
    while True:
        try:
            prompt = prompts.get_nowait()
        except queue.Empty:
            return
        stream = group.submit(prompt, smg.SamplingParams(max_tokens=16, ignore_eos=True))
        results[tuple(prompt)] = [token for out in stream.blocking(timeout=60) for token in out.token_ids]


def run(group: smg.EngineGroup, prompts: list[list[int]], threads: int = 4) -> dict[tuple[int, ...], list[int]]:
    """Token ids by prompt."""
    waiting: queue.Queue[list[int]] = queue.Queue()
    for prompt in prompts:
        waiting.put(prompt)
    results: dict[tuple[int, ...], list[int]] = {}
    workers = [threading.Thread(target=work, args=(group, waiting, results)) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


def main(url: str, ranks: str = "1") -> None:
    with smg.EngineGroup(url, backend="tokenspeed", ranks=int(ranks)) as group:
        group.wait_ready(timeout=600)
        for prompt, tokens in run(group, PROMPTS).items():
            print(prompt, tokens)


if __name__ == "__main__":
    main(*sys.argv[1:])
