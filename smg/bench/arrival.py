"""From a rank's send of a frame to counters that are up to date, while Python is busy with other things.

    python -m smg.bench.arrival {pump,thread} {spin,asyncio,idle} FRAMES

`pump` is an EngineGroup, `thread` the control: a Python thread that receives, decodes with msgspec and counts.
Beside it a Python thread spins (`spin`) or an asyncio loop never rests (`asyncio`). Prints a pair per frame: the delay,
and how much of it the threads that the frame went through waited for a CPU, as the scheduler counts it, both in ms.
The second is what a machine with fewer idle CPUs than these threads adds; waiting for the GIL is not in it.

Who looks must not need the receiver's GIL: the sender, a process of its own, inherits the descriptor that the
receiver signals when the counters are up to date, and takes both times. What is measured is therefore one hop
through libzmq at either end, decode, apply, and the wake of the process that looks.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import zmq

from smg.bench import frames
from smg.bench.ranks import pull_socket
from smg.engine.group import EngineGroup

ROWS = 32
PATIENCE = 60  # seconds that a frame may take; a Python thread beside a busy loop has needed more than 5
Delays = list[tuple[float, float]]


# -------------------------------------------------------------- the sender, which looks


class CpuWait:
    """Seconds that some threads have been runnable without running: this process's, and the receiver's but its first,
    which is the one that is kept busy."""

    def __init__(self, receiver: int) -> None:
        own, other = f"/proc/{os.getpid()}/task", f"/proc/{receiver}/task"
        paths = [f"{own}/{task}" for task in os.listdir(own)]
        paths += [f"{other}/{task}" for task in os.listdir(other) if int(task) != receiver]
        self._files = [os.open(f"{path}/schedstat", os.O_RDONLY) for path in paths]

    def total(self) -> float:
        return sum(int(os.pread(file, 100, 0).split()[1]) for file in self._files) / 1e9


def send_and_look(address: str, plain: bool, signal_fd: int, go_fd: int, went_fd: int, count: int) -> Delays:
    """Send `count` frames at random intervals; each delay, and the wait for a CPU in it, in ms."""
    from smg.bench.simulator import IDS, dial

    chance = random.Random(1)
    context: zmq.Context[Any] = zmq.Context()
    rids = IDS[:ROWS]
    if plain:
        output = context.socket(zmq.PUSH)
        output.connect(address)
    else:
        ((inputs, output),) = dial(context, address, 1)
        rids = [msgpack.unpackb(inputs.recv_multipart()[1])[1] for _ in range(ROWS)]
    frame = frames.encode(rids, range(1000, 1000 + ROWS))
    poller = select.poll()
    poller.register(signal_fd, select.POLLIN)
    os.read(went_fd, 1)  # the receiver is busy now
    waits = CpuWait(os.getppid())
    delays = []
    for _ in range(count):
        time.sleep(chance.uniform(0.002, 0.012))
        waited, begin = waits.total(), time.monotonic()
        output.send(frame)
        if not poller.poll(PATIENCE * 1000):
            raise SystemExit(f"a frame was not counted within {PATIENCE} s")
        end = time.monotonic()
        delays.append(((end - begin) * 1e3, (waits.total() - waited) * 1e3))
        os.write(go_fd, b".")  # let the receiver clear the signal, before the next frame
        os.read(went_fd, 1)
    context.destroy(0)
    return delays


class Sender:
    """`send_and_look` in a process that may use `signal_fd`. `clear` is called between its frames."""

    def __init__(self, address: str, plain: bool, signal_fd: int, count: int) -> None:
        self._go, go = os.pipe()
        went, self._went = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "smg.bench.arrival", "send",
             json.dumps([address, plain, signal_fd, go, went, count])],
            pass_fds=(signal_fd, go, went),
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[2],
        )  # fmt: skip
        os.close(go)
        os.close(went)

    def serve(self, clear: Callable[[], object]) -> None:
        """Clear the signal whenever the sender asks, until it is done."""
        os.write(self._went, b".")
        while os.read(self._go, 1):
            clear()
            os.write(self._went, b".")

    def delays(self) -> Delays:
        output, _ = self._process.communicate()
        delays: Delays = json.loads(output)
        return delays


# -------------------------------------------------------------- the receivers


def busy(load: str, work: Callable[[], None]) -> None:
    """Do `work` in a thread while this one, or another, keeps the interpreter busy as `load` says."""
    done = False

    def finish() -> None:
        nonlocal done
        work()
        done = True

    worker = threading.Thread(target=finish)
    worker.start()
    if load == "spin":
        while not done:
            pass
    elif load == "asyncio":
        loop = asyncio.new_event_loop()

        def turn() -> None:
            sum(range(2000))  # tens of microseconds, as a callback of a server takes
            if done:
                loop.stop()
            else:
                loop.call_soon(turn)

        loop.call_soon(turn)
        loop.run_forever()
        loop.close()
    worker.join()


def with_pump(load: str, count: int) -> Delays:
    with (
        tempfile.TemporaryDirectory(prefix="smg-bench-") as directory,
        EngineGroup(f"ipc://{directory}/e", backend="tokenspeed", handshake_address="tcp://127.0.0.1:0") as group,
    ):
        outlet = group.outlet()
        sender = Sender(group.handshake_address, False, outlet.fileno(), count)
        group.wait_ready(30)
        streams = [group.submit([1, 2, 3], outlet=outlet) for _ in range(ROWS)]
        busy(load, lambda: sender.serve(outlet.take))
        delays = sender.delays()
        assert group.counters["tokens"] == [count * len(streams)]
        group.close()
        return delays


def with_thread(load: str, count: int) -> Delays:
    with pull_socket() as (pull, address):
        counted, counters = os.eventfd(0, os.EFD_NONBLOCK), Counter[str]()
        decode = frames.decoder().decode
        received, measured = 0, threading.Event()

        def receive() -> None:
            nonlocal received
            while received < count:
                batch = decode(pull.recv())
                for rid, token_ids in zip(batch.rids, batch.output_ids, strict=True):
                    counters[rid] += len(token_ids)
                received += 1
                os.eventfd_write(counted, 1)
            measured.wait()  # the sender still reads what the scheduler says of this thread

        receiver = threading.Thread(target=receive)
        receiver.start()
        sender = Sender(address, True, counted, count)
        busy(load, lambda: sender.serve(lambda: os.eventfd_read(counted)))
        delays = sender.delays()
        measured.set()
        receiver.join()
        assert counters.total() == count * ROWS
        return delays


def main(argv: Sequence[str]) -> None:
    if argv[0] == "send":
        print(json.dumps(send_and_look(*json.loads(argv[1]))))
    elif argv[0] in ("pump", "thread") and argv[1] in ("spin", "asyncio", "idle"):
        receiver = with_pump if argv[0] == "pump" else with_thread
        print(json.dumps(receiver(argv[1], int(argv[2]))))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
