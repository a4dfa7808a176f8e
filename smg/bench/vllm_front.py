"""vLLM's own Python front as a receiver: the same frames from the same simulated ranks, and what it costs.

    VLLM_PYTHON -m smg.bench.vllm_front {client,llm} [--loop uvloop] [--streams 256] [--ranks 2] [--step-ms 10] ...

`client` is `DPLBAsyncMPClient`, which takes a step's outputs in a batch; `llm` is `AsyncLLM` above it, with an
`async for` per request, token ids only. Both run as they do in an API server process that did not start its engines
itself. The coordinator says once that the engines run; a real one also sends loads ten times a second. Prints what
consume.py prints.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgpack
import zmq

from smg.bench.consume import PROMPT, Measured, add_arguments, rounds, run
from smg.bench.ranks import NEVER, Ranks
from smg.bench.simulator import Simulator
from smg.protocol import handshake

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

MODEL = {  # as much of one as a front wants to know
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "vocab_size": 32000,
    "torch_dtype": "float32",
}


class Launcher(threading.Thread):
    """What vLLM has beside its front: answers the ranks' HELLO with the front's addresses, and is the coordinator."""

    def __init__(self, directory: str, ranks: int) -> None:
        super().__init__(daemon=True)
        self.addresses = {
            "input_address": f"ipc://{directory}/in",
            "output_address": f"ipc://{directory}/out",
            "stats_update_address": f"ipc://{directory}/stats",
        }
        self._ranks = ranks
        context: zmq.Context[Any] = zmq.Context.instance()
        self._router, self._stats = context.socket(zmq.ROUTER), context.socket(zmq.XPUB)
        self._router.bind("tcp://127.0.0.1:0")
        self.address = self._router.last_endpoint.decode()
        self._stats.bind(self.addresses["stats_update_address"])

    def run(self) -> None:
        init = handshake.encode_init([self.addresses["input_address"]], [self.addresses["output_address"]])
        ready = 0
        while ready < self._ranks:
            identity, message = self._router.recv_multipart()
            if handshake.decode_status(message).status == handshake.HELLO:
                self._router.send_multipart([identity, init])
            else:
                ready += 1
        self._stats.recv()  # the front subscribes
        self._stats.send(msgpack.packb([[[0, 0, 0.0]] * self._ranks, 0, True]))


def configuration(directory: str, ranks: int) -> Any:
    """A VllmConfig of a small dense model with that many data-parallel ranks."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    (Path(directory) / "config.json").write_text(json.dumps(MODEL))
    arguments = AsyncEngineArgs(
        model=directory,
        tokenizer=directory,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        data_parallel_size=ranks,
        data_parallel_size_local=ranks,
        data_parallel_backend="mp",
    )
    return arguments.create_engine_config()


class Front:
    """One of the two receivers, made on the loop that it runs on."""

    def __init__(self, kind: str, config: Any, addresses: dict[str, str]) -> None:
        self._kind, self._config, self._addresses = kind, config, addresses
        self._round = 0
        self._made: Any = None

    def make(self) -> Any:
        if self._made is None:
            from vllm.v1.executor.abstract import Executor

            executor = Executor.get_class(self._config)
            if self._kind == "client":
                from vllm.v1.engine.core_client import DPLBAsyncMPClient

                self._made = DPLBAsyncMPClient(self._config, executor, False, self._addresses)
            else:
                from vllm.v1.engine.async_llm import AsyncLLM

                self._made = AsyncLLM(
                    self._config, executor, log_stats=False, log_requests=False, client_addresses=self._addresses
                )
                self._made._supported_tasks = ("generate",)  # asked of an engine once; these ranks do not answer it
        return self._made

    async def consume(self, measured: Measured, requests: int, tokens: int) -> None:
        made = self.make()
        self._round += 1
        names = [f"{self._round}-{number:028x}" for number in range(requests)]
        await (self._batches if self._kind == "client" else self._generators)(made, names, measured, tokens)

    async def _batches(self, client: Any, names: list[str], measured: Measured, tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        for name in names:
            await client.add_request_async(
                EngineCoreRequest(
                    request_id=name,
                    prompt_token_ids=list(PROMPT),
                    mm_features=None,
                    sampling_params=SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False),
                    pooling_params=None,
                    arrival_time=time.time(),
                    lora_request=None,
                    cache_salt=None,
                    data_parallel_rank=None,
                )
            )
        await measured.arrived(len(names))
        measured.start()
        left, seen = len(names), 0
        while left:
            outputs = await client.get_output_async()
            for out in outputs.outputs:
                seen += len(out.new_token_ids)
                if out.finish_reason is not None:
                    left -= 1
        measured.end(seen)

    async def _generators(self, llm: Any, names: list[str], measured: Measured, tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )

        async def consume(name: str) -> int:
            seen = 0
            async for out in llm.generate({"prompt_token_ids": list(PROMPT)}, params, name):
                seen += sum(len(part.token_ids) for part in out.outputs)
            return seen

        tasks = [asyncio.create_task(consume(name)) for name in names]
        await measured.arrived(len(names))
        measured.start()
        measured.end(sum(await asyncio.gather(*tasks)))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m smg.bench.vllm_front",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=("client", "llm"))
    add_arguments(parser)
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks: vLLM's balancing client wants two or more")
    logging.disable(logging.WARNING)
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="smg-bench-"))
        config = configuration(directory, args.ranks)
        launcher = Launcher(directory, args.ranks)
        launcher.start()
        simulator = Simulator(launcher.address, engine="vllm", ranks=args.ranks, start_at=NEVER)
        ranks = Ranks(stack.enter_context(simulator))
        front = Front(args.kind, config, launcher.addresses)
        run(rounds(front.consume, Measured([ranks], args.step_ms), args), args.loop)
    os._exit(0)  # vLLM's own ending wants the loop that is gone


if __name__ == "__main__":
    main()
