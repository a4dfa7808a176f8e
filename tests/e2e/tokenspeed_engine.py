"""An engine that is TokenSpeed's transport and little else: it answers with a fixed text, a token a step.

Takes the place of TokenSpeed's Python in the `tokenspeed-transport` lane, and so the launch command's arguments.
Its sockets, handshake, structs and checks are the engine's own; what they serve is not.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

import tokenspeed_rank
import zmq
from tokenizers import Tokenizer
from tokenspeed_rank import Rank, batch, engine

STEP = 0.002  # seconds
CONTEXT = 4096  # tokens
TEXT = (
    "The old road goes down to the river and over a bridge of stone. Beyond it the fields are wide, and in the "
    "evening the people of the village walk there, talking about the weather, the harvest and the fair. "
)


class Engine(Rank):
    """One rank: dials as TokenSpeed does, then decodes for whoever asks."""

    def __init__(self, text: list[int]) -> None:
        self.text = text
        self.running: dict[str, dict[str, Any]] = {}

    def tell(self, kind: str, **what: Any) -> None:
        """Nobody controls it."""

    def serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self.recv._socket, zmq.POLLIN)
        while True:
            poller.poll(0 if self.running else None)
            self.take()
            if self.running:
                self.step()
                time.sleep(STEP)

    def take(self) -> None:
        while True:
            try:
                received = self.recv.recv_pyobj(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            if isinstance(received, engine.io_struct.AbortReq):
                self.running.pop(received.rid, None)
            elif received.validation_error:
                row = {"rid": received.rid, "tokens": [], "completion": 0}
                self.output.send_pyobj(batch([{**row, "finish": ["abort", received.validation_error]}]))
            else:
                self.running[received.rid] = {"request": received, "done": 0}

    def step(self) -> None:
        rows = []
        for rid, state in list(self.running.items()):
            request, done = state["request"], state["done"]
            sampling = request.sampling_params
            begin = sum(request.input_ids) + (sampling.seed or 0)
            state["done"] = done = done + 1
            row = {
                "rid": rid,
                "tokens": [self.text[(begin + done) % len(self.text)]],
                "prompt": len(request.input_ids),
                "completion": done,
            }
            if request.return_logprob:
                row["logprobs"] = [-0.5]
            if done >= (sampling.max_new_tokens or CONTEXT):
                row["finish"] = ["length", done]
                del self.running[rid]
            rows.append(row)
        self.output.set_load_snapshot(len(self.running), 0, len(self.running), 64)
        self.output.send_pyobj(batch(rows))


def run(index: int, args: argparse.Namespace, text: list[int]) -> None:
    rank = Engine(text)
    rank.dial(args.data_parallel_address, args.data_parallel_rpc_port, index, CONTEXT)

    def end(number: int, frame: object) -> None:
        rank.stop()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    print(f"rank {index} is connected", flush=True)
    rank.serve()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data-parallel-address", required=True)
    parser.add_argument("--data-parallel-rpc-port", type=int, required=True)
    parser.add_argument("--data-parallel-size", type=int, default=1)
    args, _ = parser.parse_known_args()
    tokenizer = Tokenizer.from_file(str(Path(args.model) / "tokenizer.json"))
    tokenspeed_rank.VOCABULARY = tokenizer.get_vocab_size()
    text = tokenizer.encode(TEXT, add_special_tokens=False).ids
    for index in range(args.data_parallel_size):
        if os.fork() == 0:
            run(index, args, text)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the ranks get it too, and this ends with them
    for _ in range(args.data_parallel_size):
        _, status = os.wait()
        if status:
            os.killpg(0, signal.SIGKILL)  # as the engine's parent takes all ranks with one that fails


if __name__ == "__main__":
    main()
