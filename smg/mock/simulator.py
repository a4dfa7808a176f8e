"""The simulator: ranks around one loop that sleeps until a socket, a control message or a step is due."""

from __future__ import annotations

import gc
import inspect
import json
import math
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import zmq

from smg.mock.control import TRIGGERS, Controls, Event, EventLog, SimulatorEnded
from smg.mock.lockstep import Lockstep
from smg.mock.rank import Rank, Watch
from smg.mock.replies import make_replies, model_vocab_size
from smg.mock.settings import Settings
from smg.protocol import addresses

Message = dict[str, Any]

SELECTABLE = 1024  # FD_SETSIZE

# Operations on a rank. A method of Rank says what each does, and its parameters are the message's keys.
RANK_OPERATIONS: dict[str, Callable[..., Any]] = {
    operation.__name__: operation
    for operation in (
        Rank.die,
        Rank.restart,
        Rank.stall,
        Rank.resume,
        Rank.hold,
        Rank.release,
        Rank.step,
        Rank.proceed,
        Rank.sentinel,
        Rank.malformed,
        Rank.emit,
        Rank.raw,
        Rank.deafen,
        Rank.drop_adds,
        Rank.engine_index,
        Rank.stats,
    )
}


class Simulator(Controls):
    """Simulated engine ranks that dial a router's worker URL, in a thread of this process.

        with smg.mock.Simulator("ipc:///run/user/1000/smg/engine-31000", ranks=2, step_ms=1) as mock:
            mock.wait_live()
            mock.die(1)

    For ranks that one can kill or stop as the operating system does, see `smg.mock.spawn`. Options are the
    fields of `smg.mock.Settings`; raises ValueError for those that make no sense.
    """

    def __init__(self, worker_url: str, **options: Any) -> None:
        self.settings = settings = Settings(worker_url=worker_url, **options)
        self.events = EventLog()
        self.address = settings.handshake_address or addresses.handshake_address(addresses.worker_path(worker_url))
        self._listeners: list[Callable[[Event], None]] = [self.events.append]
        self._calls: deque[tuple[Message, Future[Any]]] = deque()
        self._faults = self.settings.faults  # each runs once its rank is live
        self._line = b""  # of stdin, begun
        self._stopping = False
        self._ended = False
        self._status = 0
        self._thread: threading.Thread | None = None
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._watch: Watch = {self._wake_reader: self._on_wake}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        replies, vocab_size = make_replies(self.settings), model_vocab_size(self.settings)
        group = Lockstep(settings.step_ms / 1000) if settings.lockstep else None
        self._ranks = {
            index: Rank(
                index,
                self.settings,
                replies,
                vocab_size,
                context=self._context,
                address=self.address,
                watch=self._watch,
                report=self._report,
                group=group,
            )
            for index in self.indexes
        }

    # In a thread

    def start(self) -> Simulator:
        """Run in a daemon thread. Returns when every rank has dialed."""
        self._thread = threading.Thread(target=self._run, name="smg-mock", daemon=True)
        self._thread.start()
        self.wait_for("ready")
        return self

    def close(self) -> None:
        """End the ranks as the engine's close() does, and the thread. Idempotent."""
        self._stopping = True
        if self._thread is not None:
            self._wake()
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Simulator:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def call(self, op: str, rank: int | None = None, **args: Any) -> Any:
        result: Future[Any] = Future()
        self._calls.append(({"op": op, "rank": rank, **args}, result))
        if self._ended:
            raise SimulatorEnded("the simulator is closed")
        self._wake()
        return result.result()

    # As the program itself

    def run_process(self) -> int:
        """Run until SIGTERM or Ctrl-C, or with --control until stdin ends. Returns the exit status.

        Without --control it also ends, with status 1, when all its ranks are dead: nobody can restart them.
        """
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)  # a frame makes thousands of short-lived lists, and no cycles
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        if self.settings.control:
            self._listeners = [_write_line]
            self._watch[sys.stdin.fileno()] = self._on_stdin
        else:
            self._listeners = [_log, self._on_event]
        self._run()
        return self._status

    def _on_signal(self, number: int, frame: object) -> None:
        self._stopping = True

    def _on_event(self, event: Event) -> None:
        if event["event"] == "dead" and all(rank.state == "dead" for rank in self._ranks.values()):
            self._status = 0 if self._stopping else 1
            self._stopping = True

    # The loop

    def _run(self) -> None:
        try:
            for rank in self._ranks.values():
                rank.dial()
            self._report("ready", pid=os.getpid(), address=self.address)
            while not self._stopping:
                self._turn()
        finally:
            self._end()

    def _turn(self) -> None:
        """Sleep until something is due, and do it."""
        dues = [due for rank in self._ranks.values() if (due := rank.due()) is not None]
        timeout = max(0.0, min(dues) - time.monotonic()) if dues else None
        for descriptor in readable(self._watch, timeout):
            handler = self._watch.get(descriptor)
            if handler is not None:
                handler()
        now = time.monotonic()
        for rank in self._ranks.values():
            rank.advance(now)

    def _end(self) -> None:
        self._stopping = True
        for rank in self._ranks.values():
            rank.close(sentinel=not self.settings.no_sentinel)
        self._context.term()
        self._ended = True
        self.events.end("the simulator is closed")
        while self._calls:
            self._calls.popleft()[1].set_exception(SimulatorEnded("the simulator is closed"))

    def _report(self, event: str, **fields: Any) -> None:
        for listener in self._listeners:
            listener({"event": event, **fields})
        if event == "live" and fields["incarnation"] == 1:
            self._run_faults(fields["rank"])  # before the rank reads its first request

    # Operations

    def _execute(self, message: Message) -> Any:
        """Run a message's operation now or, when it carries a trigger, arm it. Raises ValueError."""
        args = dict(message)
        op, index = args.pop("op", None), args.pop("rank", None)
        if index is not None and index not in self._ranks:
            raise ValueError(f"rank {index}: must be in {self.indexes.start}..{self.indexes.stop - 1}")
        ranks = list(self._ranks.values()) if index is None else [self._ranks[index]]
        triggers = {name: args.pop(name) for name in TRIGGERS if name in args}
        run: Callable[..., Any]
        if op == "exit":
            run = self._exit
        elif op == "requests":
            run = _requests
        elif op in RANK_OPERATIONS:
            run = RANK_OPERATIONS[op]
        else:
            raise ValueError(f"operation {op!r}: must be one of {', '.join(operations())}")
        try:
            inspect.signature(run).bind(ranks[0], **args)
        except TypeError as error:
            raise ValueError(f"{op}: {error}") from None
        if triggers:
            for rank in ranks:
                rank.arm({"op": op, "rank": rank.index, **args, **triggers}, self._execute_armed)
            return None
        return [run(rank, **args) for rank in ranks]

    def _execute_armed(self, message: Message) -> None:
        try:
            self._execute(message)
        except ValueError as error:
            self._report("failed", rank=message["rank"], op=message["op"], reason=str(error))

    def _run_faults(self, index: int) -> None:
        for message in self._faults:
            if message.get("rank") in (None, index):
                self._execute_armed({**message, "rank": index})

    def _exit(self, rank: Rank, code: int = 1) -> None:
        """End the process without closing anything."""
        if self._thread is not None:
            raise ValueError("exit: this simulator is a thread of your own process")
        os._exit(code)

    # Wake-ups

    def _wake(self) -> None:
        try:
            os.write(self._wake_writer, b"\0")
        except BlockingIOError:
            pass  # there are wake-ups enough in the pipe

    def _on_wake(self) -> None:
        os.read(self._wake_reader, 4096)
        while self._calls:
            message, result = self._calls.popleft()
            try:
                result.set_result(self._execute(message))
            except ValueError as error:
                result.set_exception(error)

    def _on_stdin(self) -> None:
        data = os.read(sys.stdin.fileno(), 1 << 16)
        if not data:
            self._stopping = True
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            _write_line(self._answer(line))

    def _answer(self, line: bytes) -> Message:
        """Run the operation of a JSON line `{"id": n, "op": ..., ...}` and give the line that answers it."""
        try:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("a control line must be a JSON object")
        except ValueError as error:
            return {"id": None, "error": str(error)}
        call = message.pop("id", None)
        try:
            return {"id": call, "result": self._execute(message)}
        except ValueError as error:
            return {"id": call, "error": str(error)}


def readable(descriptors: Collection[int], timeout: float | None) -> list[int]:
    """Which of these can be read, as soon as one can; none of them after the timeout in seconds.

    select() keeps time to the microsecond, where poll() and epoll round to milliseconds, but it takes no
    descriptor above 1023, which a process with many connections has.
    """
    if max(descriptors) < SELECTABLE:
        return select.select(descriptors, (), (), timeout)[0]
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [ready for ready, _ in poll.poll(None if timeout is None else math.ceil(timeout * 1000))]


def operations() -> list[str]:
    """The names of all operations."""
    return [*RANK_OPERATIONS, "requests", "exit"]


def _requests(rank: Rank) -> list[Message]:
    return list(rank.requests)


def _write_line(message: Message) -> None:
    """Put a message on stdout as one line. When nobody reads there any more, stdin's end ends the process."""
    data = json.dumps(message, default=repr).encode() + b"\n"
    try:
        while data:
            data = data[os.write(1, data) :]
    except BrokenPipeError:
        pass


def _log(event: Event) -> None:
    """Say on stderr what happened, for people."""
    fields = dict(event)
    name = fields.pop("event")
    if name == "ready":
        print(f"mock: dialing {fields['address']}", file=sys.stderr, flush=True)
        return
    who = f"rank {fields.pop('rank')}, incarnation {fields.pop('incarnation', '?')}"
    more = "".join(f" {key}={value}" for key, value in fields.items() if value not in ("", None))
    print(f"mock: {who}: {name}{more}", file=sys.stderr, flush=True)
