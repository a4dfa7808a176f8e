"""Where outputs reach Python: `Output`, the `Record` a slot owns, and the `Outlet` that many slots share.

An outlet has a ready list and one descriptor; the pump puts slots on the list and writes the descriptor once. What is
taken is copied to C scratch with the mutex held and becomes Python objects after it.
"""

import asyncio
import select
import weakref
from asyncio import InvalidStateError, _get_running_loop

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.long cimport PyLong_FromUnsignedLong
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport free
from libc.string cimport memcpy
from posix.unistd cimport close

cimport cython

from smg._delivery cimport Scratch, Taken, take_slot
from smg._fastpath cimport Core
from smg._frame cimport FINISH_NONE, FINISH_OTHER, STOP_ID, STOP_TEXT
from smg._pump cimport monotonic
from smg._table cimport (
    CAUSE_ABORTED, CAUSE_CLOSED, CAUSE_DEADLINE, CAUSE_DIED, CAUSE_DROPPED, CAUSE_FINISHED, CAUSE_FORGOTTEN,
    CAUSE_LOST, CAUSE_NONE, NIL, Slot, Table, clear_fd, end_here, find, forget_outlet, free_slot, pthread_mutex_lock,
    pthread_mutex_unlock, signal_fd, slot_at, unlink_ready,
)

from smg._fastpath import DEATHS, wake_fds
from smg.errors import Aborted, Closed, DeadlineExceeded, RankDied, StreamError

# ---------------------------------------------------------------- outputs

FINISH_REASONS = (None, "stop", "length", "abort", "error", "repetition")


@cython.final
@cython.no_gc
@cython.freelist(1024)
cdef class Output:
    """What one request got since the last output: `token_ids` are new ones, the counts are totals.

    `finish_reason` is None while the request runs; "stop", "length", "abort", "error", "repetition", or the engine's
    own word. `stop_reason` is the matched stop token id or text where the engine says so. `rank` is the index of the
    rank that made it.
    """

    @property
    def token_ids(self) -> list:
        cdef uint32_t i
        cdef list made
        if self.token_list is None:
            made = PyList_New(self.token_count)
            for i in range(self.token_count):
                token = PyLong_FromUnsignedLong(self.tokens[i])
                Py_INCREF(token)
                PyList_SET_ITEM(made, i, token)
            self.token_list = made
        return self.token_list

    @property
    def finish_reason(self):
        return self.reason if self.finish == FINISH_OTHER else FINISH_REASONS[self.finish]

    @property
    def logprobs(self):
        """None when the engine sent none, else a (token_id, logprob, top) per token, top a list of pairs."""
        if self.cold is None:
            return None
        decode, top, data = self.cold
        return decode(data, top)

    def __repr__(self):
        return (
            f"Output(token_ids={self.token_ids}, finish_reason={self.finish_reason!r}, rank={self.rank}, "
            f"prompt_tokens={self.prompt_tokens}, completion_tokens={self.completion_tokens})"
        )


cdef Output make_output(const Taken *taken, const uint32_t *tokens, Record record):
    cdef Output output = Output.__new__(Output)
    cdef size_t size = taken.token_count * sizeof(uint32_t)
    output.tokens = output.few
    if size > sizeof(output.few):
        output.many = PyBytes_FromStringAndSize(NULL, size)
        output.tokens = <uint32_t *>PyBytes_AS_STRING(output.many)
    memcpy(output.tokens, tokens, size)
    output.token_count = taken.token_count
    output.finish = taken.finish if taken.cause == CAUSE_FINISHED else FINISH_NONE
    output.rank = taken.rank
    output.prompt_tokens = taken.prompt_tokens
    output.completion_tokens = taken.completion_tokens
    output.cached_tokens = taken.cached_tokens
    if output.finish == FINISH_OTHER:
        output.reason = (<const char *>taken.reason).decode("utf-8", "replace")
    elif taken.stop_kind == STOP_TEXT:
        output.stop_reason = (<const char *>taken.reason).decode("utf-8", "replace")
    if taken.stop_kind == STOP_ID:
        output.stop_reason = taken.stop_id
    if taken.cold != NULL:
        output.cold = record.core.decode_cold, record.logprobs, <bytes>taken.cold[:taken.cold_size]
    return output


# ---------------------------------------------------------------- records

@cython.final
cdef class Record:
    """What a slot owns on the Python side. No handle hangs on it, except a stream of an explicit outlet."""

    cdef void release(self):
        """Free the slot of a consumer that went away, with an ABORT if the engine still holds the request."""
        cdef Core core = self.core
        cdef void *freed = NULL
        if self.ended:
            return
        self.ended = True
        if core.forked():
            return
        pthread_mutex_lock(&core.table.mutex)
        if find(&core.table, self.index, self.generation) != NULL:
            end_here(&core.table, &core.pump.zmq, self.index, CAUSE_DROPPED)
            freed = free_slot(&core.table, self.index)
        pthread_mutex_unlock(&core.table.mutex)
        if freed != NULL:
            Py_DECREF(<object>freed)

    cdef int take(self) except -1:
        """Move what the slot has into the record. 0 = nothing yet: the next output wakes the outlet."""
        cdef Core core = self.core
        cdef Scratch scratch
        cdef Slot *slot
        cdef int got = 0
        core.usable()
        scratch = core.borrow()
        pthread_mutex_lock(&core.table.mutex)
        slot = find(&core.table, self.index, self.generation)
        if slot != NULL:
            got = take_slot(&core.table, self.index, &scratch)
            slot.wanted = got == 0
        pthread_mutex_unlock(&core.table.mutex)
        try:
            if slot == NULL:
                self.ended = True
                self.cause = CAUSE_CLOSED
                return 1
            if got < 0:
                raise MemoryError
            if got:
                if scratch.taken.freed:
                    Py_DECREF(self)   # the slot's reference
                self.settle(scratch.taken, scratch.tokens)
            return got
        finally:
            core.give_back(&scratch)

    cdef void settle(self, const Taken *taken, const uint32_t *tokens):
        """Keep what was taken: `output`, and `cause` when the engine did not end it."""
        if not self.ended:   # else a finaliser dropped its stream since the take
            try:
                if taken.cause == CAUSE_FINISHED or taken.token_count:
                    self.output = make_output(taken, tokens + taken.first_token, self)
                self.ended = taken.freed
                self.cause = taken.cause if taken.freed and taken.cause != CAUSE_FINISHED else CAUSE_NONE
                self.detail = taken.finish
            except MemoryError:
                self.release()
                self.cause = CAUSE_LOST
        free(taken.cold)

    cdef object next_output(self):
        """The next output, an exception instance to raise, or None when there is nothing yet."""
        if self.output is None and self.cause == CAUSE_NONE:
            if self.ended:
                return StopAsyncIteration()
            if not self.take():
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
        if cause == CAUSE_FORGOTTEN:
            return StreamError(f"rank {self.rank} is done with request {self.name()}, but sent no last output for it")
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
            record.settle(&scratch.taken[i], scratch.tokens)
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
            if waiter is not None:
                try:
                    waiter.set_result(None)
                except InvalidStateError:   # its wait was cancelled
                    pass
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

    def rouse(self) -> None:
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
        if not self.opened or self.data.closed or self.core.forked():
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
                    end_here(table, &self.core.pump.zmq, i, CAUSE_DROPPED)
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


def new_outlet(Core core not None) -> Outlet:
    """An outlet of the caller's own, for streams that are submitted with it."""
    core.usable()
    cdef Outlet made = Outlet.__new__(Outlet, core)
    made.data.eager = 1
    outlets, mine = core.outlets, id(made)
    outlets[mine] = weakref.ref(made, lambda _: outlets.pop(mine, None))
    return made


cdef Outlet loop_outlet(Core core, object loop):
    """The outlet of a loop's own streams, made at the loop's first submit."""
    cdef Outlet outlet
    entry = core.loop_outlets.get(id(loop))
    if entry is not None and entry[0]() is loop and not (<Outlet>entry[1]).data.closed:
        return <Outlet>entry[1]
    for key, (reference, old) in list(core.loop_outlets.items()):
        gone = reference()
        if gone is None or gone.is_closed():
            core.loop_outlets.pop(key, None)
            (<Outlet>old).close()
    outlet = Outlet.__new__(Outlet, core)
    outlets, mine = core.loop_outlets, id(loop)
    outlet.loop = weakref.ref(loop, lambda _: outlets.pop(mine, None))
    loop.add_reader(outlet.data.read_fd, outlet.drain)
    core.loop_outlets[id(loop)] = (outlet.loop, outlet)
    return outlet
