"""Ports of workers: the store beside each worker port, and that no two claims name one port."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg.protocol import addresses
from smg.serve import ports
from smg.serve.errors import ServeError

BAND = range(20000, 30000)


def test_for_every_worker_port_the_store_is_a_valid_port_out_of_the_band_and_not_its_own():
    for port in range(1024, 65536):
        store = ports.store_port(port)
        assert 1024 <= store <= 65535, port
        assert store not in BAND, port  # so it is no worker's handshake port either
        assert store != port


@pytest.mark.parametrize(
    ("port", "store"),
    [(31000, 31233), (65302, 65535), (65303, 65070), (65500, 65267), (65535, 65302), (20767, 31000), (1024, 1257)],
)
def test_the_store_is_where_the_rust_gateways_launcher_puts_it(port, store):
    assert ports.store_port(port) == store


def test_worker_ports_whose_store_would_be_in_the_band_all_hop_and_no_others():
    hopped = [port for port in range(1024, 65536) if ports.store_port(port) - port not in (233, -233)]
    assert hopped == list(range(19767, 29767))
    assert all(ports.store_port(port) == port + 233 + 10000 for port in hopped)


def test_the_band_is_that_of_handshake_ports():
    assert [port for port in range(65536) if ports.in_handshake_band(port)] == list(BAND)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_every_handshake_port_is_in_the_band(path):
    assert ports.in_handshake_band(addresses.handshake_port(path))


def test_the_socket_directory_is_the_users_own_unless_it_is_named(monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/scratch")
    monkeypatch.setattr("os.getuid", lambda: 1234)
    assert ports.socket_directory({}) == "/scratch/smg-zmq-1234"
    assert ports.socket_directory({"SMG_ZMQ_SOCKET_DIR": "/run/smg"}) == "/run/smg"
    assert ports.worker_url(31000, "/run/smg") == "ipc:///run/smg/engine-31000"
    # the value that engines and both routers agree on
    assert addresses.handshake_port(addresses.worker_path(ports.worker_url(31000, "/run/smg"))) == 21205


# ------------------------------------------------------------ clashes


def test_ports_that_differ_are_no_clash():
    ports.refuse_clashes([(31000, "a"), (31233, "b"), (21205, "c")])


def test_two_claims_on_one_port_are_refused_and_both_are_named():
    with pytest.raises(ServeError, match=r"port 31233 is the store of worker 0 and worker 1's own.*--worker-base-port"):
        ports.refuse_clashes([(31000, "x"), (31233, "the store of worker 0"), (31233, "worker 1's own")])


@pytest.mark.parametrize(("one", "other"), [(31000, 31233), (20767, 31000)])
def test_a_store_on_another_workers_own_port_is_a_clash(one, other):
    claims = [(port, f"{what} {worker}") for worker in (one, other) for what, port in listening(worker).items()]
    with pytest.raises(ServeError, match=f"store {one} and own {other}|own {other} and store {one}"):
        ports.refuse_clashes(claims)


def listening(port):
    return {"own": port, "store": ports.store_port(port)}


# ------------------------------------------------------------ choosing


def test_ports_are_chosen_upwards_with_room_between_them():
    assert ports.choose_ports(31000, 3, 1, lambda port: [], lambda port: True) == [31000, 31001, 31002]
    assert ports.choose_ports(31000, 3, 10, lambda port: [], lambda port: True) == [31000, 31010, 31020]


def test_a_port_that_is_taken_is_left_out_and_so_is_one_whose_store_is():
    taken = {31000, 31001 + 233}
    chosen = ports.choose_ports(
        31000, 2, 1, lambda port: list(listening(port).values()), lambda port: port not in taken
    )
    assert chosen == [31002, 31003]


@pytest.mark.parametrize(("base", "count"), [(65535, 2), (65000, 600), (0, 1), (70000, 1), (-5, 1)])
def test_too_few_ports_above_the_base_are_refused(base, count):
    with pytest.raises(ServeError, match=f"--worker-base-port {base}"):
        ports.choose_ports(base, count, 1, lambda port: [], lambda port: True)


def test_a_port_that_something_listens_on_is_not_free():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not ports.is_free(port)
    assert ports.is_free(port)


# ------------------------------------------------------------ a handshake address that is given


@pytest.mark.parametrize(
    ("address", "dialed"),
    [
        ("tcp://127.0.0.1:30500", ("127.0.0.1", 30500)),
        ("tcp://0.0.0.0:30500", ("127.0.0.1", 30500)),
        ("tcp://[::]:30500", ("::1", 30500)),
        ("tcp://[::1]:30500", ("::1", 30500)),
        ("tcp://gpu7:65535", ("gpu7", 65535)),
    ],
)
def test_engines_dial_a_given_address_on_this_machine(address, dialed):
    assert ports.handshake_host_port(address) == dialed


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:0", "tcp://127.0.0.1", "ipc:///x", "tcp://h:65536", "tcp://:1", ""]
)
def test_a_handshake_address_without_a_port_that_engines_can_be_told_is_refused(address):
    with pytest.raises(ServeError, match="--zmq-handshake-address"):
        ports.handshake_host_port(address)
