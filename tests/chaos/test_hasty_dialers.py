"""Processes that dial and are gone before the router has looked."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import zmq

import smg
from smg.protocol import handshake


def dial(context: zmq.Context[zmq.Socket[bytes]], group: smg.EngineGroup) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.identity = handshake.identity(0)
    dealer.linger = 0
    monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    dealer.connect(group.handshake_address)
    assert monitor.poll(5000)
    dealer.disable_monitor()
    dealer.send(handshake.encode_status(handshake.HELLO, parallel_config_hash=None))
    return dealer


def test_a_process_that_is_gone_before_its_hello_was_read_does_not_hold_its_rank(ipc_dir: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with smg.EngineGroup(
            f"ipc://{ipc_dir}/g", backend="tokenspeed", handshake_address="tcp://127.0.0.1:0"
        ) as group:
            busy, go_on = threading.Event(), threading.Event()
            group._loop.call(lambda: (busy.set(), go_on.wait(10)))
            assert busy.wait(5)
            first = dial(context, group)
            time.sleep(0.1)  # nothing tells when a message has arrived at a thread that does not look
            first.close()
            time.sleep(0.1)
            go_on.set()
            seen = threading.Event()
            group._loop.call(seen.set)  # the loop has come round since
            assert seen.wait(5)
            second = dial(context, group)
            assert second.poll(2000), f"no INIT: {group.ranks}"
    finally:
        context.destroy(0)
