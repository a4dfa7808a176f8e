# What other compiled modules may use of outputs, records and outlets.

from libc.stdint cimport int32_t, uint8_t, uint32_t

from smg._delivery cimport Taken
from smg._fastpath cimport Core
from smg._table cimport Outlet as OutletData


cdef class Output:
    cdef uint32_t few[4]               # the tokens, when they are few
    cdef object many                   # bytes of them, when they are more
    cdef uint32_t *tokens              # `few`, or in `many`
    cdef readonly uint32_t token_count # new tokens
    cdef uint8_t finish                # Finish; FINISH_NONE while running
    cdef readonly int32_t rank
    cdef readonly uint32_t prompt_tokens
    cdef readonly uint32_t completion_tokens
    cdef readonly uint32_t cached_tokens
    cdef readonly object stop_reason
    cdef object reason                 # the engine's own word, when `finish` is FINISH_OTHER
    cdef object cold                   # None, or what decodes logprobs, how many likeliest ones, and the bytes of them
    cdef object token_list


cdef class Record:
    cdef Core core
    cdef uint32_t index                # the slot
    cdef uint32_t generation
    cdef int32_t rank
    cdef object request_id
    cdef object logprobs               # how many likeliest tokens were asked for, None = all
    cdef bint attached                 # its slot has an outlet
    cdef bint ended                    # nothing more is in the slot for it
    cdef bint claimed                  # an iterator was made
    cdef object loop                   # weak reference to the loop it belongs to, or None
    cdef object waiter                 # future of a consumer that waits, or None
    cdef object output                 # taken from the slot, not yet consumed
    cdef uint8_t cause                 # Cause that ends the stream after `output`; CAUSE_NONE = none, or told
    cdef uint8_t detail                # how its rank died, for CAUSE_DIED
    cdef object stream                 # the handle, kept for explicit outlets

    cdef void release(self)
    cdef int take(self) except -1
    cdef void settle(self, const Taken *taken, const uint32_t *tokens)
    cdef object next_output(self)
    cdef object failure(self)
    cdef str name(self)
    cdef int attach(self, Outlet outlet) except -1
    cdef int unclaimed(self) except -1


cdef class Outlet:
    cdef OutletData data
    cdef Core core
    cdef object loop                   # weak reference; None for explicit and blocking outlets
    cdef object waiter                 # future of wait()
    cdef object waiter_loop            # weak reference to the loop with our reader
    cdef object poller
    cdef bint polling                  # a thread blocks on the descriptor
    cdef bint opened                   # has descriptors
    cdef object __weakref__

    cdef list collect(self)
    cdef bint finished(self)
    cdef void clear(self)
    cdef void release_slots(self)
    cdef void detach_slots(self)
    cdef void close_descriptors(self)


cdef Outlet loop_outlet(Core core, object loop)
