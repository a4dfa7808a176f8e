"""What a running service shows of itself to others: where it listens, and what it writes down."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import BODY, CHAT, Served

LISTENING = "0A"
KEY = "sk-5e1f0c9b7a3d"


def listening() -> set[tuple[str, int]]:
    """(address in hex, port) of every TCP socket of this process that listens."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except FileNotFoundError:
            pass  # of the listing itself
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in own:
                address, port = fields[1].split(":")
                found.add((address, int(port, 16)))
    return found


def test_nothing_listens_off_this_host_by_default(serve: Callable[..., Served]) -> None:
    before = listening()
    served = serve(ranks=2)
    found = listening() - before
    assert {address for address, _ in found} == {"0100007F"}  # 127.0.0.1
    handshake = int(served.group.handshake_address.rpartition(":")[2])
    assert {port for _, port in found} == {served.port, served.service.metrics_port, handshake}


@pytest.mark.parametrize("option", ["host", "prometheus_host"])
def test_a_listener_goes_off_this_host_where_its_own_option_says_so(serve: Callable[..., Served], option: str) -> None:
    before = listening()
    served = serve(mock=None, **{option: "0.0.0.0"})
    port = served.port if option == "host" else served.service.metrics_port
    assert {found for found in listening() - before if found[0] != "0100007F"} == {("00000000", port)}


def test_keys_are_never_logged(serve: Callable[..., Served], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    served = serve(api_keys=[KEY])
    good = {"Authorization": f"Bearer {KEY}"}
    assert served.ask(CHAT, BODY, good).status == 200
    assert served.ask(CHAT, BODY, {"Authorization": f"Bearer {KEY}x"}).status == 401
    assert served.ask(CHAT, BODY, {"Authorization": KEY}).status == 401
    assert served.ask(CHAT, b"{", good).status == 400
    assert served.ask("/nowhere", BODY, good).status == 404

    def fails(*arguments: object) -> None:
        raise RuntimeError("as a bug would")

    served.front.prepare = fails
    assert served.ask(CHAT, BODY, good).status == 500
    assert "as a bug would" in caplog.text  # with its traceback
    with served.dial() as raw:
        raw.post(CHAT, BODY, f"Authorization: Bearer {KEY}", "Bad Header\x00: x")
        raw.rest()
    assert KEY not in caplog.text
    assert KEY not in served.metrics()
