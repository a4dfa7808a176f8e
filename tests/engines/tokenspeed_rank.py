"""Engine ranks of TokenSpeed's own transport, in processes of their own.

Started by `tokenspeed_driver`. Imports the engine once, then reads paths of Unix sockets from its input, one a
line. For each it forks a rank, which connects there and does what it is told in lines of JSON; what it sends
back, in the order in which it happened, is lines of JSON too.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import zmq
from tokenspeed_stand_ins import import_transport

engine = import_transport()
VOCABULARY = 1000  # token ids that the engine knows
UNUSED = (  # columns of BatchTokenIDOut that it leaves empty on this path
    "input_top_logprobs_val",
    "input_top_logprobs_idx",
    "output_top_logprobs_val",
    "output_top_logprobs_idx",
    "input_token_ids_logprobs_val",
    "input_token_ids_logprobs_idx",
    "output_token_ids_logprobs_val",
    "output_token_ids_logprobs_idx",
    "output_hidden_states",
)


class Rank:
    """One rank. Its methods named in COMMANDS are what it can be told."""

    COMMANDS = ("dial", "send", "send_many", "stop", "hang_up", "decode")

    def __init__(self, path: str) -> None:
        self.control = socket.socket(socket.AF_UNIX)
        self.control.connect(path)
        self.lines = self.control.makefile("r")
        self.context: zmq.Context | None = None
        self.recv: Any = None
        self.output: Any = None

    def tell(self, kind: str, **what: Any) -> None:
        self.control.sendall(json.dumps({"kind": kind, **what}).encode() + b"\n")

    def serve(self) -> None:
        """Until the other side closes."""
        self.tell("started", pid=os.getpid())
        while True:
            poller = zmq.Poller()
            poller.register(self.control, zmq.POLLIN)
            if self.recv is not None:
                poller.register(self.recv._socket, zmq.POLLIN)
            ready = dict(poller.poll())
            if self.recv is not None and self.recv._socket in ready:
                self.read_requests()
            if self.control.fileno() in ready:
                line = self.lines.readline()
                if not line:
                    return
                command = json.loads(line)
                name = command.pop("do")
                assert name in self.COMMANDS
                getattr(self, name)(**command)

    def read_requests(self) -> None:
        """As the engine's scheduler does: one object a call, until there is none."""
        while True:
            try:
                self.tell(**shown(self.recv.recv_pyobj(zmq.NOBLOCK)))
            except zmq.ZMQError:
                return

    def dial(self, host: str, port: int, index: int, max_model_len: int) -> None:
        """The engine's own start-up: HELLO, INIT, READY, registration, with what an event loop would report."""
        loop = SimpleNamespace(
            server_args=SimpleNamespace(
                decode_context_parallel_size=1,
                max_num_seqs=256,
                chunked_prefill_size=-1,
                served_model_name="tiny",
                model="/models/tiny",
                zmq_engine_index=0,
                enable_output_logprobs=True,
                zmq_handshake_endpoint=lambda: f"tcp://{host}:{port}",
            ),
            _scheduler_cache_geometry=SimpleNamespace(num_device_pages=64, prefix_granularity=16),
            model_config=SimpleNamespace(context_len=max_model_len, dtype="torch.bfloat16", vocab_size=VOCABULARY),
            multimodal_encoder_dtype=None,
            world_size=2,
            dp_size=2,
            attn_tp_size=1,
            dp_rank=index,
            max_total_num_tokens=1024,
            supports_prompt_logprobs=False,
        )
        self.context = zmq.Context(2)
        self.recv, self.output = engine.zmq_msgpack.connect_msgpack_engine_for_loop(self.context, loop)
        self.tell("dialed")

    def send(self, rows: list[dict[str, Any]], load: list[int] | None) -> None:
        """One step's outputs, through the engine's own send socket."""
        if load is not None:
            self.output.set_load_snapshot(*load)
        self.output.send_pyobj(batch(rows))
        self.tell("sent")

    def send_many(self, rid: str, count: int) -> None:
        """`count` steps of one token each, as fast as the socket takes them; the last one finishes."""
        for step in range(count):
            finish = ["length", count] if step == count - 1 else None
            row = {"rid": rid, "tokens": [step], "finish": finish, "completion": step + 1}
            self.output.send_pyobj(batch([row]))
        self.tell("sent")

    def stop(self) -> None:
        """The engine's end, normal or after an exception: it says so, and its process goes."""
        self.output.send_engine_dead()
        self.leave(linger=5000)

    def hang_up(self) -> None:
        """An end without a word."""
        self.leave(linger=0)

    def leave(self, linger: int) -> None:
        self.recv = self.output = None
        assert self.context is not None
        self.context.destroy(linger)
        self.tell("left")

    def decode(self, frames: list[str]) -> None:
        """What the engine makes of a message's frames (hexadecimal), or "dropped"."""
        source = SimpleNamespace(recv_multipart=Once([bytes.fromhex(frame) for frame in frames]))
        receiver = engine.zmq_msgpack.MsgpackRecvSocket(
            source, VOCABULARY, enable_output_logprobs=True, supports_prompt_logprobs=False
        )
        try:
            self.tell(**shown(receiver.recv_pyobj(zmq.NOBLOCK)))
        except zmq.Again:
            self.tell("dropped")


class Once:
    """A socket's `recv_multipart` with one message in it."""

    def __init__(self, frames: list[bytes]) -> None:
        self.messages = [frames]

    def __call__(self, flags: int) -> list[bytes]:
        if not self.messages:
            raise zmq.Again
        return self.messages.pop()


def batch(rows: list[dict[str, Any]]) -> Any:
    """`BatchTokenIDOut` as the engine's output processor fills it."""
    kinds = engine.request_types
    finishes = {"stop": kinds.FINISH_MATCHED_TOKEN, "length": kinds.FINISH_LENGTH, "abort": kinds.FINISH_ABORT}
    reasons = []
    for row in rows:
        kind, detail = row.get("finish") or (None, None)
        reasons.append(finishes[kind](detail).to_json() if kind else None)
    tokens = [row["tokens"] for row in rows]
    return engine.io_struct.BatchTokenIDOut(
        rids=[row["rid"] for row in rows],
        finished_reasons=reasons,
        decoded_texts=[""] * len(rows),
        decode_ids=[[1, 2, *ids] for ids in tokens],  # the end of the prompt comes before the new ones here
        read_offsets=[2] * len(rows),
        output_ids=tokens,
        output_multi_ids=None,
        skip_special_tokens=[True] * len(rows),
        spaces_between_special_tokens=[True] * len(rows),
        no_stop_trim=[False] * len(rows),
        prompt_tokens=[row.get("prompt", 3) for row in rows],
        completion_tokens=[row["completion"] for row in rows],
        cached_tokens=[row.get("cached", 0) for row in rows],
        spec_verify_ct=[0] * len(rows),
        input_token_logprobs_val=[[] for _ in rows],
        input_token_logprobs_idx=[[] for _ in rows],
        output_token_logprobs_val=[row.get("logprobs", []) for row in rows],
        output_token_logprobs_idx=[row["tokens"] if "logprobs" in row else [] for row in rows],
        batch_accept_draft_tokens=[None] * len(rows),
        output_extra_infos=[{} for _ in rows],
        generated_time=time.time(),
        **{name: [] for name in UNUSED},
    )


def shown(received: Any) -> dict[str, Any]:
    """A received object, field by field, as JSON has it."""
    if isinstance(received, engine.io_struct.AbortReq):
        return {"kind": "abort", "rid": received.rid}
    assert type(received) is engine.io_struct.TokenizedGenerateReqInput
    fields = {name: getattr(received, name) for name in received.__struct_fields__}
    sampling = fields.pop("sampling_params")
    assert type(sampling) is engine.sampling_params.SamplingParams
    values = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    if values["stop_token_ids"] is not None:
        assert type(values["stop_token_ids"]) is set
        values["stop_token_ids"] = sorted(values["stop_token_ids"])
    return {"kind": "request", "fields": msgspec.to_builtins(fields), "sampling": msgspec.to_builtins(values)}


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the ranks
    print("ready", flush=True)
    for line in sys.stdin:
        if os.fork() == 0:
            Rank(line.rstrip("\n")).serve()
            os._exit(0)
    os._exit(0)  # the engine's imports take seconds to tidy up after themselves


if __name__ == "__main__":
    main()
