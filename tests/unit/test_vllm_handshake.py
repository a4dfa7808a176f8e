"""vLLM's handshake: its own encoders' bytes for HELLO, READY, INIT and the registration."""

from __future__ import annotations

import pytest
from vectors import Vector, of_kind

from smg.errors import HandshakeError
from smg.protocol import handshake
from smg.protocol.vllm import layout

REGISTRATIONS = [v for v in of_kind("vllm", "ready_response") if v.frame]


@pytest.mark.parametrize("vector", of_kind("vllm", "handshake_hello", "handshake_ready"), ids=str)
def test_hello_and_ready_are_read(vector: Vector) -> None:
    status = handshake.decode_status(vector.frame)
    assert (status.status, status.local, status.headless) == (vector.decoded["status"], False, True)
    assert status.parallel_config_hash == vector.decoded.get("parallel_config_hash")


@pytest.mark.parametrize(
    "vector",
    [v for v in of_kind("vllm", "handshake_init") if not v.decoded["addresses"]["coordinator_input"]],
    ids=str,
)
def test_init_is_written_as_vllms_own_frontend_writes_it(vector: Vector) -> None:
    addresses = vector.decoded["addresses"]
    init = handshake.encode_init(addresses["inputs"], addresses["outputs"], vector.decoded["parallel_config"])
    assert init == vector.frame
    assert handshake.decode_init(vector.frame).inputs == addresses["inputs"]


@pytest.mark.parametrize("vector", REGISTRATIONS, ids=str)
def test_registrations_of_every_version_are_read(vector: Vector) -> None:
    registration = handshake.decode_registration(vector.frame)
    assert registration.family == "vllm"
    assert registration.version == registration.vllm_version == vector.decoded["vllm_version"]
    assert registration.max_model_len == vector.decoded["max_model_len"]
    assert registration.data_parallel_size == vector.decoded.get("data_parallel_size", 1)
    assert layout(registration.vllm_version) is not None


def test_an_engine_that_registers_without_a_word_is_refused_with_the_reason() -> None:
    (silent,) = [v for v in of_kind("vllm", "ready_response") if not v.frame]
    with pytest.raises(HandshakeError, match=r"older than about 0\.20"):
        handshake.decode_registration(silent.frame)
