"""Frames to slots, counters, rank choice, the pump: one group's core, without the GIL where it counts.

The state of a group lives in C structs under one mutex (`_table.pxd`) and is moved by one thread (`_pump.pxd`). `Core`
is where Python's side of that thread meets it; consumers meet it in `_outlets` and `_streams`. Nothing here creates,
touches or releases a Python object with the mutex held.
"""

import ctypes
import os

import zmq.backend.cython._zmq as _pyzmq

from libc.stdint cimport int64_t, uint8_t, uint32_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset
from posix.unistd cimport close

from smg._batch cimport batch_free, batch_init, fault_parts
from smg._delivery cimport scratch_free
from smg._frame cimport Decoder, Part
from smg._pump cimport (
    EVENT_CONNECTED, EVENT_DEAD, EVENT_INPUT, EVENT_MISATTRIBUTED, EVENT_RESUMED, EVENT_SILENT, EVENT_STALLED, EVENT_UNDECODABLE,
    EVENT_UTILITY, OUTCOME_STOPPED, ROLE_INPUT, ROLE_MONITOR, ROLE_OUTPUT, ROLE_RARE, ROLE_WAKE, Connection, Event,
    drop_queue, handle_message, monotonic, part_room, read_monitor, read_turn, run, settle, tag_of,
)
from smg._table cimport (
    CAUSE_CLOSED, CAUSE_DIED, NIL, QUEUE_FRAMES, RANK_DRAINING, RANK_HELLO, RANK_LIVE, SLOT_ENDED, SLOT_FREE, SLOT_LIVE,
    TYPE_ABORT, TYPE_UTILITY, Message, Rank, RankCounters, end_all, enqueue, new_message, pthread_mutex_destroy,
    pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock, signal_fd, signal_outlets, slot_at, start_wave,
)
from smg._tokenspeed cimport decode_slim_message
from smg._vllm cimport decode_core
from smg._wait cimport smg_epoll_open, unwatch, watch
from smg._zmq cimport Zmq

from smg.errors import ForkedError

cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(void (*)() noexcept nogil, void (*)() noexcept nogil, void (*)() noexcept nogil)

# ---------------------------------------------------------------- process-wide

cdef Zmq LIBZMQ
LIBZMQ_CALLS = (   # in the order of the struct's fields
    "msg_init", "msg_init_size", "msg_close", "msg_recv", "msg_send", "msg_data", "msg_size", "msg_more", "getsockopt",
    "errno",
)
cdef int FORKS = 0   # how many forks away from the first process this one is


cdef void count_fork() noexcept nogil:
    global FORKS
    FORKS += 1


pthread_atfork(NULL, NULL, count_fork)


def _resolve_libzmq() -> None:
    """Take the addresses of the functions the pump calls from the libzmq that pyzmq loaded."""
    library = ctypes.CDLL(_pyzmq.__file__)

    def address(name):
        try:
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        except AttributeError:
            raise ImportError(
                f"pyzmq's extension module {_pyzmq.__file__} does not give access to {name}; "
                "install pyzmq from a wheel or from source with a shared libzmq (pip install --force-reinstall pyzmq)"
            ) from None

    cdef void **fields = <void **>&LIBZMQ
    for at, name in enumerate(LIBZMQ_CALLS):
        fields[at] = <void *><uintptr_t>address("zmq_" + name)


_resolve_libzmq()


def wake_fds() -> tuple:
    """A non-blocking (read, write) pair: one eventfd twice, or a pipe where there is none."""
    if hasattr(os, "eventfd"):
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return fd, os.dup(fd)
    ends = os.pipe()
    for fd in ends:
        os.set_blocking(fd, False)
    return ends


DEATHS = (
    "was closed",
    "went away (its connection closed)",
    "reported that its engine is dead",
    "cannot be reached (its input connection is gone)",
    "sent three undecodable frames in a row",
    "has a broken socket",
    "failed with another rank of its lockstep group",
)


class EventKind:
    """The kinds of `Core.events`."""

    INPUT = EVENT_INPUT                  # detail = parts of the message, -1 = not the rank's identity
    DEAD = EVENT_DEAD                    # detail = index into DEATHS
    STALLED = EVENT_STALLED
    RESUMED = EVENT_RESUMED
    UNDECODABLE = EVENT_UNDECODABLE      # detail = bytes of the frame
    MISATTRIBUTED = EVENT_MISATTRIBUTED  # detail = the index that was claimed
    UTILITY = EVENT_UTILITY              # detail = call id, data = the reply
    SILENT = EVENT_SILENT                # half of the stall timeout is over
    CONNECTED = EVENT_CONNECTED          # the engine has connected its output


RANK_DTYPE = [("running", "i8"), ("waiting", "i8"), ("kv_usage", "f8"), ("reported", "?")]


# ---------------------------------------------------------------- the core

cdef Decoder decoder_of(str backend) except NULL:
    """What decodes the messages of a backend's ranks."""
    if backend == "tokenspeed":
        return decode_slim_message
    if backend == "vllm":
        return decode_core
    raise ValueError(f"backend={backend!r} has no decoder")


cdef class Core:
    """One group's slot table and pump.

    `ranks`: how many. `backend` names the engine's wire. `decode_cold`: what turns an output's logprob bytes and how
    many likeliest tokens were asked for (None = all) into a list. `stall_timeout` in seconds, 0 = never; with
    `probes`, half of it raises SILENT. `max_inflight` per rank, 0 = unbounded. `use_epoll=False` waits with poll(2),
    as systems without epoll do.
    """

    def __cinit__(self, uint32_t ranks, *, str backend, object decode_cold, double stall_timeout, int64_t max_inflight,
                  bint probes=False, bint use_epoll=True):
        cdef uint32_t i
        self.forks = FORKS
        self.wake_read = -1
        self.table.wake_fd = self.pump.wake_fd = self.pump.waiter.epoll_fd = -1
        self.decode_cold = decode_cold
        self.loop_outlets = {}
        self.outlets = {}
        pthread_mutex_init(&self.table.mutex, NULL)
        self.table.epoch = <uint32_t>int.from_bytes(os.urandom(4), "little")
        self.table.rank_count = ranks
        self.table.free_head = self.table.free_tail = self.table.to_flush = NIL
        self.table.max_inflight = max_inflight
        self.table.ranks = <Rank *>calloc(ranks, sizeof(Rank))
        self.pump.table = &self.table
        self.pump.zmq = LIBZMQ
        self.pump.decode = decoder_of(backend)
        batch_init(&self.pump.batch)
        self.pump.connection_count = ranks
        self.pump.connections = <Connection *>calloc(ranks, sizeof(Connection))
        self.pump.event_capacity = 64 + 4 * ranks
        self.pump.events = <Event *>calloc(self.pump.event_capacity, sizeof(Event))
        if (self.table.ranks == NULL or self.pump.connections == NULL or self.pump.events == NULL
                or not part_room(&self.pump, 0)):
            raise MemoryError
        for i in range(ranks):
            self.table.ranks[i].live_head = self.table.ranks[i].next_flush = NIL
        self.pump.stall_timeout = stall_timeout
        self.pump.probes = probes
        self.wake_read, self.table.wake_fd = wake_fds()
        self.pump.wake_fd = self.wake_read
        if use_epoll:
            self.pump.waiter.epoll_fd = smg_epoll_open()
        if watch(&self.pump.waiter, self.wake_read, tag_of(ROLE_WAKE, 0)) != 0:
            raise MemoryError

    def __dealloc__(self):
        # Every record holds its core, so no slot is in use any more; a child of fork() leaves the sockets alone.
        cdef uint32_t i
        if self.forks == FORKS:
            pthread_mutex_destroy(&self.table.mutex)
        for i in range(self.table.slot_count):
            free(slot_at(&self.table, i).tokens)
            free(slot_at(&self.table, i).cold)
        for i in range(self.table.block_count):
            free(self.table.blocks[i])
        for i in range(self.pump.event_count):
            free(self.pump.events[i].bytes)
        if self.table.ranks != NULL:
            for i in range(self.table.rank_count):
                drop_queue(&self.pump, &self.table.ranks[i])
        free(self.table.blocks)
        free(self.table.ranks)
        free(self.table.heap)
        free(self.pump.connections)
        free(self.pump.events)
        free(self.pump.message)
        free(self.pump.parts)
        free(self.pump.waiter.polled)
        free(self.pump.waiter.tags)
        batch_free(&self.pump.batch)
        scratch_free(&self.spare)
        for fd in (self.wake_read, self.table.wake_fd, self.pump.waiter.epoll_fd):
            if fd >= 0:
                close(fd)

    cdef bint forked(self) noexcept:
        """Whether this is a child of the process that made it."""
        return self.forks != FORKS

    cdef int usable(self) except -1:
        if self.forks != FORKS:
            raise ForkedError("this group was made before os.fork(); make the group in the process that uses it")
        return 0

    # ------------------------------------------------------------ for the loop thread

    def attach(self, uint32_t rank, uint32_t incarnation, input, output, monitor) -> None:
        """Give the pump the sockets of a new incarnation: zmq ROUTER, PULL, and the PULL's monitor (PAIR)."""
        cdef Connection *connection = &self.pump.connections[rank]
        cdef Rank *state = &self.table.ranks[rank]
        memset(connection, 0, sizeof(Connection))
        connection.attached = 1
        connection.engine_fd = -1
        connection.incarnation = incarnation
        connection.identity[0] = rank & 0xFF
        connection.identity[1] = rank >> 8
        connection.input = <void *><uintptr_t>input.underlying
        connection.output = <void *><uintptr_t>output.underlying
        connection.monitor = <void *><uintptr_t>monitor.underlying
        connection.input_fd = input.fileno()
        connection.output_fd = output.fileno()
        connection.monitor_fd = monitor.fileno()
        pthread_mutex_lock(&self.table.mutex)
        state.incarnation = incarnation
        state.reported = 0
        state.running = state.waiting = 0
        state.wave_told = state.wave_done = state.parks = 0
        state.kv_usage = 0
        pthread_mutex_unlock(&self.table.mutex)
        if (watch(&self.pump.waiter, connection.output_fd, tag_of(ROLE_OUTPUT, rank)) != 0 or
                watch(&self.pump.waiter, connection.input_fd, tag_of(ROLE_INPUT, rank)) != 0 or
                watch(&self.pump.waiter, connection.monitor_fd, tag_of(ROLE_MONITOR, rank)) != 0):
            raise MemoryError
        # A socket's descriptor tells of nothing until the socket has been found empty once.
        with nogil:
            read_monitor(&self.pump, rank)
            read_turn(&self.pump, rank)
            settle(&self.pump, rank)

    def detach(self, uint32_t rank) -> None:
        """Take the sockets back before they are closed. What was queued for them is dropped."""
        cdef Connection *connection = &self.pump.connections[rank]
        if not connection.attached:
            return
        unwatch(&self.pump.waiter, connection.input_fd)
        unwatch(&self.pump.waiter, connection.output_fd)
        unwatch(&self.pump.waiter, connection.monitor_fd)
        self.pump.unread -= connection.unread
        memset(connection, 0, sizeof(Connection))
        pthread_mutex_lock(&self.table.mutex)
        drop_queue(&self.pump, &self.table.ranks[rank])
        pthread_mutex_unlock(&self.table.mutex)

    def watch_rare(self, int fd) -> None:
        """Return from `run` when `fd` is readable: the descriptor of a socket that Python serves."""
        if watch(&self.pump.waiter, fd, tag_of(ROLE_RARE, 0)) != 0:
            raise MemoryError

    def connected(self, uint32_t rank) -> bool:
        """Whether the engine has connected its output, whose end is its death."""
        return self.pump.connections[rank].engine_fd >= 0

    def set_state(self, uint32_t rank, uint8_t state) -> None:
        """The rank's state as `lifecycle.State` numbers it. One that the pump has failed stays so until `detach`."""
        cdef Rank *changed = &self.table.ranks[rank]
        if self.pump.connections[rank].failed:
            return
        pthread_mutex_lock(&self.table.mutex)
        changed.state = state
        changed.quiet_since = monotonic()
        pthread_mutex_unlock(&self.table.mutex)

    def end_rank(self, uint32_t rank) -> None:
        """End what a rank still holds, as its death does."""
        pthread_mutex_lock(&self.table.mutex)
        end_all(&self.table, rank, CAUSE_DIED, 0)
        signal_outlets(&self.table)
        pthread_mutex_unlock(&self.table.mutex)

    def run(self, double timeout) -> bool:
        """Pump for up to `timeout` seconds, or until there is something for Python. False once stopped."""
        cdef double until = monotonic() + timeout
        cdef int outcome
        with nogil:
            outcome = run(&self.pump, until)
        return outcome != OUTCOME_STOPPED

    def feed(self, uint32_t rank, *frames, uint32_t times=1) -> None:
        """Decode and apply a message as if the rank had sent it: for tests and measurements without sockets."""
        cdef uint32_t count = len(frames)
        cdef uint32_t i
        if not all(type(frame) is bytes for frame in frames) or not count:
            raise TypeError("a message is one or more frames of bytes")
        cdef Part *parts = <Part *>malloc(count * sizeof(Part))
        if parts == NULL:
            raise MemoryError
        for i in range(count):
            parts[i].data = <const uint8_t *><const char *><bytes>frames[i]
            parts[i].size = len(<bytes>frames[i])
        with nogil:
            for i in range(times):
                handle_message(&self.pump, rank, parts, count, monotonic())
        free(parts)

    def step_together(self) -> None:
        """The ranks run in lockstep: each submit starts a wave on all of them, and they die together."""
        pthread_mutex_lock(&self.table.mutex)
        self.table.lockstep = 1
        pthread_mutex_unlock(&self.table.mutex)

    def events(self) -> list:
        """What `run` left for Python, once: (kind, rank, incarnation, detail, bytes, fault parts or None)."""
        cdef Event *event
        cdef uint32_t i
        cdef list taken = []
        for i in range(self.pump.event_count):
            event = &self.pump.events[i]
            fault = fault_parts(&event.fault) if event.kind == EVENT_UNDECODABLE else None
            data = b"" if event.bytes == NULL else event.bytes[:event.size]
            taken.append((event.kind, event.rank, event.incarnation, event.detail, data, fault))
            free(event.bytes)
        self.pump.event_count = 0
        return taken

    def start_wave(self) -> None:
        """Wake every rank of a lockstep group."""
        pthread_mutex_lock(&self.table.mutex)
        start_wave(&self.table, &self.pump.zmq)
        pthread_mutex_unlock(&self.table.mutex)

    def call(self, uint32_t rank, bytes payload, uint8_t type_byte=TYPE_UTILITY) -> bool:
        """Queue a message, by default a utility call, for a rank; an ABORT also for one in its handshake.

        False when the rank takes no messages now. Any thread may call it.
        """
        cdef size_t size = len(payload)
        cdef Rank *called = &self.table.ranks[rank]
        cdef uint8_t least = RANK_HELLO if type_byte == TYPE_ABORT else RANK_LIVE
        cdef bint taken
        self.usable()
        cdef Message *message = new_message(&self.pump.zmq, type_byte, size)
        if message == NULL:
            raise MemoryError
        memcpy(self.pump.zmq.msg_data(&message.payload), <const char *>payload, size)
        pthread_mutex_lock(&self.table.mutex)
        taken = (least <= called.state <= RANK_DRAINING and called.queue_count < QUEUE_FRAMES
                 and not self.table.closed)
        if taken:
            enqueue(&self.table, rank, message)
        pthread_mutex_unlock(&self.table.mutex)
        if not taken:
            self.pump.zmq.msg_close(&message.payload)
            free(message)
        return taken

    def stop(self) -> None:
        """Make `run` return False. Any thread may call it."""
        if self.forks != FORKS:
            return
        pthread_mutex_lock(&self.table.mutex)
        self.pump.stopped = 1
        self.table.closed = 1
        signal_fd(self.table.wake_fd)
        pthread_mutex_unlock(&self.table.mutex)

    def wake(self) -> None:
        """Make `run` return soon, for a command that Python has for the loop thread."""
        self.pump.rare = 1
        signal_fd(self.table.wake_fd)

    def close(self) -> None:
        """End every request with `Closed` and tell every outlet. The pump must have stopped."""
        cdef uint32_t i
        if self.forks != FORKS:
            return
        pthread_mutex_lock(&self.table.mutex)
        self.table.closed = 1
        for i in range(self.table.rank_count):
            end_all(&self.table, i, CAUSE_CLOSED, 0)
        signal_outlets(&self.table)
        pthread_mutex_unlock(&self.table.mutex)
        for reference in list(self.outlets.values()):   # one that has no stream is waited for, too
            outlet = reference()
            if outlet is not None:
                outlet.rouse()
        for _, outlet in list(self.loop_outlets.values()):
            outlet.part()
        self.loop_outlets.clear()

    # ------------------------------------------------------------ for everybody

    def snapshot(self, in_flight, load) -> None:
        """Fill two arrays of one element per rank: int64 in-flight, and the structured load of RANK_DTYPE."""
        cdef uint32_t i
        cdef Rank copy
        self.usable()
        for i in range(self.table.rank_count):
            pthread_mutex_lock(&self.table.mutex)
            copy = self.table.ranks[i]
            pthread_mutex_unlock(&self.table.mutex)
            in_flight[i] = copy.in_flight
            load[i] = (copy.running, copy.waiting, copy.kv_usage, bool(copy.reported))

    @property
    def live(self) -> int:
        """Requests in flight, over all ranks."""
        return self.table.live_count

    @property
    def slots(self) -> tuple:
        """(allocated, free, live, ended but not taken) slots: they add up, and a leak shows here."""
        cdef uint32_t i, unused = 0, live = 0, ended = 0
        self.usable()
        pthread_mutex_lock(&self.table.mutex)
        for i in range(self.table.slot_count):
            unused += slot_at(&self.table, i).state == SLOT_FREE
            live += slot_at(&self.table, i).state == SLOT_LIVE
            ended += slot_at(&self.table, i).state == SLOT_ENDED
        pthread_mutex_unlock(&self.table.mutex)
        return self.table.slot_count, unused, live, ended

    @property
    def epoch(self) -> int:
        return self.table.epoch

    @property
    def events_lost(self) -> int:
        return self.pump.events_lost

    def in_flight(self, uint32_t rank) -> int:
        """Requests that a rank holds."""
        return self.table.ranks[rank].in_flight

    def counters(self) -> dict:
        """Totals since the group's start: name -> one int per rank."""
        cdef uint32_t i
        cdef RankCounters count
        names = (
            "frames", "rows", "tokens", "undecodable", "extra_parts", "late", "foreign", "misattributed", "requests",
            "aborts", "unsent", "overloaded", "finished", "aborted", "dropped", "died", "deadline", "closed", "lost",
            "forgotten",
        )
        table = {name: [] for name in names}
        self.usable()
        for i in range(self.table.rank_count):
            pthread_mutex_lock(&self.table.mutex)
            count = self.table.ranks[i].count
            pthread_mutex_unlock(&self.table.mutex)
            values = (
                count.frames, count.rows, count.tokens, count.undecodable, count.extra_parts, count.late,
                count.foreign, count.misattributed, count.requests, count.aborts, count.unsent, count.overloaded,
                count.ended[1], count.ended[2], count.ended[3], count.ended[4], count.ended[5], count.ended[6],
                count.ended[7], count.ended[8],
            )
            for name, value in zip(names, values):
                table[name].append(value)
        return table

    # ------------------------------------------------------------ taking

    cdef Scratch borrow(self) noexcept:
        cdef Scratch scratch = self.spare
        memset(&self.spare, 0, sizeof(Scratch))
        scratch.count = scratch.token_count = 0
        return scratch

    cdef void give_back(self, Scratch *scratch) noexcept:
        if self.spare.taken == NULL and scratch.token_capacity < 65536:
            self.spare = scratch[0]
        else:
            scratch_free(scratch)
