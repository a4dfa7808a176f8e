"""Text of running completions to HTTP clients: detokenise, find stop strings, escape, splice, write.

A `Choice` turns one stream's outputs into text. With a `Wire` it writes them as server-sent events, each a
constant JSON prefix, the escaped text and a constant suffix; without one it collects the text. `drain` serves
every choice whose stream became ready, in one callback and without a task switch.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memchr, memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport close as close_descriptor

from smg._escape cimport escape_into, escape_size, hex_digit
from smg._outlets cimport Output
from smg._text cimport Buffer, Detokenizer, buffer_append, buffer_free, buffer_reserve

import os

from smg.errors import Error

cdef extern from "<sys/socket.h>":
    Py_ssize_t send(int, const void *, size_t, int)
    int MSG_DONTWAIT, MSG_NOSIGNAL


# ---------------------------------------------------------------- JSON text

def escape(text) -> bytes:
    """`text` (str, or UTF-8 bytes) as the inside of a JSON string, without the quotes.

    Control characters, quotes, backslashes, U+0085, U+2028, U+2029 and lone surrogates are escaped, so that the
    result is one line for every line splitter and valid JSON whatever came in.
    """
    cdef bytes raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)
    cdef const uint8_t *data = <const uint8_t *>PyBytes_AS_STRING(raw)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(raw)
    cdef bytes made = PyBytes_FromStringAndSize(NULL, escape_size(data, size))
    escape_into(PyBytes_AS_STRING(made), data, size)
    return made


def json_depth(bytes body) -> int:
    """How deep arrays and objects nest in a JSON text. Of a text that is not JSON, some number."""
    cdef const char *text = PyBytes_AS_STRING(body)
    cdef const char *end = text + PyBytes_GET_SIZE(body)
    cdef int64_t depth = 0, deepest = 0
    cdef char c
    with nogil:
        while text < end:
            c = text[0]
            text += 1
            if c == b'"':
                text = string_end(text, end)
            elif c == b"{" or c == b"[":
                depth += 1
                if depth > deepest:
                    deepest = depth
            elif c == b"}" or c == b"]":
                depth -= 1
    return deepest


cdef const char *string_end(const char *text, const char *end) noexcept nogil:
    """Past the quote that ends a JSON string, of which `text` is the inside: the first one that is not escaped."""
    cdef const char *quote = text
    cdef const char *before
    while True:
        quote = <const char *>memchr(quote, b'"', end - quote)
        if quote == NULL:
            return end
        before = quote
        while before > text and before[-1] == b"\\":
            before -= 1
        quote += 1
        if (quote - 1 - before) % 2 == 0:
            return quote


# ---------------------------------------------------------------- time

cdef inline double monotonic() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + now.tv_nsec * 1e-9


cdef class Histogram:
    """Durations counted in buckets, for metrics. `bounds` are upper bounds in seconds, rising."""

    def __cinit__(self, bounds):
        self.size = len(bounds)
        self.bounds = <double *>malloc(max(1, self.size) * sizeof(double))
        self.buckets = <int64_t *>calloc(self.size + 1, sizeof(int64_t))
        if self.bounds == NULL or self.buckets == NULL:
            raise MemoryError
        for i in range(self.size):
            self.bounds[i] = bounds[i]

    def __dealloc__(self):
        free(self.bounds)
        free(self.buckets)

    cdef void add(self, double seconds, int64_t times) noexcept:
        cdef Py_ssize_t i = 0
        while i < self.size and seconds > self.bounds[i]:
            i += 1
        self.buckets[i] += times
        self.sum += seconds * times
        self.count += times

    def observe(self, double seconds, int64_t times=1) -> None:
        self.add(seconds, times)

    def cumulative(self) -> list:
        """(upper bound in seconds, observations up to it) per bucket, the last bound infinite."""
        cdef int64_t total = 0
        made = []
        for i in range(self.size):
            total += self.buckets[i]
            made.append((self.bounds[i], total))
        made.append((float("inf"), total + self.buckets[self.size]))
        return made


# ---------------------------------------------------------------- writing

cdef enum:
    CHUNK_FRAME = 20   # bytes at most around a chunk: 16 digits of its size and two ends of line


cdef inline char *write_chunk_size(char *at, Py_ssize_t size) noexcept nogil:
    """The line before a chunk that is not empty; returns its end."""
    cdef int shift = 0
    while size >> shift > 15:
        shift += 4
    while shift >= 0:
        at[0] = hex_digit(<uint32_t>(size >> shift))
        at += 1
        shift -= 4
    at[0], at[1] = 0x0d, 0x0a
    return at + 2


cdef int duplicate(transport) except -2:
    """A descriptor of our own for what a transport writes to; -1 if bytes have to go through it, as with TLS."""
    socket = transport.get_extra_info("socket")
    if socket is None or transport.get_extra_info("sslcontext") is not None:
        return -1
    try:
        return os.dup(socket.fileno())
    except OSError:  # out of descriptors, or closed already
        return -1


cdef class Wire:
    """The event stream of one HTTP response: the only thing that writes to its connection.

    `protocol` is the connection's, which tells when the client does not read, or is gone (its `transport` is None
    then). `chunked` frames each part as HTTP/1.1 wants it. `head`, the status line and headers, is sent with the
    first part.

    As long as the transport holds no bytes and there is no TLS, parts go to the socket in one system call, and only
    what that does not take goes to the transport. The descriptor is a duplicate, which nobody else can close: it
    never becomes another connection's. It is closed with the response or the connection, whichever ends first.
    """

    def __cinit__(self, protocol, bint chunked):
        transport = protocol.transport
        self.socket = -1
        if transport is not None:
            self.write = transport.write
            self.unwritten = transport.get_write_buffer_size
            self.socket = duplicate(transport)
        self.chunked = chunked
        self.head = b""
        self.choices = []

    def __dealloc__(self):
        self.release()
        buffer_free(&self.out)

    cdef void release(self) noexcept:
        if self.socket >= 0:
            close_descriptor(self.socket)
            self.socket = -1

    cdef int put(self, bytes part) except -1:
        """Queue bytes as they go over the wire, the head before the first of them."""
        if self.head is not None:
            head, self.head = self.head, None
            self.started = True
            self.put(head)
        if buffer_append(&self.out, <const uint8_t *>PyBytes_AS_STRING(part), PyBytes_GET_SIZE(part)) < 0:
            raise MemoryError
        return 0

    cdef int put_text(self, bytes before, const uint8_t *text, Py_ssize_t size, bytes after) except -1:
        """Queue `before`, the escaped text, `after` as one part, framed."""
        cdef Py_ssize_t first = PyBytes_GET_SIZE(before), last = PyBytes_GET_SIZE(after)
        cdef Py_ssize_t body = first + escape_size(text, size) + last
        cdef char *at
        if self.head is not None:
            self.put(b"")
        if buffer_reserve(&self.out, body + CHUNK_FRAME) < 0:
            raise MemoryError
        at = <char *>self.out.data + self.out.size
        if self.chunked:
            at = write_chunk_size(at, body)
        memcpy(at, PyBytes_AS_STRING(before), first)
        at = escape_into(at + first, text, size)
        memcpy(at, PyBytes_AS_STRING(after), last)
        at += last
        if self.chunked:
            at[0], at[1] = 0x0d, 0x0a
            at += 2
        self.out.size = at - <char *>self.out.data
        return 0

    cdef int flush(self) except -1:
        """Write what is queued, in one call."""
        cdef Py_ssize_t sent, rest
        if self.out.size == 0:
            return 0
        self.quiet = 0
        if self.write is not None:
            sent = self.send_now() if self.socket >= 0 else 0
            rest = self.out.size - sent
            if rest:
                self.write(PyBytes_FromStringAndSize(<char *>self.out.data + sent, rest))
        self.out.size = 0
        return 0

    cdef Py_ssize_t send_now(self) except -1:
        """How many of the queued bytes the socket has taken. What is wrong with it, the transport finds out."""
        cdef Py_ssize_t size = self.out.size, sent
        if not self.direct and self.unwritten():
            return 0
        sent = max(0, send(self.socket, self.out.data, size, MSG_DONTWAIT | MSG_NOSIGNAL))
        self.direct = sent == size
        return sent

    def send(self, bytes part not None) -> None:
        """Write `part`, e.g. a comment or an event as it goes over the wire."""
        if not self.ended:
            self.put_text(part, NULL, 0, b"")
            self.flush()

    def event(self, bytes data not None) -> None:
        """Queue an event; the next output or `close` writes it. `data` is one line."""
        if not self.ended:
            self.put_text(b"data: ", NULL, 0, data + b"\n\n")

    def close(self) -> None:
        """Write what is queued and end the body."""
        if self.ended:
            return
        self.ended = True
        self.choices.clear()
        if self.chunked:
            self.put(b"0\r\n\r\n")
        elif self.head is not None:
            self.put(b"")
        self.flush()
        self.release()

    def leave(self) -> None:
        """The client or the response is gone: nothing is written any more."""
        self.write = None
        self.release()

    def pause(self) -> None:
        """The transport's buffer is full: texts coalesce until `resume`."""
        self.paused = True

    def resume(self) -> None:
        cdef Choice choice
        self.paused = False
        for choice in self.choices:
            choice.show()
        self.flush()

    def tick(self, int limit) -> None:
        """Count one tick; after `limit` of them without a write, write a comment so that nobody hangs up."""
        self.quiet += 1
        if self.quiet >= limit and not self.paused:
            self.send(b": ping\n\n")


# ---------------------------------------------------------------- choices

def drain(outlet) -> None:
    """Deliver everything that became ready in `outlet` to the `Choice` in each stream's `data`."""
    cdef Choice choice
    for stream, out in outlet.take():
        choice = stream.data
        if choice is not None:
            choice.deliver(out)


cdef class Choice:
    """One stream of a response, from token ids to what the client reads.

    `shape` renders what is not constant; each returns a line of JSON as bytes:
    `first(choice)` or None, before anything else; `part(choice, text, entries)` when `before` is None;
    `last(choice)` at the end. `owner` hears of the end: `ended(choice)`, or `failed(choice, exception)`; before that
    `retried(choice, exception)` when nothing had come yet, which may give the choice another stream and return true.
    `before` and `after` are the constant parts of an event around its text, "data: " and the blank line included.
    """

    def __cinit__(
        self,
        int index,
        Detokenizer text not None,
        owner,
        *,
        Wire wire=None,
        shape=None,
        bytes before=None,
        bytes after=None,
        dict stop_ids=None,
        bint keep_stop=False,
        bint logprobs=False,
        bint collect=False,
        bint keep_ids=False,
        uint32_t prompt_tokens=0,
        Histogram first_token=None,
        Histogram between_tokens=None,
    ):
        self.index = index
        self.text = text
        self.owner = owner
        self.wire = wire
        self.shape = shape
        self.before = before
        self.after = after
        self.stop_ids = stop_ids
        self.keep_stop = keep_stop
        self.entries = [] if logprobs else None
        self.ids = [] if keep_ids else None
        self.collects = collect or wire is None
        self.prompt_tokens = prompt_tokens
        self.first_token = first_token
        self.between_tokens = between_tokens
        self.submitted = monotonic()
        if wire is not None:
            wire.choices.append(self)

    def __dealloc__(self):
        buffer_free(&self.fresh)
        buffer_free(&self.whole)

    @property
    def whole_text(self) -> bytes:
        """All text so far, UTF-8; empty unless it is collected."""
        return (<const char *>self.whole.data)[: self.whole.size] if self.whole.size else b""

    @property
    def logprobs(self) -> list:
        """(token_id, logprob, top) of every token not yet written; None when they were not asked for."""
        return self.entries

    @property
    def token_ids(self) -> list:
        """Every token id so far, a stop token included; None unless they are kept."""
        return self.ids

    @property
    def seconds(self) -> float:
        """Since the request went to the engine, up to the last output."""
        return self.last - self.submitted if self.first else 0.0

    cpdef deliver(self, out):
        """Take what came out of the stream: an `Output`, or the error that ended it."""
        cdef Output output
        if self.ended:
            return
        owner = self.owner
        try:
            if type(out) is Output:
                output = <Output>out
                self.cached_tokens = output.cached_tokens
                self.completion_tokens = output.completion_tokens
                if output.prompt_tokens:
                    self.prompt_tokens = output.prompt_tokens
                self.take(
                    output.tokens,
                    output.token_count,
                    output.finish_reason if output.finish else None,
                    output.stop_reason,
                    output.logprobs if self.entries is not None else None,
                )
            elif self.first != 0 or not owner.retried(self, out):
                self.fail(out)
        except Exception as exc:
            self.ended = False
            self.abort()
            # Also when it came from telling of the end: somebody waits for that.
            owner.failed(self, exc)

    def feed(
        self, token_ids, finish_reason=None, stop_reason=None, logprobs=None, int64_t completion_tokens=-1
    ) -> None:
        """Take tokens that come from no engine."""
        cdef Py_ssize_t n = len(token_ids)
        cdef uint32_t *ids
        if self.ended:
            return
        ids = <uint32_t *>malloc(max(1, n) * sizeof(uint32_t))
        if ids == NULL:
            raise MemoryError
        try:
            for i in range(n):
                ids[i] = token_ids[i]
            self.completion_tokens = completion_tokens if completion_tokens >= 0 else self.completion_tokens + n
            self.take(ids, n, finish_reason, stop_reason, logprobs)
        finally:
            free(ids)

    def abort(self) -> None:
        """End without another word to the client; the engine is told."""
        if self.ended:
            return
        self.ended = True
        self.owner = None
        if self.wire is not None and self in self.wire.choices:
            self.wire.choices.remove(self)
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.abort()

    def fail(self, exc) -> None:
        """End with an error; the owner tells the client."""
        if not self.ended:
            self.ended = True
            owner, self.owner = self.owner, None
            owner.failed(self, exc)

    cdef int take(
        self, const uint32_t *ids, Py_ssize_t n, object reason, object stop_reason, object logprobs
    ) except -1:
        cdef double now = monotonic()
        cdef bint stopped
        cdef Py_ssize_t i
        if self.first == 0:
            self.first = now
            if self.first_token is not None:
                self.first_token.add(now - self.submitted, 1)
            if n > 1 and self.between_tokens is not None:
                self.between_tokens.add(0.0, n - 1)   # they came with the first
        elif n and self.between_tokens is not None:
            self.between_tokens.add((now - self.last) / n, n)
        self.last = now
        if self.ids is not None:
            for i in range(n):
                self.ids.append(ids[i])
        if logprobs is not None and self.entries is not None:
            self.entries.extend(logprobs)
        if reason is not None:
            if reason == "error":
                self.fail(Error("the engine finished the request with an error; its log says why"))
                return 0
            if n and self.stop_ids is not None and reason == "stop" and ids[n - 1] in self.stop_ids:
                self.matched = self.stop_ids[ids[n - 1]]
                if not self.keep_stop:
                    n -= 1
            if stop_reason is not None:
                self.matched = self.stop_ids.get(stop_reason, stop_reason) if self.stop_ids else stop_reason
        stopped = self.text.push_tokens(ids, n, &self.fresh) == 1
        if reason is not None and not stopped:
            stopped = self.text.finish_text(&self.fresh) == 1
        if stopped:
            self.matched = self.text.stop_match
            if reason is None and self.stream is not None:
                self.stream.abort()
            reason = "stop"
        if self.collects and self.fresh.size:
            if buffer_append(&self.whole, self.fresh.data, self.fresh.size) < 0:
                raise MemoryError
            if self.wire is None:
                self.fresh.size = 0
        if reason is not None:
            return self.end(reason)
        if self.wire is not None:
            self.show()
            self.wire.flush()
        return 0

    cdef int begin(self) except -1:
        self.begun = True
        first = self.shape.first(self)
        if first is not None:
            self.wire.event(first)
        return 0

    cdef int show(self) except -1:
        """Queue what is fresh, unless the client does not read: then it waits, and grows by its text only."""
        if not self.begun and self.first != 0:
            self.begin()
        if self.wire.paused and not self.ended:
            return 0
        if self.before is not None:
            if self.fresh.size:
                self.wire.put_text(self.before, self.fresh.data, self.fresh.size, self.after)
        elif self.collects:
            # Every part has the whole text; the last one is rendered with the end.
            if not self.ended and self.completion_tokens != self.rendered_tokens:
                self.rendered_tokens = self.completion_tokens
                self.wire.event(self.shape.part(self, b"", None))
        elif self.fresh.size or (self.ended and self.entries):
            entries = self.entries
            if entries is not None:
                self.entries = []
            text = (<const char *>self.fresh.data)[: self.fresh.size] if self.fresh.size else b""
            self.wire.event(self.shape.part(self, text, entries))
        self.fresh.size = 0
        return 0

    cdef int end(self, object reason) except -1:
        self.ended = True
        self.finish_reason = reason if reason == "length" or reason == "abort" else "stop"
        if self.wire is not None:
            self.show()
            self.wire.choices.remove(self)
            self.wire.event(self.shape.last(self))
        owner, self.owner = self.owner, None
        owner.ended(self)
        if self.wire is not None:
            self.wire.flush()
        self.stream = None
        return 0
