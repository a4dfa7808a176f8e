"""Where workers are: their sockets' directory, URLs and TCP ports, chosen so that no two claim the same one.

A worker port makes a worker's URL and, for the engines that listen, their ports of their own; the handshake port
follows from the URL. All of it is known, and checked, before anything is started.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence

from smg.protocol import addresses
from smg.serve.errors import ServeError

STORE_OFFSET = 233  # where TokenSpeed itself puts its store, counted from its port
HIGHEST_PORT = 65535
LOOPBACK = "127.0.0.1"


def socket_directory(environment: Mapping[str, str] = os.environ) -> str:
    """`SMG_ZMQ_SOCKET_DIR`, or a directory of this user below the system's temporary one."""
    named = environment.get("SMG_ZMQ_SOCKET_DIR")
    return os.path.abspath(named) if named else os.path.join(tempfile.gettempdir(), f"smg-zmq-{os.getuid()}")


def worker_url(port: int, directory: str) -> str:
    return f"{addresses.SCHEME}{directory}/engine-{port}"


def in_handshake_band(port: int) -> bool:
    """Whether some worker's handshake may be there."""
    return addresses.PORT_BASE <= port < addresses.PORT_BASE + addresses.PORT_COUNT


def store_port(port: int) -> int:
    """Where a TokenSpeed worker on `port` keeps its torch.distributed store.

    The engine's own offset; mirrored below the highest port where there is none above, and past the band of
    handshake ports where it would be in it: any port of the band is some worker's handshake.
    """
    store = port + STORE_OFFSET if port + STORE_OFFSET <= HIGHEST_PORT else port - STORE_OFFSET
    return store + addresses.PORT_COUNT if in_handshake_band(store) else store


def handshake_host_port(address: str) -> tuple[str, int]:
    """Host and port that engines on this machine dial for a handshake address. Raises ServeError."""
    match = re.fullmatch(r"tcp://(\[[^\]\s]+\]|[^\s:/]+):(\d{1,5})", address)
    if match is None or not 1 <= int(match[2]) <= HIGHEST_PORT:
        raise ServeError(
            f"--zmq-handshake-address {address}: must be tcp://HOST:PORT with a port of 1..65535, since engines are "
            "told it before the router listens"
        )
    host = match[1].strip("[]")
    return (LOOPBACK if host in ("0.0.0.0", "*") else "::1" if host == "::" else host), int(match[2])


def refuse_clashes(claims: Iterable[tuple[int, str]]) -> None:
    """Raises ServeError when two of the (port, who needs it for what) pairs name one port; it names both."""
    holders: dict[int, str] = {}
    for port, holder in claims:
        if port in holders:
            raise ServeError(
                f"port {port} is {holders[port]} and {holder}; choose another --worker-base-port, or another "
                "SMG_ZMQ_SOCKET_DIR, from which handshake ports follow"
            )
        holders[port] = holder


def choose_ports(
    base: int, count: int, apart: int, needed: Callable[[int], Sequence[int]], is_free: Callable[[int], bool]
) -> list[int]:
    """`count` worker ports from `base` upwards and at least `apart` from each other.

    Those whose `needed` ports are not all free are left out. Raises ServeError when there are too few.
    """
    chosen: list[int] = []
    port = base
    while 0 < port <= HIGHEST_PORT and len(chosen) < count:
        usable = all(map(is_free, needed(port)))
        if usable:
            chosen.append(port)
        port += apart if usable else 1
    if len(chosen) < count:
        raise ServeError(
            f"--worker-base-port {base}: of the ports from there up to {HIGHEST_PORT}, {len(chosen)} can be used "
            f"and {count} workers need one each; choose a lower one"
        )
    return chosen


def is_free(port: int) -> bool:
    """Whether an engine could listen there on loopback, of either family."""
    for family, host in ((socket.AF_INET, LOOPBACK), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((host, port))
        except OSError as error:
            if family == socket.AF_INET or error.errno == errno.EADDRINUSE:
                return False  # any other trouble of IPv6 is that this machine has none
    return True
