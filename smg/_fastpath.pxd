# One group's core, as the modules above it use it.

from smg._pump cimport Pump
from smg._table cimport Table
from smg._delivery cimport Scratch


cdef class Core:
    cdef Table table
    cdef Pump pump
    cdef Scratch spare                 # lent to one take at a time
    cdef int forks                     # fork count of the process that made it
    cdef int wake_read
    cdef object decode_cold
    cdef dict loop_outlets             # id(loop) -> (weak reference to the loop, Outlet)
    cdef dict outlets                  # id -> weak reference to an outlet that a caller made
    cdef object __weakref__

    cdef bint forked(self) noexcept
    cdef int usable(self) except -1
    cdef Scratch borrow(self) noexcept
    cdef void give_back(self, Scratch *scratch) noexcept
