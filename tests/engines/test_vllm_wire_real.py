"""The wire as real vLLM engines speak it, with nothing of the router but its protocol modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from vllm_driver import CONTEXT, PATIENCE, Engines

import smg
from smg.protocol import handshake, vllm

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = [100, 200, 300, 400]
RID = "0123456789abcdef0123456"  # and a digit


class Bare:
    """The sockets of a router of one rank."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.handshake, self.input, self.output = (self.bound(kind) for kind in (zmq.ROUTER, zmq.ROUTER, zmq.PULL))

    def bound(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
        socket.bind("tcp://127.0.0.1:0")
        return socket

    def outputs(self) -> Any:
        return vllm.decode_outputs(self.output.recv_multipart())

    def send(self, kind: bytes, payload: bytes) -> None:
        self.input.send_multipart([handshake.identity(0), kind, payload])

    def rows(self, rid: str) -> list[Any]:
        """All rows of a request, to its last one."""
        rows: list[Any] = []
        while not rows or not rows[-1].finish_reason:
            rows += [row for row in self.outputs().rows if row.rid == rid]
        return rows


def address(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()


@pytest.fixture(scope="module")
def bare() -> Iterator[Bare]:
    bare = Bare()
    yield bare
    bare.context.destroy(linger=0)


@pytest.fixture(scope="module")
def registration(bare: Bare, tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What an engine registers, which has dialed and serves."""
    engines = Engines(tmp_path_factory.mktemp("vllm") / "log", tiny_models / "llama", 1, address(bare.handshake))
    try:
        identity, hello = bare.handshake.recv_multipart()
        assert (identity, handshake.decode_status(hello).status) == (handshake.identity(0), handshake.HELLO)
        init = handshake.encode_init([address(bare.input)], [address(bare.output)])
        bare.handshake.send_multipart([identity, init])
        registration = bare.input.recv_multipart()
        ready = bare.handshake.recv_multipart()
        assert registration[0] == ready[0] == identity
        assert handshake.decode_status(ready[1]).status == handshake.READY
        yield handshake.decode_registration(registration[1])
    except zmq.Again:
        pytest.fail(f"the engine did not go on with its handshake; {engines.told()}")
    finally:
        engines.close()


def test_an_engine_registers_its_version_and_its_limits(registration: Any) -> None:
    assert (registration.family, registration.version.split("+")[0]) == ("vllm", "0.32.0")
    assert (registration.max_model_len, registration.max_num_seqs) == (CONTEXT, 16)
    assert (registration.data_parallel_size, registration.world_size) == (1, 1)
    assert registration.num_gpu_blocks > 0


def test_a_request_is_answered_with_its_tokens_and_logprobs(bare: Bare, registration: Any) -> None:
    params = smg.SamplingParams(max_tokens=6, temperature=0, logprobs=2, ignore_eos=True)
    bare.send(vllm.ADD, vllm.encode_add(RID + "1", PROMPT, params, version=registration.vllm_version))
    rows = bare.rows(RID + "1")
    assert rows[0].counts == (len(PROMPT), 0)
    assert rows[-1].finish_reason == "length"
    tokens = [token for row in rows for token in row.token_ids]
    logprobs = vllm.decode_logprobs(b"".join(cold for row in rows for cold in row.colds))
    assert len(tokens) == 6
    assert logprobs is not None
    assert [(token, top[0]) for token, _, top in logprobs] == [(token, (token, value)) for token, value, _ in logprobs]
    assert [token for token, _, _ in logprobs] == tokens


def test_a_call_is_answered_beside_the_outputs(bare: Bare, registration: Any) -> None:
    bare.send(vllm.UTILITY, vllm.encode_utility(7, "is_sleeping"))
    while (utility := bare.outputs().utility) is None:
        pass
    assert utility[0] == 7
    assert vllm.decode_utility(utility[1]) == vllm.UtilityReply(7, None, False)
