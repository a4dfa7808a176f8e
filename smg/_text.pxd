# Token ids to text, and stop strings in it. `_sse` takes the text through `Detokenizer.push_tokens`, into a
# Buffer of its own, without a Python object per token.
#
# Text in a Buffer is UTF-8 and always ends between two characters.

from libc.stddef cimport size_t
from libc.stdint cimport int16_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from smg._stops cimport Automaton


cdef struct Buffer:
    uint8_t *data        # NULL while empty; free with buffer_free
    size_t size          # bytes in use
    size_t capacity      # bytes allocated


cdef enum Mode:
    BYTES                # pieces are bytes of a text that is UTF-8 only as a whole
    TEXT                 # pieces are text; byte-fallback runs and a stripped start excepted
    LIBRARY              # the tokenizers library decodes, token by token


cdef enum PieceFlag:
    UNKNOWN = 1          # no such token; no text
    SPECIAL = 2          # hidden by skip_special_tokens
    ADDED = 4            # from the tokenizer's added tokens, special or not
    BYTE = 8             # byte-fallback token, value in `byte`
    WHOLE = 16           # valid UTF-8 by itself


cdef enum:
    RUN_HELD = 128       # bytes of a byte-fallback run kept back until it is known to be valid


cdef struct Piece:
    uint32_t start       # offset in TokenTable.text
    uint32_t first_start # same, when it is the first token of a text
    uint16_t size        # bytes
    uint16_t first_size  # bytes, when it is the first token of a text
    uint8_t flags        # PieceFlag
    uint8_t byte         # value of a byte-fallback token


cdef class TokenTable:
    cdef Piece *pieces           # one per id
    cdef uint8_t *text           # all pieces' bytes, one after the other
    cdef uint32_t count          # ids 0 .. count - 1
    cdef Mode mode
    cdef uint32_t strip_left     # leading characters a text loses when they equal strip_char
    cdef uint8_t strip_char[4]   # UTF-8
    cdef uint8_t strip_size      # bytes of strip_char
    cdef readonly object tokenizer   # tokenizers.Tokenizer
    cdef readonly str decoder        # what the table follows, for logs: "ByteLevel", ...
    cdef dict added              # id -> content as UTF-8 bytes, of added tokens


cdef class StopStrings:
    cdef readonly tuple strings  # as given
    cdef Automaton automaton


cdef class Detokenizer:
    # What follows changes with every token.
    cdef const Piece *pieces     # borrowed from table
    cdef const uint8_t *text     # borrowed from table
    cdef uint32_t count
    cdef Mode mode
    cdef uint8_t hidden          # PieceFlag that yield no text
    cdef bint first              # no visible token so far
    cdef uint32_t strip_left     # leading characters still to be lost
    cdef uint8_t pending[4]      # beginning of a character
    cdef uint8_t pending_size    # bytes, 0..3
    cdef uint8_t pending_prompt  # how many of them the prompt brought
    cdef bint run_open           # the last visible token was a byte-fallback token
    cdef bint run_bad            # the open run is not UTF-8: every byte of it is U+FFFD
    cdef uint16_t run_size       # bytes in `run`
    cdef uint8_t run[RUN_HELD + 4]   # complete characters of the open run, not given out yet
    cdef const Automaton *automaton  # borrowed from stops; NULL without
    cdef uint16_t state          # of the automaton; its depth is how much text is held back
    cdef uint64_t position       # bytes of text that went through the automaton
    cdef int16_t found           # stop that has matched unless one that began earlier completes; -1 = none
    cdef uint64_t found_start    # its first byte's position
    cdef uint64_t found_end      # position after its last byte
    # What follows is set once, or rarely.
    cdef readonly TokenTable table
    cdef readonly StopStrings stops
    cdef bint keep_stop          # the text ends after the stop, not before it
    cdef bint raw_added          # an added token after an added token is its bare content
    cdef bint last_added
    cdef bint ended              # stopped or finished: no text any more
    cdef uint64_t min_tokens     # tokens in which no stop is looked for
    cdef readonly uint64_t token_count   # ids taken, the one that completed the stop included
    cdef readonly uint64_t unknown       # of these, not in the vocabulary
    cdef readonly bint stopped   # a stop string has matched
    cdef object library          # state of LIBRARY mode

    # Append the text that `n` tokens complete. 1: a stop string has matched, the rest of the ids was not
    # looked at; 0: the stream goes on; -1: MemoryError. Makes no Python object but in LIBRARY mode.
    cdef int push_tokens(self, const uint32_t *ids, Py_ssize_t n, Buffer *out) except -1

    # Append what was held back; the stream is over. Returns as push_tokens.
    cdef int finish_text(self, Buffer *out) except -1


cdef inline int buffer_reserve(Buffer *buffer, size_t more) noexcept nogil:
    """Room for `more` bytes after the bytes in use. -1: no memory, nothing changed."""
    cdef size_t needed = buffer.size + more
    cdef size_t capacity
    cdef void *data
    if needed <= buffer.capacity:
        return 0
    capacity = max(<size_t>64, buffer.capacity + buffer.capacity // 2, needed)
    data = realloc(buffer.data, capacity)
    if data == NULL:
        return -1
    buffer.data = <uint8_t *>data
    buffer.capacity = capacity
    return 0


cdef inline int buffer_append(Buffer *buffer, const uint8_t *data, size_t size) noexcept nogil:
    """-1: no memory, nothing changed."""
    if size == 0:  # `data` and the buffer's may be NULL
        return 0
    if buffer_reserve(buffer, size) < 0:
        return -1
    memcpy(buffer.data + buffer.size, data, size)
    buffer.size += size
    return 0


cdef inline void buffer_free(Buffer *buffer) noexcept nogil:
    free(buffer.data)
    buffer.data = NULL
    buffer.size = buffer.capacity = 0
