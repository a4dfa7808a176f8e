"""Where a group listens, and what it refuses to listen beside."""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from smg.engine.address import MAX_PATH_BYTES, SocketDirectory, handshake_address
from smg.errors import AddressError
from smg.protocol.addresses import handshake_port, worker_path

# Python 3.12 warns of a fork beside any thread, such as the test timeout's; the children here use files only
forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def url_in(directory: Path, name: str = "engine") -> str:
    return f"ipc://{directory}/{name}"


def bind(path: str) -> None:
    """Leave a socket file at `path`, as a router that was killed does."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)


@pytest.mark.parametrize(("path", "port"), [("/run/smg/engine-31000", 21205), ("/run/smg/ts0.ipc", 28237), ("", 26037)])
def test_the_handshake_port_is_the_one_the_rust_gateway_and_its_launchers_derive(path: str, port: int) -> None:
    assert handshake_port(path) == port


@given(st.text())
def test_every_path_has_a_handshake_port_in_the_band(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        return
    assert 20_000 <= handshake_port(path) < 30_000


def test_a_worker_url_is_ipc_and_its_path_is_taken_as_written() -> None:
    assert worker_path("ipc:///run/smg/x") == "/run/smg/x"
    assert worker_path("ipc://relative/x") == "relative/x"


@pytest.mark.parametrize(
    "url",
    [
        "/run/smg/x",
        "tcp://127.0.0.1:1",
        "ipc://",
        "ipc:///run/",
        "ipc:///run/..",
        "ipc://a\0b",
        "ipc://\udc80",
    ],
)
def test_any_other_worker_url_is_refused(url: str) -> None:
    with pytest.raises(AddressError, match="worker URL"):
        worker_path(url)


def test_the_handshake_listens_on_loopback_unless_told_otherwise() -> None:
    assert handshake_address("/run/smg/ts0.ipc") == "tcp://127.0.0.1:28237"


@pytest.mark.parametrize("override", ["tcp://127.0.0.1:30500", "tcp://localhost:0", "tcp://[::1]:30500"])
def test_a_loopback_override_is_taken_as_written(override: str, caplog: pytest.LogCaptureFixture) -> None:
    assert handshake_address("/x", override) == override
    assert not caplog.records


@pytest.mark.parametrize("override", ["tcp://0.0.0.0:30500", "tcp://*:30500", "tcp://127.evil.example:1"])
def test_an_override_off_host_is_taken_with_a_warning(override: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "smg"):
        assert handshake_address("/x", override) == override
    assert "not loopback" in caplog.text


@pytest.mark.parametrize(
    "override",
    [
        "127.0.0.1:1",
        "ipc:///x",
        "tcp://127.0.0.1",
        "tcp://:1",
        "tcp://h:65536",
        "tcp://h:x",
        "tcp://h:1/",
        "tcp://h:1\n",
    ],
)
def test_an_override_that_is_no_tcp_address_is_refused(override: str) -> None:
    with pytest.raises(AddressError, match="must be tcp://"):
        handshake_address("/x", override)


def test_each_incarnation_of_a_rank_has_its_own_two_addresses(ipc_dir: Path) -> None:
    sockets = SocketDirectory(url_in(ipc_dir), 2)
    assert sockets.input(1, 3) == f"ipc://{ipc_dir}/engine-in-1-3.sock"
    assert sockets.output(1, 3) == f"ipc://{ipc_dir}/engine-out-1-3.sock"


def test_the_path_limit_is_libzmqs_and_counts_the_longest_suffix() -> None:
    assert MAX_PATH_BYTES == zmq.IPC_PATH_MAX_LEN
    suffix = len("-out-63-9999999999.sock")
    fits = "/" + "é" * ((MAX_PATH_BYTES - suffix - 1) // 2)
    fits += "x" * (MAX_PATH_BYTES - suffix - len(fits.encode()))
    SocketDirectory(f"ipc://{fits}", 64)
    with pytest.raises(AddressError, match="108 bytes, 1 more than the 107"):
        SocketDirectory(f"ipc://{fits}x", 64)
    with pytest.raises(AddressError, match="1 more than"):
        SocketDirectory(f"ipc://{fits}", 101)


def test_a_missing_directory_is_made_private_all_the_way_down(ipc_dir: Path) -> None:
    with SocketDirectory(url_in(ipc_dir / "a" / "b"), 1):
        for made in (ipc_dir / "a", ipc_dir / "a" / "b"):
            assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o1777, 0o500])
def test_a_directory_others_can_reach_is_refused_with_the_command_that_helps(ipc_dir: Path, mode: int) -> None:
    ipc_dir.chmod(mode)
    with pytest.raises(AddressError, match=f"chmod 0700 {ipc_dir}"):
        SocketDirectory(url_in(ipc_dir), 1).acquire()
    assert stat.S_IMODE(ipc_dir.stat().st_mode) == mode
    ipc_dir.chmod(0o700)
    assert list(ipc_dir.iterdir()) == []


def test_a_symbolic_link_as_directory_is_refused(ipc_dir: Path) -> None:
    (ipc_dir / "real").mkdir(mode=0o700)
    (ipc_dir / "link").symlink_to("real")
    with pytest.raises(AddressError, match="is a symbolic link"):
        SocketDirectory(url_in(ipc_dir / "link"), 1).acquire()


def test_a_dangling_link_as_directory_is_refused(ipc_dir: Path) -> None:
    (ipc_dir / "link").symlink_to("nowhere")
    with pytest.raises(AddressError, match="is a symbolic link"):
        SocketDirectory(url_in(ipc_dir / "link"), 1).acquire()
    assert not (ipc_dir / "nowhere").exists()


def test_a_file_as_directory_is_refused(ipc_dir: Path) -> None:
    (ipc_dir / "file").touch()
    with pytest.raises(AddressError, match="is not a directory"):
        SocketDirectory(url_in(ipc_dir / "file"), 1).acquire()


def test_a_directory_of_another_user_is_refused(ipc_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: ipc_dir.stat().st_uid + 1)
    with pytest.raises(AddressError, match="belongs to uid"):
        SocketDirectory(url_in(ipc_dir), 1).acquire()


def test_a_directory_that_cannot_be_made_is_an_address_error(ipc_dir: Path) -> None:
    (ipc_dir / "file").touch()
    with pytest.raises(AddressError, match="worker URL"):
        SocketDirectory(url_in(ipc_dir / "file" / "below"), 1).acquire()


def test_a_second_group_on_the_same_url_is_told_who_holds_it(ipc_dir: Path) -> None:
    with SocketDirectory(url_in(ipc_dir), 1):
        with pytest.raises(AddressError, match=rf"in process {os.getpid()};"):
            SocketDirectory(f"ipc://{ipc_dir}/./engine", 4).acquire()
        SocketDirectory(url_in(ipc_dir, "other"), 1).acquire()
    SocketDirectory(url_in(ipc_dir), 1).acquire()


@forks
def test_a_lock_whose_holder_was_killed_is_free(ipc_dir: Path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            SocketDirectory(url_in(ipc_dir), 1).acquire()
            os.write(write, b"x")
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(read, 1) == b"x"
    with pytest.raises(AddressError, match=rf"in process {child};"):
        SocketDirectory(url_in(ipc_dir), 1).acquire()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    with SocketDirectory(url_in(ipc_dir), 1):
        assert (ipc_dir / "engine.lock").read_text().strip() == str(os.getpid())


def test_a_lock_file_that_is_a_link_is_refused(ipc_dir: Path) -> None:
    (ipc_dir / "engine.lock").symlink_to("elsewhere")
    with pytest.raises(AddressError, match="symbolic links"):
        SocketDirectory(url_in(ipc_dir), 1).acquire()
    assert not (ipc_dir / "elsewhere").exists()


def test_a_lock_file_removed_between_open_and_lock_is_not_trusted(
    ipc_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def open_and_lose(path: str, *rest: int) -> int:
        descriptor = real_open(path, *rest)
        if not opened:
            os.unlink(path)
        opened.append(descriptor)
        return descriptor

    real_open = os.open
    monkeypatch.setattr(os, "open", open_and_lose)
    with SocketDirectory(url_in(ipc_dir), 1):
        assert len(opened) == 2
        with pytest.raises(AddressError, match="is served by"):
            SocketDirectory(url_in(ipc_dir), 1).acquire()


def test_stale_sockets_of_this_url_are_removed_and_nothing_else(ipc_dir: Path) -> None:
    stale = ["engine-in-0-1.sock", "engine-out-0-1.sock", "engine-in-12-9999999999.sock"]
    others = [
        "engine-in.sock",
        "engine-in-0.sock",
        "engine2-in-0-1.sock",
        "my-engine-in-0-1.sock",
        "engine-in-x-1.sock",
    ]
    for name in stale + others:
        bind(str(ipc_dir / name))
    with SocketDirectory(url_in(ipc_dir), 1):
        assert {path.name for path in ipc_dir.iterdir()} == {*others, "engine.lock"}


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_a_path_that_should_be_a_socket_and_is_not_stays_and_stops_the_group(ipc_dir: Path, kind: str) -> None:
    path = ipc_dir / "engine-out-0-7.sock"
    bind(str(ipc_dir / "a-socket"))
    make = {"file": path.touch, "link": lambda: path.symlink_to("a-socket"), "directory": path.mkdir}
    make[kind]()
    with pytest.raises(AddressError, match=r"engine-out-0-7\.sock is where a socket goes"):
        SocketDirectory(url_in(ipc_dir), 1).acquire()
    assert {entry.name for entry in ipc_dir.iterdir()} == {"a-socket", "engine-out-0-7.sock"}


def test_a_live_groups_sockets_survive_a_second_group_that_is_refused(ipc_dir: Path) -> None:
    with SocketDirectory(url_in(ipc_dir), 1):
        bind(str(ipc_dir / "engine-in-0-1.sock"))
        with pytest.raises(AddressError):
            SocketDirectory(url_in(ipc_dir), 1).acquire()
        assert (ipc_dir / "engine-in-0-1.sock").exists()


def test_a_dead_incarnation_is_discarded_alone(ipc_dir: Path) -> None:
    with SocketDirectory(url_in(ipc_dir), 2) as sockets:
        for name in ("engine-in-0-1.sock", "engine-out-0-1.sock", "engine-in-0-2.sock", "engine-in-1-1.sock"):
            bind(str(ipc_dir / name))
        sockets.discard(0, 1)
        sockets.discard(0, 1)
        left = {entry.name for entry in ipc_dir.iterdir()}
        assert left == {"engine-in-0-2.sock", "engine-in-1-1.sock", "engine.lock"}


def test_release_removes_what_the_group_made_and_may_be_repeated(ipc_dir: Path) -> None:
    sockets = SocketDirectory(url_in(ipc_dir), 1)
    sockets.release()
    sockets.acquire()
    sockets.acquire()
    bind(str(ipc_dir / "engine-in-0-1.sock"))
    (ipc_dir / "engine-out-0-1.sock").touch()
    sockets.release()
    sockets.release()
    assert {entry.name for entry in ipc_dir.iterdir()} == {"engine-out-0-1.sock"}


@forks
def test_a_forked_child_removes_nothing_and_keeps_no_lock(ipc_dir: Path) -> None:
    sockets = SocketDirectory(url_in(ipc_dir), 1)
    sockets.acquire()
    bind(str(ipc_dir / "engine-in-0-1.sock"))
    ask = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.read(ask[0], 1)  # by now the parent has released and another group holds the URL
            sockets.discard(0, 1)
            sockets.release()
            code = 0
        finally:
            os._exit(code)
    sockets.release()
    with SocketDirectory(url_in(ipc_dir), 1):
        bind(str(ipc_dir / "engine-in-0-1.sock"))
        os.write(ask[1], b"x")
        assert os.waitpid(child, 0)[1] == 0
        assert {entry.name for entry in ipc_dir.iterdir()} == {"engine-in-0-1.sock", "engine.lock"}
    for descriptor in ask:
        os.close(descriptor)


@forks
def test_a_forked_child_that_closes_leaves_the_parents_lock_in_force(ipc_dir: Path) -> None:
    with SocketDirectory(url_in(ipc_dir), 1) as sockets:
        child = os.fork()
        if child == 0:
            sockets.release()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(AddressError, match="is served by"):
            SocketDirectory(url_in(ipc_dir), 1).acquire()


def test_zmq_binds_at_these_addresses(ipc_dir: Path) -> None:
    with (
        SocketDirectory(url_in(ipc_dir), 1) as sockets,
        zmq.Context() as context,
        context.socket(zmq.PULL) as pull,
    ):
        pull.bind(sockets.output(0, 1))
        assert (ipc_dir / "engine-out-0-1.sock").is_socket()
