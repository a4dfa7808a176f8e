"""The loop thread of a group: the pump, and around it what is rare.

The steady state is `Core.run`, which moves frames without the GIL. It comes back with events (a registration,
a death, a stall) or because the handshake socket has something; those are handled here, by the state table of
`lifecycle`. Only this thread touches the group's sockets.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import zmq

from smg import _fastpath
from smg._decoded import fault_error
from smg.engine.address import SocketDirectory
from smg.engine.connections import Connections
from smg.engine.lifecycle import (
    Action,
    Event,
    Heard,
    RankLife,
    State,
    Step,
    hear_handshake,
    hear_registration,
)
from smg.engine.utilities import Calls
from smg.errors import AddressError, Closed, ForkedError
from smg.protocol import handshake

_log = logging.getLogger("smg")
_STATES = list(State)  # Core numbers the states in this order
_DRAIN_POLL = 0.02  # seconds between looks at a draining rank
_IDLE = 3600.0  # seconds the pump may stay away when nothing is due
_READY_GRACE = 5.0  # seconds that a READY may come after its rank could take work
_RECALL_GRACE = 1.0  # seconds that who was hung up on has to dial again; libzmq's peers do after 0.1
_GONE_GRACE = 0.5  # seconds that a registration may come after the end of a connection whose READY nobody heard
_EVENT = _fastpath.EventKind
_ABORT, _NOBODY = 1, b"\x90"  # an ABORT of no request, which every engine takes and ignores


@dataclass(slots=True)
class Sockets:
    """One incarnation's sockets."""

    input: zmq.Socket[bytes]
    output: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]

    def close(self) -> None:
        self.output.disable_monitor()
        self.monitor.close(0)
        self.input.close(0)
        self.output.close(0)


class Loop:
    """Sockets, handshakes and the thread of one group. `EngineGroup` is its face."""

    def __init__(
        self,
        core: _fastpath.Core,
        directory: SocketDirectory,
        address: str,
        *,
        backend: str,
        ranks: int,
        handshake_timeout: float,
        parallel_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.core = core
        self.backend = backend
        self.lives = [RankLife(index, handshake_timeout) for index in range(ranks)]
        self.registrations: list[handshake.Registration | None] = [None] * ranks
        self.refused = 0  # handshake messages of no rank of this group
        self.live = 0  # ranks that take work
        self.context_length: int | None = None  # tokens; the least any rank registered
        self.version = ""  # the engine's, when all ranks say the same
        self.lockstep = False  # ranks step together, and die together
        self.calls = Calls(core)
        self._parallel_config = parallel_config
        self._config_hashes: dict[int, str] = {}  # rank -> of the parallel_config it runs with
        self._early: dict[int, tuple[Heard, int]] = {}  # rank -> registration that came before its output's connection
        self._directory = directory
        self._name = directory.path.rpartition("/")[2]  # in the log
        self._sockets: list[Sockets | None] = [None] * ranks
        self._dialed: dict[int, int] = {}  # rank -> connection of its last HELLO
        self._told: dict[int, int] = {}  # rank -> connection that its last INIT is for
        self._doubt: dict[int, set[int]] = {}  # rank -> other connections, one of which may have got that INIT
        self._unready: set[int] = set()  # ranks whose READY has not come, and would be heard
        self._ready_by: dict[int, tuple[int, float]] = {}  # rank -> incarnation that could take work, end of patience
        self._shared: dict[int, int] = {}  # rank -> incarnation whose INIT the next dialer may have got
        self._kept: dict[int, Sockets] = {}  # rank -> sockets of that incarnation, until the next takes them
        self._unanswered: dict[int, set[int]] = {}  # rank -> connections that have said HELLO and got no INIT
        self._recalled: dict[int, tuple[int, float]] = {}  # rank -> connections greeted when one was hung up on; until
        self._gone: dict[int, int] = {}  # rank -> incarnation that has hung up in its handshake
        self._restless = False  # whether to come back as soon as the pump has looked once
        self._asked: dict[int, int] = {}  # rank -> its incarnation that was sent something to see if it is there
        self._noted: set[tuple[int, str]] = set()
        self._commands: list[Callable[[], None]] = []
        self._waiters: list[tuple[int, concurrent.futures.Future[None]]] = []
        # Guards _commands and _waiters. Re-entrant: a collection within may run a dropped group's `stop`.
        self._lock = threading.RLock()
        self._closing = False
        self._exiting = False
        self._pid = os.getpid()
        directory.acquire()
        self._context = zmq.Context()
        try:
            self._handshake = self._context.socket(zmq.ROUTER)
            self._handshake.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._handshake.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an INIT for nobody is an error
            self._handshake.setsockopt(zmq.LINGER, 0)
            try:
                self._handshake.bind(address)
            except zmq.ZMQError as error:
                raise AddressError(
                    f"handshake address {address}: {error}; another router may listen there "
                    "(two worker URLs can derive the same port: name one with handshake_address)"
                ) from None
            self.address: str = self._handshake.getsockopt_string(zmq.LAST_ENDPOINT)
            self._connections = Connections(self._handshake)
            core.watch_rare(self._handshake.fileno())
            core.watch_rare(self._connections.fileno())
        except BaseException:
            self._context.destroy(0)
            directory.release()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._handshake, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"smg-loop {directory.path}", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------- for other threads

    @property
    def closing(self) -> bool:
        """Whether nothing is taken any more."""
        return self._closing

    def stop(self) -> None:
        """Make the thread end all streams with `Closed`, unlink the sockets and go. Does not wait for it.

        Idempotent; a no-op in a child of fork().
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            first, self._closing = not self._closing, True
        if first:
            self.core.stop()

    def close(self, *, exiting: bool = False) -> None:
        """`stop`, and wait for it. `exiting`: the interpreter ends, and who still waits is not woken."""
        if os.getpid() != self._pid:
            return
        self._exiting = exiting
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def when_live(self, count: int) -> concurrent.futures.Future[None]:
        """A future that is done once `count` ranks take work, or fails with `Closed`."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._check_process()
        with self._lock:
            self._waiters.append((count, future))
        self.call(self._tell_waiters)
        return future

    def call(self, command: Callable[[], None]) -> None:
        """Run `command` on the loop thread."""
        self._check_process()
        with self._lock:
            if self._closing:
                self._fail_waiters()
                return
            self._commands.append(command)
        self.core.wake()

    def call_utility(self, rank: int, method: str, args: tuple[Any, ...]) -> concurrent.futures.Future[Any]:
        """Start a utility call on a rank; see `Calls.start`."""
        self._check_process()
        if self._closing:
            raise Closed("the group is closed")
        return self.calls.start(rank, method, args)

    def drain(self, rank: int) -> None:
        """Let a rank finish what it has and give it nothing new."""
        self.call(lambda: self._handle(rank, Event.DRAIN))

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError("this group was made before os.fork(); make the group in the process that uses it")

    # ---------------------------------------------------------- the thread

    def _run(self) -> None:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._serve_handshake()
            while self.core.run(self._patience()):
                for event in self.core.events():
                    self._on_event(*event)
                self._serve_commands()
                self._watch_the_clock()
                self._serve_handshake()  # last: sending an INIT can swallow the signal of the next HELLO
        except Exception:
            _log.exception("the loop thread of %s failed; the group is closed", self._directory.url)
        finally:
            self._shut()

    def _patience(self) -> float:
        """Seconds until the next thing that only this thread notices."""
        if self._restless:
            return 0.0
        if any(life.state is State.DRAINING for life in self.lives):
            return _DRAIN_POLL
        due = [life.deadline for life in self.lives if life.deadline is not None]
        due += [until for _, until in (*self._ready_by.values(), *self._recalled.values())]
        return max(0.0, min(due) - time.monotonic()) if due else _IDLE

    def _watch_the_clock(self) -> None:
        now = time.monotonic()
        for life in self.lives:
            self._carry_out(life, life.expire(now))
            if life.state is State.DRAINING and not self.core.in_flight(life.index):
                self._handle(life.index, Event.EMPTY)
        for rank, (incarnation, until) in list(self._ready_by.items()):
            if now >= until:
                del self._ready_by[rank]
                if self.lives[rank].state is State.HELLO and self.lives[rank].incarnation == incarnation:
                    # Whoever connects with a rank's identity takes it over on the handshake socket, saying nothing.
                    self._note(rank, "unheard", "rank %d has registered, and no READY is heard; it takes work", rank)
                    self._handle(rank, Event.READY, incarnation=incarnation)

    def _serve_commands(self) -> None:
        with self._lock:
            commands, self._commands = self._commands, []
        for command in commands:
            command()

    def _serve_handshake(self) -> None:
        self._restless = False
        self._read_handshake()
        self._connections.read()
        gone = {life.index: life.incarnation for life in self.lives if self._hung_up(life)}
        for rank, incarnation in gone.items():
            if self._gone.get(rank) == incarnation:
                self._judge(self.lives[rank])
            else:
                # The pump looks first for what it may have connected, and this thread for what it may have said.
                self._restless = True
        self._gone = gone
        for life in self.lives:
            self._recall(life)

    def _read_handshake(self) -> None:
        while self._poller.poll(0):
            frames = self._handshake.recv_multipart(zmq.NOBLOCK, copy=False)
            connection = self._connections.hear(int(frames[0].get(zmq.SRCFD)))
            status: list[handshake.Status] = []

            def status_of(frame: bytes, status: list[handshake.Status] = status) -> str:
                status.append(handshake.decode_status(frame))
                return status[0].status

            heard = hear_handshake([frame.bytes for frame in frames], len(self.lives), status_of)
            if heard.rank is not None and heard.event is Event.HELLO:
                self._heed_hello(heard.rank, connection)
            elif heard.rank is not None and heard.event is Event.READY:
                self._unready.discard(heard.rank)
            self._on_heard(self._agreeing(heard, status[0].parallel_config_hash) if status else heard)

    def _heed_hello(self, rank: int, connection: int) -> None:
        """Note what a HELLO tells about who said one before."""
        for other, told in self._told.items():
            if told == connection != 0:  # which says HELLO once: the one before has had the same descriptor
                self._told[other] = 0
                if other == rank:
                    self._doubt[rank].add(connection)
        if self._told.get(rank) in self._connections.open:
            self._unready.discard(rank)  # it is not heard any more, and may have been READY when it hangs up
        self._dialed[rank] = connection
        self._unanswered.setdefault(rank, set()).add(connection)

    def _hung_up(self, life: RankLife) -> bool:
        """Whether the process that a rank's INIT was for has closed its connection and shows nothing else."""
        rank = life.index
        return (
            life.state is State.HELLO
            and self._told[rank] not in self._connections.open
            and rank not in self._early
            and not self.core.connected(rank)
        )

    def _judge(self, life: RankLife) -> None:
        """Give the place of a process that has hung up in its handshake to the next, if there can be one."""
        rank = life.index
        holders = self._connections.silent | ({self._dialed[rank]} if life.pending else set())
        if rank in self._unready and not self._doubt[rank] & holders:
            self._handle(rank, Event.LOST, incarnation=life.incarnation, why="hung up before it was READY")
        elif life.pending:
            if self._doubt[rank]:
                self._shared[rank] = life.incarnation
            life.hurry(time.monotonic() + _GONE_GRACE)
        else:
            return  # it was READY, after which it need not stay connected; or another has its INIT and says HELLO next
        self._restless = True  # sending an INIT can swallow the signal of the next HELLO

    def _recall(self, life: RankLife) -> None:
        """Where a rank's place is free again and one still waits that had lost it to a later dialer: reach that one.

        The ROUTER forgot it when the later one came, so it is hung up on, which makes it dial again.
        """
        rank = life.index
        waiting = self._unanswered.get(rank, set())
        waiting &= self._connections.open
        if life.state not in (State.ABSENT, State.DEAD):
            self._recalled.pop(rank, None)
        elif rank in self._recalled:
            greeted, until = self._recalled[rank]
            if self._connections.greeted > greeted:
                self._recalled[rank] = self._connections.greeted, until
                self._poller.poll(0)  # makes the ROUTER take in who has come
                self._dialed[rank] = 0  # which of the silent connections it is, the ROUTER does not tell
                self._handle(rank, Event.HELLO)
            elif time.monotonic() >= until:
                del self._recalled[rank]
                self._restless = True
        elif waiting:
            number = max(waiting)
            waiting.discard(number)
            self._recalled[rank] = self._connections.greeted, time.monotonic() + _RECALL_GRACE
            self._note(rank, "recalled", "rank %d: who waits for it had lost its place; it is recalled", rank)
            self._connections.hang_up(number)

    def _agreeing(self, heard: Heard, config_hash: str | None) -> Heard:
        """A READY, or that it is refused: ranks that step together have to run with one parallel_config."""
        if heard.event is not Event.READY or heard.rank is None or config_hash is None:
            return heard
        self._config_hashes[heard.rank] = config_hash
        for rank, known in self._config_hashes.items():
            if known != config_hash and self.lives[rank].state in (State.HELLO, State.LIVE):
                why = f"its parallel_config ({config_hash[:80]}) is not that of rank {rank} ({known[:80]})"
                return Heard(heard.rank, Event.BAD, why)
        return heard

    def _on_heard(self, heard: Heard, incarnation: int | None = None) -> None:
        if heard.rank is None:
            self.refused += 1
            self._note(-1, heard.why, "refused a dialer: %s", heard.why)
        else:
            self._handle(heard.rank, heard.event, incarnation=incarnation, why=heard.why)
            if heard.event is Event.REGISTERED and self.lives[heard.rank].state is State.HELLO:
                life = self.lives[heard.rank]
                self._ready_by.setdefault(heard.rank, (life.incarnation, time.monotonic() + _READY_GRACE))

    def _on_event(
        self,
        kind: int,
        rank: int,
        incarnation: int,
        detail: int,
        data: bytes,
        fault: tuple[str, str, int, int, int, int] | None,
    ) -> None:
        if kind == _EVENT.INPUT:
            self._on_input(rank, incarnation, detail, data)
        elif kind == _EVENT.UTILITY:
            self.calls.answer(detail, data)
        elif kind == _EVENT.SILENT:
            self.calls.probe(rank)
        elif kind == _EVENT.CONNECTED:
            if rank in self._early:
                self._on_heard(*self._early.pop(rank))
        elif kind == _EVENT.DEAD:
            self._handle(rank, Event.LOST, incarnation=incarnation, why=_fastpath.DEATHS[detail])
        elif kind == _EVENT.STALLED:
            _log.warning("%s: rank %d is silent with work in flight: stalled", self._name, rank)
            self._handle(rank, Event.SILENT, incarnation=incarnation)
        elif kind == _EVENT.RESUMED:
            _log.info("%s: rank %d is heard again", self._name, rank)
            self._handle(rank, Event.FRAME, incarnation=incarnation)
        elif kind == _EVENT.UNDECODABLE and fault is not None:
            _log.warning(
                "%s: rank %d sent an undecodable frame of %d bytes: %s; it begins with %s",
                self._name,
                rank,
                detail,
                fault_error(*fault),
                data.hex(),
            )
        elif kind == _EVENT.MISATTRIBUTED:
            _log.warning("%s: rank %d says that it is rank %d; its socket is believed", self._name, rank, detail)

    def _on_input(self, rank: int, incarnation: int, parts: int, payload: bytes) -> None:
        identity = handshake.identity(rank) if parts >= 0 else b""
        frames = [identity, payload] + [b""] * (parts - 2)
        registration: list[handshake.Registration] = []

        def version_of(data: bytes) -> str:
            registration.append(handshake.decode_registration(data))
            return registration[0].vllm_version

        heard = hear_registration(frames, rank, self.backend, version_of)
        if heard.event is Event.REGISTERED and self.lives[rank].incarnation == incarnation:
            self.registrations[rank] = registration[0]
            if (sockets := self._sockets[rank]) is not None:
                sockets.input.setsockopt(zmq.ROUTER_HANDOVER, 0)  # from here on, nobody takes its place
            if registration[0].lockstep and not self.lockstep:
                self.lockstep = True
                self.core.step_together()
            if not self.core.connected(rank):  # a death before that would not be seen
                self._early[rank] = heard, incarnation
                return
        self._on_heard(heard, incarnation)

    # ---------------------------------------------------------- the state table, carried out

    def _handle(self, rank: int, event: Event, *, incarnation: int | None = None, why: str = "") -> None:
        life = self.lives[rank]
        self._carry_out(life, life.handle(event, time.monotonic(), incarnation=incarnation, why=why), why)

    def _carry_out(self, life: RankLife, steps: list[Step], why: str = "") -> None:
        rank = life.index
        for action, incarnation in steps:
            if action is Action.BIND_AND_INIT:
                self._bind_and_init(rank, incarnation)
            elif action is Action.GO_LIVE:
                self._ready_by.pop(rank, None)  # else its end would wake the pump, which then waits for the GIL
                registration = self.registrations[rank]
                engine = registration.vllm_version if registration else "an engine"
                _log.info(
                    "%s: rank %d is live: %s, incarnation %d", self._name, rank, engine or "an engine", incarnation
                )
            elif action is Action.REFUSE:
                self._note(rank, why or life.fault, "rank %d: refused: %s", rank, why or life.fault)
            elif action is Action.KEEP_HELLO:
                self._note(rank, "claimed", "rank %d is claimed by a second process; it waits for the first", rank)
                # The first may have gone before it connected its output, whose end would tell. A send tells, too,
                # once the input is connected.
                heard = life.state is not State.HELLO or rank in self._early
                if heard and self._asked.get(rank) != incarnation:
                    self._asked[rank] = incarnation
                    self.core.call(rank, _NOBODY, _ABORT)
            elif action is Action.END_REQUESTS:  # done by the pump, after it had read the output socket out
                _log.warning("%s: rank %d %s; its requests were ended", self._name, rank, why)
            elif action is Action.UNBIND:
                self._unbind(rank, incarnation)
        if steps or life.state is State.DRAINING:
            self.core.set_state(rank, _STATES.index(life.state))
            self._tell_waiters()

    def _bind_and_init(self, rank: int, incarnation: int) -> None:
        self.registrations[rank] = None
        self._unready.add(rank)
        try:
            sockets = self._bind(rank, incarnation)
        except zmq.ZMQError as error:
            _log.error("%s: rank %d: its sockets cannot be bound: %s", self._name, rank, error)
            self._handle(rank, Event.LOST, why=f"had no sockets: {error}")
            return
        self._sockets[rank] = sockets
        self.core.attach(rank, incarnation, sockets.input, sockets.output, sockets.monitor)
        init = handshake.encode_init(
            [self._directory.input(rank, incarnation)],
            [self._directory.output(rank, incarnation)],
            self._parallel_config,
        )
        # It goes to the last that has connected with the rank's identity, which may have been after the HELLO. Then
        # that connection was there before, or has come meanwhile.
        self._connections.read()
        self._told[rank] = self._dialed[rank]
        self._doubt[rank] = set(self._connections.silent)
        try:
            self._handshake.send_multipart([handshake.identity(rank), init], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._handle(rank, Event.LOST, why="hung up before its INIT")
            return
        self._unanswered.get(rank, set()).discard(self._told[rank])
        self._connections.read()
        self._doubt[rank] |= self._connections.silent

    def _bind(self, rank: int, incarnation: int) -> Sockets:
        sockets = self._kept.pop(rank, None) or self._new_sockets()
        try:
            sockets.output.bind(self._directory.output(rank, incarnation))
            sockets.input.bind(self._directory.input(rank, incarnation))
        except BaseException:
            sockets.close()
            self._discard(rank, incarnation)
            raise
        return sockets

    def _new_sockets(self) -> Sockets:
        output = self._context.socket(zmq.PULL)
        output.setsockopt(zmq.RCVHWM, 0)  # an engine's PUSH would block its scheduler
        output.setsockopt(zmq.LINGER, 0)
        monitor = output.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        input_ = self._context.socket(zmq.ROUTER)
        input_.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a vanished or full peer is an error, not a silent drop
        input_.setsockopt(zmq.ROUTER_HANDOVER, 1)  # until the rank has registered, who came first may not be it
        input_.setsockopt(zmq.SNDHWM, 1000)
        input_.setsockopt(zmq.LINGER, 0)
        return Sockets(input_, output, monitor)

    def _unbind(self, rank: int, incarnation: int) -> None:
        sockets, self._sockets[rank] = self._sockets[rank], None
        if sockets is None:
            return
        unused = rank not in self._early and not self.core.connected(rank)
        self._config_hashes.pop(rank, None)
        self._early.pop(rank, None)
        self._ready_by.pop(rank, None)
        self.calls.rank_died(rank)
        self.core.end_rank(rank)  # a handshake that was given up has none, a drained rank neither
        self.core.detach(rank)
        if unused and self._shared.get(rank) == incarnation == self.lives[rank].incarnation - 1:
            self._kept[rank] = sockets  # the next may look for them under the addresses of this one
        else:
            sockets.close()
            self._discard(rank, incarnation)

    def _discard(self, rank: int, incarnation: int) -> None:
        """Unlink what is left of an incarnation's addresses, and of those that it has had from the one before."""
        self._directory.discard(rank, incarnation)
        if self._shared.get(rank) == incarnation - 1:
            self._directory.discard(rank, incarnation - 1)

    def _note(self, rank: int, topic: str, message: str, *args: object) -> None:
        """Log once per rank and topic, so that a loud dialer does not fill the log."""
        if (rank, topic) not in self._noted and len(self._noted) < 1000:
            self._noted.add((rank, topic))
            _log.warning("%s: " + message, self._name, *args)

    # ---------------------------------------------------------- waiting for ranks

    def _tell_waiters(self) -> None:
        self.live = live = sum(life.state in (State.LIVE, State.STALLED) for life in self.lives)
        known = [r.max_model_len for r in self.registrations if r is not None and r.max_model_len]
        self.context_length = min(known) if known else None
        versions = {r.vllm_version for r in self.registrations if r is not None}
        self.version = versions.pop() if len(versions) == 1 else ""
        with self._lock:
            done = [future for count, future in self._waiters if count <= live]
            self._waiters = [
                (count, future) for count, future in self._waiters if count > live and not future.cancelled()
            ]
        for future in done:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def _fail_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for _, future in waiters:
            if future.set_running_or_notify_cancel():
                future.set_exception(Closed("the group is closed"))

    def _shut(self) -> None:
        with self._lock:
            self._closing = True
        self.core.stop()
        try:
            for rank, life in enumerate(self.lives):
                sockets = self._sockets[rank]
                if sockets is not None:
                    self.core.detach(rank)
                    sockets.close()
                    self._directory.discard(rank, life.incarnation)
                life.state = State.ABSENT
            self.live = 0
            self.calls.close()
            if not self._exiting:  # else who still reads is a daemon thread, whose error would only be printed
                self.core.close()
        finally:
            self._context.destroy(0)
            self._directory.release()
            with self._lock:
                self._fail_waiters()
