"""A batch job: all prompts go out at once, and one outlet brings their outputs together, whatever comes first.

python examples/batch.py ipc:///run/user/1000/smg/engine-31000 [ranks]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import smg


def complete(
    group: smg.EngineGroup, prompts: Sequence[Sequence[int]], params: smg.SamplingParams
) -> Iterator[tuple[int, list[int] | smg.StreamError]]:
    """(number of the prompt, its token ids or what went wrong), in the order in which they end."""
    outlet = group.outlet()  # keeps the streams; closing it aborts what still runs
    try:
        tokens: list[list[int]] = []
        for number, prompt in enumerate(prompts):
            group.submit(prompt, params, outlet=outlet).data = number
            tokens.append([])
        running = len(tokens)
        while running:
            outlet.wait_blocking()
            for stream, out in outlet.take():
                if isinstance(out, smg.StreamError):
                    running -= 1
                    yield stream.data, out
                    continue
                tokens[stream.data] += out.token_ids
                if out.finish_reason is not None:
                    running -= 1
                    yield stream.data, tokens[stream.data]
    finally:
        outlet.close()


def main(url: str, ranks: str = "1") -> None:
    prompts = [[seed, seed + 1] for seed in range(100)]
    with smg.EngineGroup(url, backend="tokenspeed", ranks=int(ranks)) as group:
        group.wait_ready(timeout=600)
        for number, result in complete(group, prompts, smg.SamplingParams(max_tokens=32)):
            print(number, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
