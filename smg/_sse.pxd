# Text of running completions to HTTP clients: detokenise, escape, splice, write. One Wire per response, one
# Choice per stream of it. Everything here runs on the event loop's thread.

from libc.stdint cimport int64_t, uint8_t, uint32_t

from smg._text cimport Buffer, Detokenizer


cdef class Histogram:
    cdef double *bounds          # upper bounds of the buckets, seconds, rising
    cdef int64_t *buckets        # observations per bucket; one more than bounds, for the rest
    cdef Py_ssize_t size         # bounds
    cdef readonly double sum     # seconds
    cdef readonly int64_t count

    cdef void add(self, double seconds, int64_t times) noexcept


cdef class Wire:
    cdef object write            # of the connection's transport; None once that is lost
    cdef object unwritten        # the transport's: bytes that it holds
    cdef int socket              # a descriptor of the connection that is ours alone to close, or -1
    cdef bint direct             # the transport holds nothing, so the socket takes what comes next
    cdef public bytes head       # status line and headers, sent with the first part; None then
    cdef Buffer out              # what is queued and not written
    cdef bint chunked            # HTTP/1.1 framing; else the connection's end ends the body
    cdef readonly bint started   # something was written, so the status is decided
    cdef readonly bint ended
    cdef readonly bint paused    # the transport's buffer is full: choices coalesce
    cdef int quiet               # ticks since the last write
    cdef list choices            # told when writing goes on

    cdef int put(self, bytes part) except -1
    cdef int put_text(self, bytes before, const uint8_t *text, Py_ssize_t size, bytes after) except -1
    cdef int flush(self) except -1
    cdef Py_ssize_t send_now(self) except -1
    cdef void release(self) noexcept


cdef class Choice:
    # What changes with every output.
    cdef Buffer fresh            # text not yet written
    cdef double last             # monotonic seconds of the last output
    cdef readonly uint32_t prompt_tokens
    cdef readonly uint32_t completion_tokens
    cdef readonly uint32_t cached_tokens
    cdef uint32_t rendered_tokens    # completion_tokens when `shape` last rendered
    cdef readonly bint ended
    cdef list entries            # logprob entries not yet written; None when none were asked for
    cdef list ids                # every token id so far; None unless they are wanted
    # What is set once.
    cdef Detokenizer text
    cdef Wire wire               # None: the text is collected in `whole`
    cdef bytes before, after     # constant JSON around a text; `before` None: `shape` renders every part
    cdef object shape            # renders what is not constant
    cdef object owner            # told of the end; None after it, so that nothing waits for a collection
    cdef dict stop_ids           # token id that ends the text -> what matched, None for end of sequence
    cdef bint keep_stop          # stop tokens stay in the text
    cdef bint begun              # the first part was written
    cdef Buffer whole            # all text, when collected or `shape` wants it
    cdef bint collects
    cdef Histogram first_token, between_tokens
    cdef readonly int index      # of the choice in the response
    cdef readonly double submitted   # monotonic seconds
    cdef readonly double first       # same, of the first output; 0 before
    cdef readonly object finish_reason
    cdef readonly object matched     # stop string or token id that ended it
    cdef public object stream

    cdef int take(
        self, const uint32_t *ids, Py_ssize_t n, object reason, object stop_reason, object logprobs
    ) except -1
    cdef int begin(self) except -1
    cdef int show(self) except -1
    cdef int end(self, object reason) except -1
    cpdef deliver(self, out)
