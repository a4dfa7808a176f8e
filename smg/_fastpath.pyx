"""Frames to slots, counters, rank choice, the pump; and the handles through which Python sees a slot.

The state of a group lives in C structs under one mutex (`_table.pxd`) and is moved by one thread without the GIL
(`_pump.pxd`). This module is where Python meets it: `Core` for the loop thread and for `submit`, `Outlet`, `Stream`
and `Output` for consumers. Nothing here creates, touches or releases a Python object with the mutex held.
"""

import asyncio
import ctypes
import os
import select
import weakref

import zmq.backend.cython._zmq as _pyzmq

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset
from posix.unistd cimport close, read

cimport cython

from smg._batch cimport batch_free, batch_init, fault_parts
from smg._frame cimport FINISH_NONE, FINISH_OTHER
from smg._pump cimport (
    EVENT_DEAD, EVENT_INPUT, EVENT_MISATTRIBUTED, EVENT_RESUMED, EVENT_STALLED, EVENT_UNDECODABLE, OUTCOME_STOPPED,
    ROLE_INPUT, ROLE_MONITOR, ROLE_OUTPUT, ROLE_RARE, ROLE_WAKE, Connection, Event, drop_queue,
    handle_frame, monotonic, read_monitor, read_turn, run, settle, smg_epoll_open, tag_of, unwatch, watch,
)
from smg._table cimport (
    CAUSE_ABORTED, CAUSE_CLOSED, CAUSE_DEADLINE, CAUSE_DIED, CAUSE_DROPPED, CAUSE_FINISHED, CAUSE_LOST, CAUSE_NONE,
    NIL, RANK_ABSENT, REFUSED_CLOSED, REFUSED_INVALID_RANK, REFUSED_NO_MEMORY, REFUSED_NO_RANK, REFUSED_OVERLOADED,
    SLOT_ENDED, SLOT_FREE, SLOT_LIVE, SUFFIX_MAX, TYPE_ADD, WIRE_ID_SIZE, Message, Rank, RankCounters, Slot, choose,
    end_all, end_here, enqueue, find, forget_outlet, free_slot, mark_ready, pthread_mutex_destroy, pthread_mutex_init,
    pthread_mutex_lock, pthread_mutex_unlock, reserve, scratch_free, signal_fd, signal_outlets, slot_at, take_slot,
    unlink_ready, wake_pump, write_wire_id,
)
from smg._tokenspeed cimport decode_slim
from smg._zmq cimport Zmq

from asyncio import _get_running_loop
from smg.errors import (
    Aborted, Closed, DeadlineExceeded, Error, ForkedError, InvalidRank, NoRank, Overloaded, RankDied, StreamError,
)

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


cdef void clear_fd(int fd) noexcept nogil:
    cdef char waste[512]
    while read(fd, waste, sizeof(waste)) == <ssize_t>sizeof(waste):
        pass


# ---------------------------------------------------------------- outputs

FINISH_REASONS = (None, "stop", "length", "abort", "error", "repetition")
DEATHS = (
    "was closed",
    "went away (its connection closed)",
    "reported that its engine is dead",
    "cannot be reached (its input connection is gone)",
    "sent three undecodable frames in a row",
    "has a broken socket",
)


class EventKind:
    """The kinds of `Core.events`."""

    INPUT = EVENT_INPUT                  # detail = parts of the message, -1 = not the rank's identity
    DEAD = EVENT_DEAD                    # detail = index into DEATHS
    STALLED = EVENT_STALLED
    RESUMED = EVENT_RESUMED
    UNDECODABLE = EVENT_UNDECODABLE      # detail = bytes of the frame
    MISATTRIBUTED = EVENT_MISATTRIBUTED  # detail = the index that was claimed


RANK_DTYPE = [("running", "i8"), ("waiting", "i8"), ("kv_usage", "f8"), ("reported", "?")]


@cython.final
@cython.no_gc
@cython.freelist(1024)
cdef class Output:
    """What one request got since the last output: `token_ids` are new ones, the counts are totals.

    `finish_reason` is None while the request runs; "stop", "length", "abort", "error", "repetition", or the engine's
    own word. `stop_reason` is the matched stop token id or text where the engine says so. `rank` is the index of the
    rank that made it.
    """

    def __cinit__(self):
        self.tokens = self.few

    def __dealloc__(self):
        if self.tokens != self.few:
            free(self.tokens)

    @property
    def token_ids(self) -> list:
        cdef uint32_t i
        if self.token_list is None:
            self.token_list = [self.tokens[i] for i in range(self.token_count)]
        return self.token_list

    @property
    def finish_reason(self):
        return self.reason if self.finish == FINISH_OTHER else FINISH_REASONS[self.finish]

    @property
    def logprobs(self):
        """None when the engine sent none, else a (token_id, logprob, top) per token, top a list of pairs."""
        return None if self.cold is None else self.decode_cold(self.cold)

    def __repr__(self):
        return (
            f"Output(token_ids={self.token_ids}, finish_reason={self.finish_reason!r}, rank={self.rank}, "
            f"prompt_tokens={self.prompt_tokens}, completion_tokens={self.completion_tokens})"
        )


cdef Output make_output(const Taken *taken, const uint32_t *tokens, object decode_cold):
    cdef Output output = Output.__new__(Output)
    if taken.token_count > 4:
        output.tokens = <uint32_t *>malloc(taken.token_count * sizeof(uint32_t))
        if output.tokens == NULL:
            output.tokens = output.few
            raise MemoryError
    memcpy(output.tokens, tokens, taken.token_count * sizeof(uint32_t))
    output.token_count = taken.token_count
    output.finish = taken.finish if taken.cause == CAUSE_FINISHED else FINISH_NONE
    output.rank = taken.rank
    output.prompt_tokens = taken.prompt_tokens
    output.completion_tokens = taken.completion_tokens
    output.cached_tokens = taken.cached_tokens
    if output.finish == FINISH_OTHER:
        output.reason = (<const char *>taken.reason).decode("utf-8", "replace")
    if taken.cold != NULL:
        output.cold = taken.cold[:taken.cold_size]
        output.decode_cold = decode_cold
    return output


# ---------------------------------------------------------------- the core

cdef class Core:
    """One group's slot table and pump.

    `ranks`: how many. `decode_cold`: what turns an output's logprob bytes into a list. `stall_timeout` in seconds,
    0 = never. `max_inflight` per rank, 0 = unbounded. `use_epoll=False` waits with poll(2), as systems without
    epoll do.
    """

    def __cinit__(self, uint32_t ranks, *, object decode_cold, double stall_timeout, int64_t max_inflight,
                  bint use_epoll=True):
        cdef uint32_t i
        self.forks = FORKS
        self.wake_read = -1
        self.table.wake_fd = self.pump.wake_fd = self.pump.epoll_fd = -1
        self.decode_cold = decode_cold
        self.loop_outlets = {}
        self.outlets = weakref.WeakSet()
        pthread_mutex_init(&self.table.mutex, NULL)
        self.table.epoch = <uint32_t>int.from_bytes(os.urandom(4), "little")
        self.table.rank_count = ranks
        self.table.free_head = self.table.free_tail = self.table.to_flush = NIL
        self.table.max_inflight = max_inflight
        self.table.ranks = <Rank *>calloc(ranks, sizeof(Rank))
        self.pump.table = &self.table
        self.pump.zmq = LIBZMQ
        self.pump.decode = decode_slim
        batch_init(&self.pump.batch)
        self.pump.connection_count = ranks
        self.pump.connections = <Connection *>calloc(ranks, sizeof(Connection))
        self.pump.event_capacity = 64 + 4 * ranks
        self.pump.events = <Event *>calloc(self.pump.event_capacity, sizeof(Event))
        if self.table.ranks == NULL or self.pump.connections == NULL or self.pump.events == NULL:
            raise MemoryError
        for i in range(ranks):
            self.table.ranks[i].live_head = self.table.ranks[i].next_flush = NIL
        self.pump.stall_timeout = stall_timeout
        self.wake_read, self.table.wake_fd = wake_fds()
        self.pump.wake_fd = self.wake_read
        if use_epoll:
            self.pump.epoll_fd = smg_epoll_open()
        if watch(&self.pump, self.wake_read, tag_of(ROLE_WAKE, 0)) != 0:
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
        free(self.pump.polled)
        free(self.pump.poll_tags)
        batch_free(&self.pump.batch)
        scratch_free(&self.spare)
        for fd in (self.wake_read, self.table.wake_fd, self.pump.epoll_fd):
            if fd >= 0:
                close(fd)

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
        state.kv_usage = 0
        pthread_mutex_unlock(&self.table.mutex)
        if (watch(&self.pump, connection.output_fd, tag_of(ROLE_OUTPUT, rank)) != 0 or
                watch(&self.pump, connection.input_fd, tag_of(ROLE_INPUT, rank)) != 0 or
                watch(&self.pump, connection.monitor_fd, tag_of(ROLE_MONITOR, rank)) != 0):
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
        unwatch(&self.pump, connection.input_fd)
        unwatch(&self.pump, connection.output_fd)
        unwatch(&self.pump, connection.monitor_fd)
        self.pump.unread -= connection.unread
        memset(connection, 0, sizeof(Connection))
        pthread_mutex_lock(&self.table.mutex)
        drop_queue(&self.pump, &self.table.ranks[rank])
        pthread_mutex_unlock(&self.table.mutex)

    def watch_rare(self, int fd) -> None:
        """Return from `run` when `fd` is readable: the descriptor of a socket that Python serves."""
        if watch(&self.pump, fd, tag_of(ROLE_RARE, 0)) != 0:
            raise MemoryError

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

    def feed(self, uint32_t rank, bytes frame, uint32_t times=1) -> None:
        """Decode and apply a frame as if the rank had sent it: for tests and measurements without sockets."""
        cdef const uint8_t *data = <const uint8_t *><const char *>frame
        cdef size_t size = len(frame)
        cdef uint32_t i
        with nogil:
            for i in range(times):
                handle_frame(&self.pump, rank, data, size, monotonic())

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
        for outlet in list(self.outlets):   # one that has no stream is waited for, too
            (<Outlet>outlet).rouse()
        for _, outlet in list(self.loop_outlets.values()):
            (<Outlet>outlet).part()
        self.loop_outlets.clear()

    # ------------------------------------------------------------ for everybody

    def submit(self, bytes payload, uint32_t id_offset, *, request_id=None, int rank=-1, double deadline=0,
               Outlet outlet=None, str suffix="") -> Stream:
        """Choose a rank, reserve a slot and queue one ADD, in one critical section.

        `payload` has a wire id at `id_offset`, which is overwritten with the slot's own. `rank` < 0 = the least
        loaded. `deadline` in seconds from now, 0 = none. Raises NoRank, InvalidRank, Overloaded, Closed.
        """
        cdef size_t size = len(payload)
        cdef uint8_t *bytes_
        cdef uint32_t index = NIL
        cdef int chosen
        cdef double now = monotonic()
        cdef Record record
        cdef Stream stream
        cdef Slot *slot
        cdef bytes tail = suffix.encode("ascii")
        self.usable()
        if <size_t>id_offset + WIRE_ID_SIZE + <size_t>len(tail) > size or len(tail) > SUFFIX_MAX:
            raise ValueError("the payload has no room for a wire id at this offset")
        if outlet is not None and (outlet.core is not self or outlet.data.closed):
            raise Closed("the outlet is closed, or belongs to another group")
        cdef bint explicit = outlet is not None
        loop = None if explicit else _get_running_loop()
        if loop is not None:
            outlet = self.loop_outlet(loop)
        record = Record.__new__(Record)
        record.core = self
        stream = Stream.__new__(Stream)
        stream.record = record
        record.ended = True   # until it has a slot
        record.request_id = request_id
        record.attached = outlet is not None
        if loop is not None:
            record.loop = outlet.loop
        if explicit:
            record.stream = stream
        cdef Message *message = <Message *>malloc(sizeof(Message))
        if message == NULL or LIBZMQ.msg_init_size(&message.payload, size) != 0:
            free(message)
            raise MemoryError
        bytes_ = <uint8_t *>LIBZMQ.msg_data(&message.payload)
        memcpy(bytes_, <const char *>payload, size)
        message.type_byte = TYPE_ADD
        message.size = size
        cdef const char *tail_bytes = tail
        cdef uint8_t tail_size = <uint8_t>len(tail)
        Py_INCREF(record)
        pthread_mutex_lock(&self.table.mutex)
        chosen = choose(&self.table, rank, size)
        if outlet is not None and outlet.data.closed:   # by a finaliser, since it was looked at above
            chosen = REFUSED_CLOSED
        if chosen >= 0:
            index = reserve(&self.table, chosen, now, now + deadline if deadline > 0 else 0)
            if index == NIL:
                chosen = REFUSED_NO_MEMORY
        if chosen >= 0:
            slot = slot_at(&self.table, index)
            slot.record = <void *>record
            if outlet is not None:
                slot.outlet = &outlet.data
                slot.wanted = outlet.data.eager
                outlet.data.slot_count += 1
            memcpy(slot.suffix, tail_bytes, tail_size)
            slot.suffix_size = tail_size
            write_wire_id(&self.table, index, <char *>bytes_ + id_offset)
            message.slot = record.index = index
            message.generation = record.generation = slot.generation
            record.rank = chosen
            record.ended = False
            enqueue(&self.table, <uint32_t>chosen, message)
        pthread_mutex_unlock(&self.table.mutex)
        if chosen < 0:
            Py_DECREF(record)
            LIBZMQ.msg_close(&message.payload)
            free(message)
            record.stream = None
            raise self.refusal(chosen, rank)
        return stream

    def refusal(self, int refused, int rank):
        states = "; ask the group's `ranks` for their states"
        if refused == REFUSED_CLOSED:
            return Closed("the group is closed")
        if refused == REFUSED_NO_RANK:
            return NoRank("no rank is live" + states)
        if refused == REFUSED_INVALID_RANK:
            return InvalidRank(f"rank {rank} is not one of the {self.table.rank_count} ranks, or not live" + states)
        if refused == REFUSED_OVERLOADED:
            return Overloaded("every live rank is at its in-flight or send-queue bound; retry later")
        return MemoryError("no memory for another request")

    def outlet(self) -> Outlet:
        """An outlet of the caller's own, for streams that are submitted with it."""
        self.usable()
        cdef Outlet made = Outlet.__new__(Outlet, self)
        made.data.eager = 1
        self.outlets.add(made)
        return made

    cdef Outlet loop_outlet(self, object loop):
        cdef Outlet outlet
        entry = self.loop_outlets.get(id(loop))
        if entry is not None and entry[0]() is loop and not (<Outlet>entry[1]).data.closed:
            return <Outlet>entry[1]
        for key, (reference, old) in list(self.loop_outlets.items()):
            gone = reference()
            if gone is None or gone.is_closed():
                self.loop_outlets.pop(key, None)
                (<Outlet>old).close()
        outlet = Outlet.__new__(Outlet, self)
        outlets, mine = self.loop_outlets, id(loop)
        outlet.loop = weakref.ref(loop, lambda _: outlets.pop(mine, None))
        loop.add_reader(outlet.data.read_fd, outlet.drain)
        self.loop_outlets[id(loop)] = (outlet.loop, outlet)
        return outlet

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
                count.ended[7],
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

    cdef void outcome(self, Record record, const Taken *taken, const uint32_t *tokens):
        """Puts what was taken into the record: `output`, and `cause` when the engine did not end it."""
        if not record.ended:   # else a finaliser dropped its stream since the take
            try:
                if taken.cause == CAUSE_FINISHED or taken.token_count:
                    record.output = make_output(taken, tokens + taken.first_token, self.decode_cold)
                record.ended = taken.freed
                record.cause = taken.cause if taken.freed and taken.cause != CAUSE_FINISHED else CAUSE_NONE
                record.detail = taken.finish
            except MemoryError:
                record.release()
                record.cause = CAUSE_LOST
        free(taken.cold)

    cdef int take_into(self, Record record) except -1:
        """Move what the slot has into the record. 0 = nothing yet: the next output wakes the outlet."""
        cdef Scratch scratch
        cdef Slot *slot
        cdef int got = 0
        self.usable()
        scratch = self.borrow()
        pthread_mutex_lock(&self.table.mutex)
        slot = find(&self.table, record.index, record.generation)
        if slot != NULL:
            got = take_slot(&self.table, record.index, &scratch)
            slot.wanted = got == 0
        pthread_mutex_unlock(&self.table.mutex)
        try:
            if slot == NULL:
                record.ended = True
                record.cause = CAUSE_CLOSED
                return 1
            if got < 0:
                raise MemoryError
            if got:
                if scratch.taken.freed:
                    Py_DECREF(record)   # the slot's reference
                self.outcome(record, scratch.taken, scratch.tokens)
            return got
        finally:
            self.give_back(&scratch)

    cdef void drop(self, uint32_t index, uint32_t generation):
        """Free a slot whose consumer went away, with an ABORT if the engine still holds the request."""
        cdef void *record = NULL
        if self.forks != FORKS:
            return
        pthread_mutex_lock(&self.table.mutex)
        if find(&self.table, index, generation) != NULL:
            end_here(&self.table, &LIBZMQ, index, CAUSE_DROPPED)
            record = free_slot(&self.table, index)
        pthread_mutex_unlock(&self.table.mutex)
        if record != NULL:
            Py_DECREF(<object>record)


# ---------------------------------------------------------------- outlets

cdef class Outlet:
    """Where the outputs of some streams become ready: take them all at once, or wait until there are some.

    An outlet made with `group.outlet()` keeps the streams that are submitted with it until their last entry was
    taken; closing or dropping it aborts those that still run.
    """

    def __cinit__(self, Core core not None):
        self.data.ready_head = self.data.ready_tail = NIL
        self.core = core
        self.data.read_fd, self.data.write_fd = wake_fds()
        self.opened = True

    def __del__(self):
        self.close()

    def __dealloc__(self):
        if self.opened:   # in a child of fork(), or its loop never came to `leave_loop`
            close(self.data.read_fd)
            close(self.data.write_fd)

    def fileno(self) -> int:
        """A descriptor that is readable when something is ready; -1 once closed.

        `take` clears it; never read it yourself.
        """
        return self.data.read_fd

    def take(self) -> list:
        """Everything that became ready since the last take, as (stream, output) pairs.

        `output` is an `Output`, or the `StreamError` that ended the stream.
        """
        cdef Record record
        cdef list entries = []
        if self.data.closed:
            raise Closed("the outlet is closed")
        for record in self.collect():
            stream = record.stream
            if stream is None:
                continue   # aborted by a finaliser since
            if record.output is not None:
                entries.append((stream, record.output))
                record.output = None
            if record.cause != CAUSE_NONE:
                entries.append((stream, record.failure()))
            if record.ended:
                record.stream = None
        return entries

    cdef list collect(self):
        """Take all ready slots; returns their records, which hold what was taken."""
        cdef Scratch scratch
        cdef Table *table = &self.core.table
        cdef uint32_t index, i
        cdef Record record
        cdef list records = []
        self.core.usable()
        scratch = self.core.borrow()
        clear_fd(self.data.read_fd)
        pthread_mutex_lock(&table.mutex)
        self.data.signalled = 0
        while self.data.ready_head != NIL:
            index = self.data.ready_head
            slot_at(table, index).wanted = self.data.eager
            if take_slot(table, index, &scratch) <= 0:
                break   # no memory: what is left stays ready
        if self.data.ready_count:
            self.data.signalled = 1
            signal_fd(self.data.write_fd)
        pthread_mutex_unlock(&table.mutex)
        # References first: from the next Python object on, anything may free a slot that is still in the scratch.
        for i in range(scratch.count):
            if not scratch.taken[i].freed:
                Py_INCREF(<object>scratch.taken[i].record)
        for i in range(scratch.count):
            record = <Record>scratch.taken[i].record
            Py_DECREF(record)
            self.core.outcome(record, &scratch.taken[i], scratch.tokens)
            records.append(record)
        self.core.give_back(&scratch)
        return records

    def drain(self) -> None:
        """The reader callback of a loop's own outlet: gives each waiting consumer its output."""
        cdef Record record
        if self.data.closed:
            return
        for record in self.collect():
            waiter, record.waiter = record.waiter, None
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        if self.core.table.closed and not self.data.slot_count:
            self.close()

    def part(self) -> None:
        """The group is closed: leave the loop. From the loop's own thread at once, else from its next callback."""
        loop = self.loop()
        if loop is None or loop.is_closed():
            self.close()
        elif _get_running_loop() is loop:
            self.leave()
        else:
            try:
                loop.call_soon_threadsafe(self.leave)
            except RuntimeError:   # closed in between
                self.close()

    def leave(self) -> None:
        self.drain()
        self.detach_slots()
        self.close()

    cdef bint finished(self):
        """No entry will come any more."""
        return self.data.closed or (self.core.table.closed and not self.data.slot_count)

    async def wait(self) -> None:
        """Return once something is ready to take. Raises Closed when nothing can come any more."""
        loop = asyncio.get_running_loop()
        self.core.usable()
        if self.loop is not None:
            raise RuntimeError("a loop's own outlet is not waited for")
        while not self.data.ready_count:
            if self.finished():
                raise Closed("the outlet or its group is closed")
            if self.waiter is not None and not self.waiter.done():
                raise RuntimeError("somebody else waits for this outlet")
            if self.waiter_loop is None or self.waiter_loop() is not loop:
                self.leave_waiter_loop()
                loop.add_reader(self.data.read_fd, wake_waiter, weakref.ref(self))
                self.waiter_loop = weakref.ref(loop)
            self.waiter = loop.create_future()
            await self.waiter
            self.waiter = None

    cdef void rouse(self):
        """Wake who waits, though nothing is ready."""
        pthread_mutex_lock(&self.core.table.mutex)
        if not self.data.closed:
            signal_fd(self.data.write_fd)
        pthread_mutex_unlock(&self.core.table.mutex)

    cdef void clear(self):
        """Clear the descriptor without taking. While something is ready the pump stays quiet."""
        if self.data.closed:
            return
        clear_fd(self.data.read_fd)
        pthread_mutex_lock(&self.core.table.mutex)
        self.data.signalled = self.data.ready_count != 0
        pthread_mutex_unlock(&self.core.table.mutex)

    def on_readable(self) -> None:
        self.clear()
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def leave_waiter_loop(self) -> None:
        loop = None if self.waiter_loop is None else self.waiter_loop()
        self.waiter_loop = None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self.data.read_fd)

    def wait_blocking(self, timeout=None) -> bool:
        """Block until something is ready to take; False when `timeout` seconds passed first. Ctrl-C works.

        Raises Closed when nothing can come any more.
        """
        self.core.usable()
        if self.poller is None:
            self.poller = select.poll()
            self.poller.register(self.data.read_fd, select.POLLIN)
        until = None if timeout is None else monotonic() + timeout
        while not self.data.ready_count:
            if self.finished():
                raise Closed("the outlet or its group is closed")
            if self.polling:
                raise RuntimeError("somebody else waits for this outlet")
            left = None if until is None else max(0.0, until - monotonic())
            self.polling = True
            try:
                woken = self.poller.poll(None if left is None else left * 1000)
            finally:
                self.polling = False
                if self.data.closed:
                    self.close_descriptors()
            if woken and not self.data.ready_count:
                self.clear()
            if left == 0.0 and not self.data.ready_count:
                return False
        return True

    def close(self) -> None:
        """Abort the streams of this outlet that still run, and give its descriptors back. Idempotent.

        Any thread may call it. Who waits for the outlet gets Closed.
        """
        if not self.opened or self.data.closed or self.core.forks != FORKS:
            return
        self.release_slots()
        home = self.waiter_loop if self.loop is None else self.loop
        loop = None if home is None else home()
        if loop is None or loop.is_closed():
            self.close_descriptors()
        elif _get_running_loop() is loop:
            self.leave_loop(loop)
        else:
            try:
                loop.call_soon_threadsafe(self.leave_loop, loop)
            except RuntimeError:   # closed in between
                self.close_descriptors()

    def leave_loop(self, loop) -> None:
        if self.opened:
            loop.remove_reader(self.data.read_fd)
        self.close_descriptors()
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    cdef void close_descriptors(self):
        """Close what the pump writes to no more. A thread that blocks on it is woken, and does it instead."""
        if self.polling:
            signal_fd(self.data.write_fd)
        elif self.opened:
            self.opened = False
            close(self.data.read_fd)
            close(self.data.write_fd)
            self.data.read_fd = self.data.write_fd = -1

    cdef void release_slots(self):
        """Close the outlet for the pump and for submit, and free what is attached, running streams with an ABORT."""
        cdef Table *table = &self.core.table
        cdef uint32_t i = 0
        cdef void *freed
        pthread_mutex_lock(&table.mutex)
        self.data.closed = 1
        forget_outlet(table, &self.data)
        pthread_mutex_unlock(&table.mutex)
        while self.data.slot_count:
            freed = NULL
            pthread_mutex_lock(&table.mutex)
            while freed == NULL and i < table.slot_count:
                if slot_at(table, i).outlet == &self.data:
                    end_here(table, &LIBZMQ, i, CAUSE_DROPPED)
                    freed = free_slot(table, i)
                i += 1
            pthread_mutex_unlock(&table.mutex)
            if freed == NULL:
                break
            record = <Record>freed
            Py_DECREF(record)
            (<Record>record).ended = True
            (<Record>record).stream = None

    cdef void detach_slots(self):
        """Leave every slot to its stream, which takes what is in it without the outlet. All of them have ended."""
        cdef Table *table = &self.core.table
        cdef uint32_t i
        pthread_mutex_lock(&table.mutex)
        for i in range(table.slot_count):
            if slot_at(table, i).outlet == &self.data:
                unlink_ready(table, i)
                slot_at(table, i).outlet = NULL
                self.data.slot_count -= 1
        pthread_mutex_unlock(&table.mutex)


def wake_waiter(reference) -> None:
    """The reader callback of an awaited outlet. The loop holds it weakly, so that dropping the outlet closes it."""
    outlet = reference()
    if outlet is not None:
        outlet.on_readable()


# ---------------------------------------------------------------- streams

@cython.final
cdef class Record:
    """What a slot owns on the Python side. No handle hangs on it, except a stream of an explicit outlet."""

    cdef void release(self):
        if not self.ended:
            self.ended = True
            self.core.drop(self.index, self.generation)

    cdef object next_output(self):
        """The next output, an exception instance to raise, or None when there is nothing yet."""
        if self.output is None and self.cause == CAUSE_NONE:
            if self.ended:
                return StopAsyncIteration()
            if not self.core.take_into(self):
                return None
        if self.output is not None:
            output, self.output = self.output, None
            return output
        return self.failure()

    cdef object failure(self):
        """The error the stream ends with, since the engine did not end it. Told once."""
        cdef uint8_t cause = self.cause
        self.cause = CAUSE_NONE
        if cause == CAUSE_DIED:
            why = DEATHS[self.detail]
            return RankDied(f"rank {self.rank} {why} while it held request {self.name()}; resubmit it", self.rank)
        if cause == CAUSE_DEADLINE:
            return DeadlineExceeded(f"request {self.name()} passed its deadline and was aborted on rank {self.rank}")
        if cause == CAUSE_ABORTED:
            return Aborted(f"request {self.name()} was aborted")
        if cause == CAUSE_CLOSED:
            closed = "group" if self.core.table.closed else "outlet"
            return Closed(f"the {closed} was closed while request {self.name()} ran")
        return StreamError(f"request {self.name()} was ended: no memory for its output")

    cdef str name(self):
        if self.request_id is None:
            self.request_id = f"{self.core.table.epoch:08x}{self.index:08x}{self.generation:08x}"
        return self.request_id

    cdef int attach(self, Outlet outlet) except -1:
        """Give a stream that was submitted outside any loop to its first consumer."""
        cdef Slot *slot
        pthread_mutex_lock(&self.core.table.mutex)
        slot = find(&self.core.table, self.index, self.generation)
        if slot != NULL and slot.outlet == NULL:
            slot.outlet = &outlet.data
            outlet.data.slot_count += 1
        pthread_mutex_unlock(&self.core.table.mutex)
        self.attached = True
        return 0

    cdef int unclaimed(self) except -1:
        """Check that an iterator may be made; a stream has one."""
        self.core.usable()
        if self.claimed:
            raise RuntimeError("a stream can be iterated once")
        if self.attached and self.loop is None:
            raise RuntimeError("this stream belongs to an outlet: take its outputs there")
        return 0


@cython.final
cdef class Stream:
    """One request's outputs: `async for out in stream`, or `for out in stream.blocking()`.

    Leaving the loop early, or dropping the last reference, aborts the request. `data` is the caller's own.
    """

    cdef Record record
    cdef public object data
    cdef object __weakref__

    def __init__(self):
        raise TypeError("streams are made by submit()")

    def __del__(self):
        if self.record is not None:
            self.record.release()

    @property
    def request_id(self) -> str:
        """The caller's name for the request; where none was given, its id on the wire."""
        return self.record.name()

    @property
    def rank(self) -> int:
        """Index of the rank that holds the request."""
        return self.record.rank

    def abort(self) -> None:
        """End the request now. A consumer that waits gets `Aborted`; an outlet gets nothing more of it."""
        cdef Core core = self.record.core
        cdef Slot *slot
        cdef void *freed = NULL
        core.usable()
        pthread_mutex_lock(&core.table.mutex)
        slot = find(&core.table, self.record.index, self.record.generation)
        if slot != NULL:
            end_here(&core.table, &LIBZMQ, self.record.index, CAUSE_ABORTED)
            if self.record.stream is not None:
                freed = free_slot(&core.table, self.record.index)
            signal_outlets(&core.table)
        pthread_mutex_unlock(&core.table.mutex)
        if freed != NULL:
            Py_DECREF(<object>freed)
            self.record.ended = True
            self.record.stream = None

    def __aiter__(self):
        cdef StreamIterator iterator
        cdef Record record = self.record
        record.unclaimed()
        loop = asyncio.get_running_loop()
        if not record.attached:
            outlet = record.core.loop_outlet(loop)
            record.attach(outlet)
            record.loop = (<Outlet>outlet).loop
        elif record.loop() is not loop:
            raise RuntimeError("this stream belongs to another loop or thread: consume it where it was submitted")
        record.claimed = True
        iterator = StreamIterator.__new__(StreamIterator)
        iterator.stream = self
        iterator.step = Step.__new__(Step)
        iterator.step.record = record
        return iterator

    def blocking(self, timeout=None):
        """An iterator that blocks, up to `timeout` seconds per output (then TimeoutError; the stream goes on)."""
        cdef BlockingIterator iterator
        cdef Record record = self.record
        record.unclaimed()
        if record.attached:
            raise RuntimeError("this stream belongs to an event loop: use `async for` there")
        outlet = Outlet.__new__(Outlet, record.core)
        record.claimed = True
        iterator = BlockingIterator.__new__(BlockingIterator)
        iterator.stream = self
        iterator.timeout = timeout
        iterator.outlet = outlet
        record.attach(outlet)
        return iterator


@cython.final
cdef class StreamIterator:
    """The one-use iterator of a stream. When it goes before the terminal output, the request is aborted."""

    cdef Stream stream
    cdef Step step

    def __del__(self):
        self.stream.record.release()

    def __aiter__(self):
        return self

    def __anext__(self):
        return self.step


@cython.final
cdef class Step:
    """The awaitable of `__anext__`: one per iterator, since one output is awaited at a time.

    What arrives is kept in the record until this object is resumed, so a wait that is cancelled loses nothing. It
    waits on a plain future of the loop.
    """

    cdef Record record

    def __await__(self):
        return self

    def __iter__(self):
        return self

    def send(self, value):
        return self.__next__()

    def throw(self, kind, value=None, trace=None):
        """What cancels the wait goes through to who waits."""
        if value is None:
            value = kind() if isinstance(kind, type) else kind
        raise value

    def close(self):
        pass

    def __next__(self):
        cdef Record record = self.record
        got = record.next_output()
        if got is not None:
            record.waiter = None
            if isinstance(got, Output):
                raise StopIteration(got)
            raise got
        if record.waiter is not None and not record.waiter.done():
            raise RuntimeError("this stream's next output is already awaited")
        loop = record.loop()
        if _get_running_loop() is not loop:
            raise RuntimeError("this stream belongs to another loop")
        record.waiter = loop.create_future()
        record.waiter._asyncio_future_blocking = True
        return record.waiter


@cython.final
cdef class BlockingIterator:
    """Blocks in poll(2) without the GIL, so that other threads run and Ctrl-C works."""

    cdef Stream stream
    cdef Outlet outlet
    cdef object timeout

    def __del__(self):
        self.stream.record.release()
        self.outlet.close()

    def __iter__(self):
        return self

    def __next__(self):
        cdef Record record = self.stream.record
        while True:
            got = record.next_output()
            if got is not None:
                break
            if not self.outlet.wait_blocking(self.timeout):
                raise TimeoutError(f"no output of request {record.name()} within {self.timeout} s")
            self.outlet.clear()
        if isinstance(got, Output):
            return got
        if isinstance(got, StopAsyncIteration):
            raise StopIteration
        raise got
