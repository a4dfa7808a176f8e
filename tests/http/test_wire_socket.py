"""What a response's wire gives to the socket itself, and what to the connection's transport."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest

from smg._sse import Wire

PART = b"data: 0123456789\n\n"
LARGE = b": " + b"x" * (1 << 20) + b"\n\n"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Transport:
    """A transport that keeps what it is told to write, until `flush`."""

    def __init__(self, tls: bool = False) -> None:
        self.near, self.far = socket.socketpair()
        self.far.setblocking(False)
        self.tls = tls
        self.held = b""
        self.given = 0  # bytes that ever came here

    def write(self, data: bytes) -> None:
        self.held += data
        self.given += len(data)

    def get_write_buffer_size(self) -> int:
        return len(self.held)

    def get_extra_info(self, name: str) -> object:
        return {"socket": self.near, "sslcontext": object() if self.tls else None}[name]

    def flush(self) -> None:
        while self.held:
            self.held = self.held[self.near.send(self.held, socket.MSG_DONTWAIT) :]

    def read(self) -> bytes:
        """What has arrived at the client."""
        made = b""
        try:
            while data := self.far.recv(1 << 20):
                made += data
        except BlockingIOError:
            pass
        return made

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def transport() -> Iterator[Transport]:
    with closing(Transport()) as made:
        yield made


def wire_of(transport: Transport) -> Wire:
    return Wire(SimpleNamespace(transport=transport), chunked=False)


def test_parts_go_to_the_socket_and_not_to_the_transport(transport: Transport) -> None:
    wire = wire_of(transport)
    for _ in range(3):
        wire.send(PART)
        assert transport.read() == PART
    wire.close()
    assert transport.given == 0


def test_what_a_transport_holds_stays_before_what_comes_later(transport: Transport) -> None:
    transport.write(b"of the response before; ")
    wire = wire_of(transport)
    wire.send(PART)
    assert transport.read() == b""
    transport.flush()
    wire.send(PART)
    assert transport.read() == b"of the response before; " + PART + PART
    assert not transport.held


def test_what_a_full_socket_does_not_take_goes_to_the_transport_once_and_in_order(transport: Transport) -> None:
    wire = wire_of(transport)
    wire.send(LARGE)
    assert 0 < len(transport.held) < len(LARGE)
    wire.send(PART)
    assert transport.held.endswith(PART)
    arrived = b""
    while transport.held:
        arrived += transport.read()
        try:
            transport.flush()
        except BlockingIOError:
            continue
    given = transport.given
    wire.send(b"".join([PART] * 2))
    wire.close()
    assert arrived + transport.read() == LARGE + PART * 3
    assert transport.given == given


def test_encrypted_connections_are_written_by_their_transport() -> None:
    with closing(Transport(tls=True)) as transport:
        wire = wire_of(transport)
        wire.send(PART)
        assert (transport.held, transport.read()) == (PART, b"")


def test_a_closed_and_reused_descriptor_gets_nothing(transport: Transport) -> None:
    wire = wire_of(transport)
    number = transport.near.fileno()
    transport.near.close()
    with closing(Transport()) as other:
        other.near = socket.socket(fileno=os.dup2(other.near.detach(), number))
        wire.send(PART)
        assert other.read() == b""
        assert transport.read() == PART
    wire.leave()
    assert transport.far.recv(1) == b"", "the connection stays open"


@pytest.mark.parametrize("end", [Wire.close, Wire.leave])
def test_the_end_of_a_response_or_of_its_connection_frees_the_descriptor(transport: Transport, end) -> None:
    before = descriptors()
    wire = wire_of(transport)
    wire.send(PART)
    assert descriptors() == before + 1
    end(wire)
    assert descriptors() == before
    end(wire)
    del wire
    assert descriptors() == before


def test_a_client_that_is_gone_is_left_to_the_transport(transport: Transport) -> None:
    wire = wire_of(transport)
    transport.far.close()
    wire.send(PART)
    assert transport.held == PART


def test_without_descriptors_to_spare_the_transport_writes(transport: Transport, monkeypatch) -> None:
    def refuse(descriptor: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "dup", refuse)
    wire = wire_of(transport)
    wire.send(PART)
    assert transport.held == PART
