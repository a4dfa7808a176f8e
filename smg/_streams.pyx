"""Requests as a serving app holds them: `submit`, and the `Stream` it gives, async or blocking.

Dropping a handle queues an ABORT and no more, so a finaliser may do it anywhere. No slot points to a `Stream`.
"""

import asyncio
from asyncio import Future, _get_running_loop
from weakref import WeakValueDictionary

from cpython.object cimport PyObject, PyObject_Call, PyTypeObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

cimport cython

from smg._choice cimport choose, reserve
from smg._fastpath cimport Core
from smg._outlets cimport Outlet, Output, Record, loop_outlet
from smg._pump cimport monotonic
from smg._table cimport (
    CAUSE_ABORTED, CAUSE_LOST, NIL, REFUSED_CLOSED, REFUSED_INVALID_RANK, REFUSED_NO_MEMORY, REFUSED_NO_RANK,
    REFUSED_OVERLOADED, SUFFIX_MAX, TYPE_ADD, WIRE_ID_SIZE, Message, Slot, end_here, enqueue, find, free_slot, new_message,
    pthread_mutex_lock, pthread_mutex_unlock, signal_outlets, slot_at, start_wave, write_wire_id,
)

from smg.errors import Closed, InvalidRank, NoRank, Overloaded

cdef extern from *:
    """
    static void smg_set_send(PyTypeObject *type, int (*send)(PyObject *, PyObject *, PyObject **)) {
        type->tp_as_async->am_send = (sendfunc)send;   // Cython has no spelling for this slot
    }
    """
    void set_send "smg_set_send"(PyTypeObject *, int (*)(PyObject *, PyObject *, PyObject **) except? -1)
    enum:
        PYGEN_RETURN
        PYGEN_NEXT

def submit(Core core not None, bytes payload, uint32_t id_offset, *, request_id=None, int rank=-1, double deadline=0,
           Outlet outlet=None, str suffix="", uint32_t prompt_tokens=0, logprobs=None) -> Stream:
    """Choose a rank, reserve a slot and queue one ADD, in one critical section; in lockstep, wake the group too.

    `payload` has a wire id at `id_offset`, which is overwritten with the slot's own. `rank` < 0 = the least
    loaded. `deadline` in seconds from now, 0 = none. `logprobs`: how many likeliest tokens were asked for, None = all.
    Raises NoRank, InvalidRank, Overloaded, Closed.
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
    core.usable()
    if <size_t>id_offset + WIRE_ID_SIZE + <size_t>len(tail) > size or len(tail) > SUFFIX_MAX:
        raise ValueError("the payload has no room for a wire id at this offset")
    if outlet is not None and (outlet.core is not core or outlet.data.closed):
        raise Closed("the outlet is closed, or belongs to another group")
    cdef bint explicit = outlet is not None
    loop = None if explicit else _get_running_loop()
    if loop is not None:
        outlet = loop_outlet(core, loop)
    record = Record.__new__(Record)
    record.core = core
    stream = Stream.__new__(Stream)
    stream.record = record
    record.ended = True   # until it has a slot
    record.request_id = request_id
    record.logprobs = logprobs
    record.attached = outlet is not None
    if loop is not None:
        record.loop = outlet.loop
    if explicit:
        record.stream = stream
    cdef Message *message = new_message(&core.pump.zmq, TYPE_ADD, size)
    if message == NULL:
        raise MemoryError
    bytes_ = <uint8_t *>core.pump.zmq.msg_data(&message.payload)
    memcpy(bytes_, <const char *>payload, size)
    cdef double quiet_before = 0
    if core.pump.stall_timeout > 0 and not core.pump.probes:   # else a stalled rank is asked, not tried
        quiet_before = now - core.pump.stall_timeout
    cdef const char *tail_bytes = tail
    cdef uint8_t tail_size = <uint8_t>len(tail)
    Py_INCREF(record)
    pthread_mutex_lock(&core.table.mutex)
    chosen = choose(&core.table, rank, size, quiet_before)
    if outlet is not None and outlet.data.closed:   # by a finaliser, since it was looked at above
        chosen = REFUSED_CLOSED
    if chosen >= 0:
        index = reserve(&core.table, chosen, prompt_tokens, now, now + deadline if deadline > 0 else 0)
        if index == NIL:
            chosen = REFUSED_NO_MEMORY
    if chosen >= 0:
        slot = slot_at(&core.table, index)
        slot.record = <void *>record
        if outlet is not None:
            slot.outlet = &outlet.data
            slot.wanted = outlet.data.eager
            outlet.data.slot_count += 1
        memcpy(slot.suffix, tail_bytes, tail_size)
        slot.suffix_size = tail_size
        write_wire_id(&core.table, index, <char *>bytes_ + id_offset)
        message.slot = record.index = index
        message.generation = record.generation = slot.generation
        record.rank = chosen
        record.ended = False
        enqueue(&core.table, <uint32_t>chosen, message)
        if core.table.lockstep and start_wave(&core.table, &core.pump.zmq) != 0:
            end_here(&core.table, &core.pump.zmq, index, CAUSE_LOST)   # a rank that sleeps on would hold it up
            signal_outlets(&core.table)
    pthread_mutex_unlock(&core.table.mutex)
    if chosen < 0:
        Py_DECREF(record)
        core.pump.zmq.msg_close(&message.payload)
        free(message)
        record.stream = None
        raise refusal(core, chosen, rank)
    return stream


cdef object refusal(Core core, int refused, int rank):
    """The error for what `choose` or `reserve` refused."""
    states = "; ask the group's `ranks` for their states"
    if refused == REFUSED_CLOSED:
        return Closed("the group is closed")
    if refused == REFUSED_NO_RANK:
        return NoRank("no rank is live" + states)
    if refused == REFUSED_INVALID_RANK:
        return InvalidRank(f"rank {rank} is not one of the {core.table.rank_count} ranks, or not live" + states)
    if refused == REFUSED_OVERLOADED:
        return Overloaded("every live rank is at its in-flight or send-queue bound; retry later")
    return MemoryError("no memory for another request")


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
            end_here(&core.table, &core.pump.zmq, self.record.index, CAUSE_ABORTED)
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
            outlet = loop_outlet(record.core, loop)
            record.attach(outlet)
            record.loop = (<Outlet>outlet).loop
        elif record.loop() is not loop:
            raise RuntimeError("this stream belongs to another loop or thread: consume it where it was submitted")
        record.claimed = True
        iterator = StreamIterator.__new__(StreamIterator)
        iterator.stream = self
        iterator.home = home_of(loop)
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


class Home(dict):
    """The keyword with which the futures of a loop are made: one for all iterators there, and gone with them."""


HOMES = WeakValueDictionary()   # by id of the loop, which its home keeps


cdef object home_of(loop):
    home = HOMES.get(id(loop))
    if home is None:
        home = HOMES[id(loop)] = Home(loop=loop)
    return home


@cython.final
cdef class StreamIterator:
    """The one-use iterator of a stream. When it goes before the terminal output, the request is aborted.

    It is the awaitable of its own `__anext__`: one output is awaited at a time, and whoever awaits keeps the iterator.
    What arrives is kept in the record until this object is resumed, so a wait that is cancelled loses nothing. It waits
    on a plain future of the loop.
    """

    cdef Stream stream
    cdef object home   # Home of the loop it runs in

    def __del__(self):
        self.stream.record.release()

    def __aiter__(self):
        return self

    def __anext__(self):
        return self

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
        cdef PyObject *result = NULL
        if send_next(<PyObject *>self, NULL, &result) == PYGEN_NEXT:
            return reclaim(result)
        raise StopIteration(reclaim(result))


cdef object reclaim(PyObject *owned):
    """An object from a reference that this call takes over."""
    made = <object>owned
    Py_DECREF(made)
    return made


cdef int send_next(PyObject *iterator, PyObject *value, PyObject **result) except? -1:
    """`send`, as C code that awaits asks for it: without a StopIteration and its traceback for every output."""
    cdef Record record = (<StreamIterator>iterator).stream.record
    result[0] = NULL
    got = record.next_output()
    if got is not None:
        record.waiter = None
        if not isinstance(got, Output):
            raise got
        Py_INCREF(got)
        result[0] = <PyObject *>got
        return PYGEN_RETURN
    if record.waiter is not None and not record.waiter.done():
        raise RuntimeError("this stream's next output is already awaited")
    # asyncio itself refuses a task of another loop. The class is called since `create_future` of asyncio's loop, a
    # Python function, does just that and costs more than it.
    waiter = record.waiter = PyObject_Call(Future, (), (<StreamIterator>iterator).home)
    waiter._asyncio_future_blocking = True
    Py_INCREF(waiter)
    result[0] = <PyObject *>waiter
    return PYGEN_NEXT


set_send(<PyTypeObject *>StreamIterator, send_next)


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
