"""The addresses that router and engines agree on without speaking: everything follows from the worker URL.

A worker URL is `ipc://<path>`. The path itself is never bound. Engines are told the handshake port at their
own start; a launcher computes the same port from the same path, as the Rust gateway's does.
"""

from __future__ import annotations

import os

from smg.errors import AddressError

SCHEME = "ipc://"
PORT_BASE = 20_000  # below Linux's ephemeral range
PORT_COUNT = 10_000

_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = 0x00000100000001B3


def worker_path(url: str) -> str:
    """The path of a worker URL `ipc://<path>`, unchanged. Raises AddressError for anything else."""
    if not url.startswith(SCHEME):
        raise AddressError(f"worker URL {url!r}: must be ipc://<path>, e.g. ipc:///run/user/1000/smg/engine-31000")
    path = url[len(SCHEME) :]
    if os.path.basename(path) in ("", ".", "..") or "\0" in path:
        raise AddressError(f"worker URL {url!r}: must end in a file name, e.g. ipc:///run/user/1000/smg/engine-31000")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise AddressError(f"worker URL {url!r}: must be text, since engines get it as UTF-8") from None
    return path


def handshake_port(path: str) -> int:
    """The handshake's TCP port for a worker path: FNV-1a (64 bits) of its bytes, folded into 20000..29999."""
    digest = _FNV_OFFSET
    for byte in path.encode():
        digest = ((digest ^ byte) * _FNV_PRIME) & 0xFFFFFFFFFFFFFFFF
    return PORT_BASE + digest % PORT_COUNT


def handshake_address(path: str) -> str:
    """Where a group on this worker path listens for HELLOs, and its engines dial, unless told otherwise."""
    return f"tcp://127.0.0.1:{handshake_port(path)}"
