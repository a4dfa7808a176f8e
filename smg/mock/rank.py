"""One simulated rank: its sockets, its engine, and the faults it has been told to show.

The rank dials as the real engine does and never waits: the simulator's loop calls `advance` when time has
come, and the handlers in `watch` when a file descriptor is readable.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from smg.errors import HandshakeError
from smg.mock.dialect import ADD, DEAD, Deadly, Deafening, Dialect, Taken, Undecodable
from smg.mock.lockstep import Lockstep, Member
from smg.mock.model import Batch, Engine
from smg.mock.replies import Replies
from smg.mock.settings import Settings
from smg.mock.tokenspeed import TokenSpeed
from smg.mock.vllm import VLLM
from smg.protocol import handshake

DIALECTS: dict[str, type[Dialect]] = {"tokenspeed": TokenSpeed, "vllm": VLLM}
REQUESTS_KEPT = 10_000
CLOSING_LINGER_MS = 1000  # the engine lingers for ever; a tool must come to an end

# What `stats` counts per incarnation, beside the engine's own totals.
COUNTERS = (
    "adds",  # ADDs that arrived; each is then one of the next seven
    "queued",
    "rejected",  # answered with a terminal "abort" or "error"
    "killed",  # dropped silently because of an earlier abort of that id
    "dropped",  # by `drop_adds`
    "undecodable",  # messages of any kind that were dropped
    "deafening",  # messages of any kind after which it hears no other
    "deadly",  # messages of any kind that it died of
    "duplicates",  # queued although a request of that id was there
    "aborts",  # ids named by ABORTs
    "utilities",  # calls
    "waves",  # STARTs of them
    "stale",  # STARTs that it did not heed
    "ignored",  # messages of kinds that mean nothing to it
    "frames",  # output messages, faults included
)

COUNTED_AS = {"abort": "aborts", "utility": "utilities", "wave": "waves", "ignored": "ignored"}

Watch = dict[int, Callable[[], None]]
Report = Callable[..., None]  # (event's name, **fields)
Run = Callable[[dict[str, Any]], Any]  # runs an operation's message


class Rank:
    """A rank in one of the states absent, dialing, live, dead; each `dial` is a new incarnation."""

    def __init__(
        self,
        index: int,
        settings: Settings,
        replies: Replies,
        vocab_size: int,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        watch: Watch,
        report: Report,
        group: Lockstep | None = None,
    ) -> None:
        self.index = index
        self.state = "absent"
        self.incarnation = 0
        self.requests: deque[dict[str, Any]] = deque(maxlen=REQUESTS_KEPT)  # decoded ADDs, when recording
        self._settings = settings
        self._replies = replies
        self._vocab_size = vocab_size
        self._context = context
        self._address = address
        self._watch = watch
        self._report_event = report
        self._group = group
        if group is not None:
            group.peers.append(self)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._begin()

    def _begin(self) -> None:
        """Set up what belongs to one incarnation."""
        dialect = DIALECTS[self._settings.backend]
        self.engine = Engine(self._settings, self._replies, dialect.ending)
        self._dialect: Dialect = dialect(self._settings, self.engine, self._vocab_size)
        self._counts: Counter[str] = Counter()
        self._claimed_index = self.index  # what its frames say
        self._stalled = False
        self._held = self._settings.hold
        self._steps_due = 0  # of those that `step` asked a rank in lockstep for
        self._unsent: deque[list[bytes]] = deque()  # output that found the socket full
        self._blocked = False  # waiting for the output socket
        self._withheld = set(self._settings.withhold)
        self._postponed: list[Callable[[], None]] = []  # handshake steps withheld so far
        self._adds_to_drop = 0
        self._armed: list[tuple[dict[str, Any], Run]] = []
        self._deadline: float | None = None
        if self._group is not None:
            self._group.restarted()

    # -- life

    def dial(self) -> None:
        """Start an incarnation: HELLO goes out as soon as somebody listens."""
        self._begin()
        self.incarnation += 1
        self.state = "dialing"
        self._report("dialing")
        self._deadline = time.monotonic() + self._settings.handshake_timeout
        dealer = self._open("handshake", zmq.DEALER)
        dealer.connect(self._address)
        self._watch[_fd(dealer)] = self._on_handshake
        self._unless_withheld("hello", lambda: self._say(self._dialect.hello()))

    def due(self) -> float | None:
        """When `advance` has something to do (on time.monotonic); None: only a message can bring that."""
        if self.state != "live":
            return self._deadline
        if self._group is not None:
            return self._group.due()
        return None if self._stalled or self._held or self._blocked else self.engine.due

    def advance(self, now: float) -> None:
        due = self.due()
        if due is None or due > now:
            return
        if self.state == "live":
            if self._group is not None:
                self._group.advance(now)
            else:
                self.complete_step(now)
                self.attend()
        else:
            self._report("timeout", reason=f"no INIT within {self._settings.handshake_timeout:g} s")
            self.die()

    def close(self, sentinel: bool) -> None:
        """End as an engine that is told to. Without a sentinel, it does not send one where it should."""
        if self.state == "live":
            for frames in self._dialect.farewell(self._claimed_index):
                if sentinel or frames != [DEAD]:
                    self._send(frames)
        self._hang_up(CLOSING_LINGER_MS)

    # -- operations

    def die(self) -> None:
        """Close all sockets without a word; the requests are lost."""
        self._hang_up(linger=0)

    def restart(self) -> None:
        """Die, and dial again under the same identity as a new incarnation."""
        self.die()
        self.dial()

    def stall(self) -> None:
        """Neither read nor step, with all sockets open, until `resume`."""
        self._stalled = True
        self._listen()

    def resume(self) -> None:
        """End a stall."""
        self._stalled = False
        self._listen()

    def hold(self) -> None:
        """Read requests and aborts but make no step, until `release`; `step` makes single ones."""
        self._held = True
        self._steps_due = 0

    def release(self) -> None:
        """Go on making steps."""
        self._held = False
        self._steps_due = 0

    def step(self, count: int = 1) -> None:
        """Make that many steps at once, whatever time it is; fewer when the engine runs out of work.

        In lockstep, a step is made when every rank that is on hold has been told to.
        """
        if self._group is not None:
            if self._has_work:
                self._steps_due += count
            while self._steps_due and self._group.due() is not None:
                self._group.advance(time.monotonic())
            return
        target = self.engine.counts.steps + count
        while self.state == "live" and self.engine.due is not None and self.engine.counts.steps < target:
            self.complete_step(max(self.engine.due, time.monotonic()))
            self.attend()

    def proceed(self) -> None:
        """Take the handshake steps that were withheld."""
        self._withheld.clear()
        postponed, self._postponed = self._postponed, []
        for act in postponed:
            act()
        if "input" in self._sockets and self.state == "dialing":
            self._go_live()

    def sentinel(self) -> None:
        """Send ENGINE_CORE_DEAD and go on living."""
        self._send([DEAD])

    def malformed(self, kind: str = "garbage", count: int = 1, column: str = "") -> None:
        """Send frames made from the running requests that no decoder may accept.

        kind: garbage, empty, truncated, trailing, tag, short, map, or ragged with the column to cut short.
        """
        batch = self.engine.residents()
        if not batch.rids:
            batch = self._one_row("mock-nobody", [1], "", 1, 1)
        for _ in range(count):
            self._send(self._dialect.spoil(kind, batch, self._claimed_index, column))

    def emit(
        self,
        rid: str,
        token_ids: list[int] | None = None,
        finish_reason: str = "",
        prompt_tokens: int = 1,
        completion_tokens: int | None = None,
    ) -> None:
        """Send a well-formed frame with one row for any request id: late, foreign or invented."""
        tokens = [1] if token_ids is None else token_ids
        total = len(tokens) if completion_tokens is None else completion_tokens
        batch = self._one_row(rid, tokens, finish_reason, prompt_tokens, total)
        self._send(self._dialect.encode(batch, self._claimed_index))

    def raw(self, frames: list[str]) -> None:
        """Send a message of these frames, given in hex."""
        self._send([bytes.fromhex(frame) for frame in frames])

    def deafen(self, reason: str = "told to") -> None:
        """Hear no message any more, while steps go on. The input socket closes, as vLLM's does."""
        if "input" in self._sockets:
            self._close("input", CLOSING_LINGER_MS)
        self._report("deaf", reason=reason)

    def drop_adds(self, count: int = 1) -> None:
        """Lose the next ADDs unread."""
        self._adds_to_drop = count

    def engine_index(self, index: int | None = None) -> None:
        """Claim this index in all frames from now on; None: the true one."""
        self._claimed_index = self.index if index is None else index

    def arm(self, message: dict[str, Any], run: Run) -> None:
        """Run an operation after as many more frames (`after_frames`) or ADDs (`after_adds`) as it says."""
        self._armed.append((message, run))

    def stats(self) -> dict[str, Any]:
        """State, load and totals of this incarnation."""
        return {
            "rank": self.index,
            "state": self.state,
            "incarnation": self.incarnation,
            "unsent": len(self._unsent),
            **{name: self._counts[name] for name in COUNTERS},
            **dataclasses.asdict(self.engine.counts),
            **self.engine.load._asdict(),
            **({} if self._dialect.member is None else {"wave": self.member.wave, "parked": not self.member.running}),
        }

    # -- a lockstep group's view

    @property
    def member(self) -> Member:
        assert self._dialect.member is not None
        return self._dialect.member

    @property
    def enters(self) -> bool:
        kept = self._stalled or self._blocked or (self._held and not self._steps_due) or self.member.resuming
        return self.state == "live" and self._has_work and not kept

    @property
    def hurries(self) -> bool:
        return self._steps_due > 0

    @property
    def _has_work(self) -> bool:
        return self.member.running or self.engine.due is not None

    def lose(self) -> None:
        self._crash(Deadly("a peer is gone"))

    # -- handshake

    def _unless_withheld(self, step: str, act: Callable[[], None]) -> None:
        if step in self._withheld:
            self._postponed.append(act)
        else:
            act()

    def _say(self, message: bytes) -> None:
        self._sockets["handshake"].send(message)
        self._on_handshake()  # a send may swallow the signal that something came

    def _on_handshake(self) -> None:
        for frames in self._received("handshake"):
            if "input" in self._sockets:
                continue  # the engine reads one INIT and no more
            try:
                self._connect(handshake.decode_init(frames[-1]))
            except HandshakeError as error:
                self._report("refused_init", reason=str(error))
                self.die()

    def _connect(self, init: handshake.Init) -> None:
        """READY and registration, in the engine's order. TokenSpeed connects its data sockets after READY."""
        self._deadline = None
        dialect, mark = self._dialect, self._settings.input_hwm
        source = self._open("input", zmq.DEALER)
        source.sndhwm = dialect.hwm
        source.rcvhwm = dialect.hwm if mark is None else mark
        sink = self._open("output", zmq.PUSH)
        sink.sndhwm = dialect.hwm
        if not dialect.registers_first:
            self._unless_withheld("ready", lambda: self._say(dialect.ready()))
        source.connect(init.inputs[0])
        self._unless_withheld("registration", lambda: source.send(dialect.registration(self.index)))
        sink.connect(init.outputs[0])
        if dialect.registers_first:
            self._unless_withheld("ready", lambda: self._say(dialect.ready()))
        if not self._postponed:
            self._go_live()

    def _go_live(self) -> None:
        self._close("handshake", CLOSING_LINGER_MS)
        self.state = "live"
        self._report("live")
        self._listen()

    # -- input

    def _listen(self) -> None:
        """Read requests while the rank may, as the engine does between two steps."""
        source = self._sockets.get("input")
        if source is None:
            return
        if self.state == "live" and not (self._stalled or self._blocked):
            self._watch[_fd(source)] = self._on_input
            self._on_input()  # what came in the meantime gives no new signal
        else:
            self._watch.pop(_fd(source), None)

    def _on_input(self) -> None:
        for frames in self._received("input"):
            self._take(frames)
            if self._stalled or self._blocked:
                return

    def _take(self, frames: list[bytes]) -> None:
        is_add = frames[0] == ADD
        self._counts["adds"] += is_add
        if is_add and self._adds_to_drop:
            self._adds_to_drop -= 1
            self._counts["dropped"] += 1
            self._report("dropped")
        else:
            try:
                self._took(self._dialect.take(frames, time.monotonic()))
            except Undecodable as error:
                self._counts["undecodable"] += 1
                self._report("undecodable", reason=str(error))
            except Deafening as error:
                self._counts["deafening"] += 1
                self.deafen(str(error))
            except Deadly as error:
                self._counts["deadly"] += 1
                self._crash(error)
        if is_add and self._armed:
            self._count_down("after_adds")

    def _took(self, taken: Taken) -> None:
        if taken.event == "add":
            self._counts[taken.outcome] += 1
            self._counts["duplicates"] += taken.duplicate
        else:
            self._counts[COUNTED_AS[taken.event]] += len(taken.rids) if taken.event == "abort" else 1
        if self._settings.record:
            self._record(taken)
        if taken.answer is not None:
            self._emit(taken.answer)
        elif taken.event == "wave" and taken.exclude != self.index:
            self._counts["stale"] += not self.member.start(taken.wave)
        busy = self.engine.stepping if self._group is None else self._has_work
        if self._held or not busy:
            self.attend()

    def _record(self, taken: Taken) -> None:
        if taken.event == "add":
            self._report("add", rid=taken.rids[0], outcome=taken.outcome, reason=taken.reason)
            who = {"rank": self.index, "incarnation": self.incarnation, "outcome": taken.outcome}
            self.requests.append({**who, **taken.request})
        elif taken.event == "abort":
            self._report("abort", rids=taken.rids)
        elif taken.event == "utility":
            self._report("utility", method=taken.method)
        elif taken.event == "wave":
            self._report("wave", wave=taken.wave)

    def attend(self) -> None:
        """Send what the engine does between steps."""
        if self.state != "live":
            return
        for wave in self.member.completed if self._group is not None else ():
            self._steps_due = 0
            self._report("parked", wave=wave)
        for frames in self._dialect.between_steps(self._claimed_index):
            self._send(frames)
        if self._group is not None:
            self._group.settle()

    def _crash(self, error: Deadly) -> None:
        self._report("crashed", reason=str(error))
        if error.said:
            self._send([DEAD])
        self._hang_up(CLOSING_LINGER_MS)

    # -- output

    def complete_step(self, now: float) -> None:
        """Do what is due, and send what came of it."""
        self._steps_due -= self._steps_due > 0
        before = self.engine.counts.steps
        batch = self.engine.step(now)
        self._emit(batch)
        stepped = self.engine.counts.steps > before and self.state == "live"
        if stepped and self._dialect.reports_every_step and (batch is None or self.engine.due is None):
            self._emit(self._no_rows())

    def _emit(self, batch: Batch | None) -> None:
        """Send what the engine has put out."""
        if batch is None:
            return
        self._send(self._dialect.encode(batch, self._claimed_index))
        if self._settings.record:
            for rid, reason, tokens in zip(batch.rids, batch.finish_reasons, batch.completion_tokens, strict=True):
                if reason:
                    self._report("finish", rid=rid, reason=reason, completion_tokens=tokens)
        if self._armed:
            self._count_down("after_frames")

    def _send(self, frames: list[bytes]) -> None:
        if "output" not in self._sockets:
            raise ValueError(f"rank {self.index} is {self.state}: it has no output socket")
        self._counts["frames"] += 1
        self._unsent.append(frames)
        self._flush()

    def _flush(self) -> None:
        """Send what waits. A full socket stops the rank, as the engine's send blocks its scheduler."""
        sink = self._sockets["output"]
        try:
            while self._unsent:
                sink.send_multipart(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()
        except zmq.Again:
            if not self._blocked:
                self._blocked = True
                self._watch[_fd(sink)] = self._on_writable
                self._report("blocked")
                self._listen()
            return
        if self._blocked:
            self._blocked = False
            del self._watch[_fd(sink)]
            self._report("unblocked")
            self._listen()

    def _on_writable(self) -> None:
        if self._sockets["output"].poll(0, zmq.POLLOUT):
            self._flush()

    # -- helpers

    def _no_rows(self) -> Batch:
        return Batch([], [], [], [], [], [], [], [], load=self.engine.load)

    def _one_row(self, rid: str, tokens: list[int], reason: str, prompt: int, completion: int) -> Batch:
        return Batch([rid], [tokens], [reason], [prompt], [completion], [0], [[]], [[]], load=self.engine.load)

    def _count_down(self, trigger: str) -> None:
        for armed in [armed for armed in self._armed if trigger in armed[0]]:
            message, run = armed
            message[trigger] -= 1
            if message[trigger] <= 0 and armed in self._armed:
                self._armed.remove(armed)
                run({key: value for key, value in message.items() if key != trigger})

    def _report(self, event: str, **fields: Any) -> None:
        self._report_event(event, rank=self.index, incarnation=self.incarnation, **fields)

    def _open(self, name: str, kind: int) -> zmq.Socket[bytes]:
        """A new socket with the engine's options: libzmq's defaults and, but for output, its identity."""
        self._sockets[name] = socket = self._context.socket(kind)
        if kind == zmq.DEALER:
            socket.identity = handshake.identity(self.index)
        return socket

    def _received(self, name: str) -> Iterator[list[bytes]]:
        """Messages of a socket until none is left or the socket is gone."""
        while (socket := self._sockets.get(name)) is not None:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield frames

    def _hang_up(self, linger: int) -> None:
        was = self.state
        for name in list(self._sockets):
            self._close(name, linger)
        self._postponed.clear()
        self._deadline = None
        if was in ("dialing", "live"):
            self.state = "dead"
            self._report("dead")

    def _close(self, name: str, linger: int) -> None:
        socket = self._sockets.pop(name)
        self._watch.pop(_fd(socket), None)
        socket.close(linger)


def _fd(socket: zmq.Socket[bytes]) -> int:
    return int(socket.fd)
