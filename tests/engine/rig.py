"""A `Core` without its thread: real zmq sockets on both sides, pumped by the test itself."""

from __future__ import annotations

import itertools

import msgpack
import zmq

from smg import _fastpath, _streams
from smg.engine.lifecycle import State
from smg.protocol import handshake, tokenspeed, vllm

LIVE = list(State).index(State.LIVE)
DEAD = list(State).index(State.DEAD)
_names = itertools.count()


class Rank:
    """One incarnation's sockets on both sides, and what the engine's side has received."""

    def __init__(self, context, core, index, incarnation, directory=None):
        name = f"rank-{next(_names)}"
        name = f"inproc://{name}" if directory is None else f"ipc://{directory}/{name}"
        self.router = context.socket(zmq.ROUTER)
        self.router.router_mandatory = 1
        self.pull = context.socket(zmq.PULL)
        self.pull.rcvhwm = 0
        self.monitor = self.pull.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.router.bind(name + "-in")
        self.pull.bind(name + "-out")
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.identity = handshake.identity(index)
        self.dealer.connect(name + "-in")
        self.push = context.socket(zmq.PUSH)
        self.push.connect(name + "-out")
        self.dealer.send(b"registration")
        self.adds: list[str] = []
        self.aborts: list[str] = []
        self.waves: list[int] = []
        self.calls: list[list] = []
        core.attach(index, incarnation, self.router, self.pull, self.monitor)

    def read(self):
        """Take what the router has sent."""
        while self.dealer.poll(0):
            kind, payload = self.dealer.recv_multipart()
            message = msgpack.unpackb(payload)
            if kind == vllm.ADD:
                self.adds.append(message[1] if message[0] == tokenspeed.REQUEST_TAG else message[0])
            elif kind == vllm.ABORT:
                self.aborts += message
            elif kind == vllm.START_DP_WAVE:
                self.waves.append(message[0])
                assert message[1:] == [None]
            else:
                self.calls.append(message)

    def close(self):
        self.pull.disable_monitor()
        for socket in (self.monitor, self.router, self.pull, self.dealer, self.push):
            socket.close(0)


class Rig:
    """A core with its ranks. `pump` moves everything that waits and returns the events it left.

    Inproc sockets deliver at once and have no connections; with a `directory` they are ipc sockets in it.
    """

    def __init__(
        self, ranks=2, max_inflight=0, stall_timeout=0.0, use_epoll=True, directory=None, backend="tokenspeed"
    ):
        self.protocol = {"tokenspeed": tokenspeed, "vllm": vllm}[backend]
        self.context = zmq.Context()
        self.directory = directory
        self.core = _fastpath.Core(
            ranks,
            backend=backend,
            probes=backend == "vllm",
            decode_cold=self.protocol.decode_logprobs,
            stall_timeout=stall_timeout,
            max_inflight=max_inflight,
            use_epoll=use_epoll,
        )
        self.incarnations = [0] * ranks
        self.ranks: list[Rank | None] = [None] * ranks
        self.payload = self.protocol.encode_add("0" * 24, [1, 2, 3])
        self.begun = [event for index in range(ranks) for event in self.attach(index)]

    def attach(self, index):
        self.incarnations[index] += 1
        self.ranks[index] = Rank(self.context, self.core, index, self.incarnations[index], self.directory)
        self.core.set_state(index, LIVE)
        return self.pump()

    def bury(self, index):
        """What the loop thread does once the pump has failed a rank."""
        self.core.detach(index)
        self.ranks[index].close()
        self.ranks[index] = None
        self.core.set_state(index, DEAD)

    def pump(self):
        events = []
        before = None
        while True:
            self.core.run(0)  # one look at what is there
            found = self.core.events()
            counters = self.core.counters()
            if not found and counters == before:
                break
            events += found
            before = counters
        for rank in self.ranks:
            if rank is not None:
                rank.read()
        return events

    def submit(self, **options):
        return _streams.submit(self.core, self.payload, self.protocol.RID_OFFSET, **options)

    def emit(self, index, rows, load=None):
        """Send one frame of (rid, tokens, finish reason, completion tokens) rows from a rank."""
        columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[], [], [], []]
        rids, tokens, reasons, completions = columns
        tail = (index,) if load is None else (index, *load)
        ones = [1] * len(rids)
        self.ranks[index].push.send(
            tokenspeed.encode_outputs(rids, tokens, reasons, ones, completions, ones, tail=tail)
        )

    def send(self, index, *frames):
        self.ranks[index].push.send_multipart(frames)

    def close(self):
        for index, rank in enumerate(self.ranks):
            if rank is not None:
                self.bury(index)
        self.core.stop()
        self.core.close()
        self.context.destroy(0)
