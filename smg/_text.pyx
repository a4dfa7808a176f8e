"""Token ids to text, and stop strings in it, one `Detokenizer` per stream.

What a `Detokenizer` gives out is, put together, `tokenizer.decode` of all its ids, whatever the chunks they
came in: the library's decoders are followed exactly, by a table of every token's bytes that is built once.
The layouts are in `_text.pxd`.
"""

from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdlib cimport calloc, malloc
from libc.string cimport memcmp, memmove, memset

from smg._stops cimport automaton_compile, automaton_free

from smg._spelling import LibraryStream, reading
from smg.errors import InvalidRequest

# U+FFFD, what stands for bytes that are no text.
cdef const uint8_t *REPLACEMENT = <const uint8_t *>b"\xef\xbf\xbd"

MAX_IDS = 1 << 24       # vocabularies are two orders of magnitude below
MAX_STOP_BYTES = 4096   # of all stop strings of one stream together
PROMPT_TAIL = 32        # tokens of a prompt that are looked at when a stream continues it


# ------------------------------------------------------------------------------------------------ the table

cdef class TokenTable:
    """Every token's bytes, as the tokenizer's own decoder writes them.

    `TokenTable(tokenizer)` takes a `tokenizers.Tokenizer`, which must not be changed afterwards. Tables are
    read-only and shared by all streams. `decoder` names its stages; with `exact` False they are none that a
    table can follow, and streams go through `tokenizers.decoders.DecodeStream` instead.

    Raises ValueError for a vocabulary with ids from 16,777,216 on or with a token longer than 65,535 bytes.
    """

    def __cinit__(self, tokenizer):
        cdef uint32_t token
        cdef Piece *piece
        cdef bytes stripped
        cdef bytearray text = bytearray()
        added = tokenizer.get_added_tokens_decoder()
        last = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        last = max(last, max(added, default=-1))
        if last >= MAX_IDS:
            raise ValueError(f"the tokenizer has a token id {last}; ids up to {MAX_IDS - 1} are supported")
        special = {entry.content for entry in added.values() if entry.special}
        self.tokenizer = tokenizer
        self.added = {token: entry.content.encode() for token, entry in added.items()}
        rules = reading(tokenizer.decoder)
        spell = rules.spell
        self.mode = {"bytes": BYTES, "text": TEXT, "library": LIBRARY}[rules.mode]
        self.decoder = rules.name
        stripped = rules.stripped.encode()
        self.strip_left = rules.strip_left
        self.strip_size = len(stripped)
        memcpy(self.strip_char, <const char *>stripped, len(stripped))
        self.count = last + 1
        self.pieces = <Piece *>calloc(self.count or 1, sizeof(Piece))
        if self.pieces == NULL:
            raise MemoryError
        for token in range(self.count):
            piece = &self.pieces[token]
            content = tokenizer.id_to_token(token)
            if content is None:
                piece.flags = UNKNOWN
                continue
            spelled, first, byte = spell(content)
            if max(len(spelled), len(first)) > 0xFFFF:
                raise ValueError(f"token {token} is {len(spelled)} bytes long; at most 65535 are supported")
            piece.start = piece.first_start = len(text)
            piece.size, piece.first_size = len(spelled), len(first)
            text += spelled
            if first != spelled:
                piece.first_start = len(text)
                text += first
            if content in special:
                piece.flags |= SPECIAL
            if token in added:
                piece.flags |= ADDED
            if byte is not None:
                piece.flags |= BYTE
                piece.byte = byte
            if is_utf8(spelled):
                piece.flags |= WHOLE
        self.text = <uint8_t *>malloc(len(text) or 1)
        if self.text == NULL:
            raise MemoryError
        memcpy(self.text, <const char *>text, len(text))

    def __dealloc__(self):
        free(self.pieces)
        free(self.text)

    def __len__(self):
        """Ids are 0 to this minus one; some of them may be unknown."""
        return self.count

    @property
    def exact(self):
        """The text comes from this table, not from `DecodeStream`."""
        return self.mode != LIBRARY

    def __contains__(self, token):
        return 0 <= token < self.count and not self.pieces[<uint32_t>token].flags & UNKNOWN

    def is_special(self, token):
        """`skip_special_tokens` hides it."""
        return token in self and self.pieces[<uint32_t>token].flags & SPECIAL != 0

    def bytes_of(self, token):
        """The token's bytes in the middle of a text, as `logprobs` lists them; b"" for an unknown id."""
        cdef Piece *piece
        if token not in self:
            return b""
        piece = &self.pieces[<uint32_t>token]
        if piece.flags & BYTE:
            return bytes((piece.byte,))
        return (<const char *>self.text)[piece.start:piece.start + piece.size]


cdef bint is_utf8(bytes data):
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


# ------------------------------------------------------------------------------------------- stop strings

cdef class StopStrings:
    """Strings that end a text, compiled: one step per byte, however many there are. Read-only, may be shared.

    The match that begins first wins; of those that begin together, the shortest, which is complete first. So
    the text is the same however its tokens and frames were cut. Raises `InvalidRequest` for no string, an
    empty one, one that is not Unicode text, or more than 4,096 bytes of UTF-8 in all.
    """

    def __cinit__(self, strings):
        cdef uint32_t *sizes
        cdef bytes text
        cdef int status
        cdef Py_ssize_t i
        self.strings = tuple(strings)
        if not self.strings or not all(isinstance(string, str) and string for string in self.strings):
            raise InvalidRequest("stop", list(self.strings), "one or more non-empty strings")
        try:
            encoded = [string.encode() for string in self.strings]
        except UnicodeEncodeError:
            raise InvalidRequest("stop", list(self.strings), "text without lone surrogates") from None
        text = b"".join(encoded)
        if len(text) > MAX_STOP_BYTES:
            raise InvalidRequest("stop", list(self.strings), f"at most {MAX_STOP_BYTES} bytes in all")
        sizes = <uint32_t *>malloc(len(encoded) * sizeof(uint32_t))
        if sizes == NULL:
            raise MemoryError
        for i in range(len(encoded)):
            sizes[i] = len(encoded[i])
        status = automaton_compile(&self.automaton, <const uint8_t *><const char *>text, sizes, len(encoded))
        free(sizes)
        if status < 0:
            raise MemoryError

    def __dealloc__(self):
        automaton_free(&self.automaton)

    def __repr__(self):
        return f"StopStrings({list(self.strings)!r})"


# --------------------------------------------------------------------------------------------- one stream

cdef class Detokenizer:
    """The text of one stream, given out as soon as it cannot change any more.

    Held back are: the beginning of a character; a run of byte-fallback tokens up to its end or to 128 bytes
    (an invalid byte makes the library turn the whole run into U+FFFD, which is followed within these); and
    text that could still become a stop string.

    skip_special_tokens             special tokens yield no text
    spaces_between_special_tokens   False: an added token right after an added token is just its content, also
                                    where the decoder puts a space (vLLM's meaning of the name)
    stop, no_stop_trim              `StopStrings` or None; True keeps the matched stop in the text
    min_tokens                      stops are looked for only in the text of later tokens
    prompt_tail_ids                 the prompt, or at least its last 32 tokens, when the text continues it: no
                                    space is lost at the seam, and a character that the prompt began comes out
                                    whole when the stream completes it, and not at all when it does not
    """

    def __cinit__(
        self, TokenTable table not None, *, bint skip_special_tokens=True,
        bint spaces_between_special_tokens=True, StopStrings stop=None, bint no_stop_trim=False,
        uint64_t min_tokens=0, prompt_tail_ids=None,
    ):
        self.table = table
        self.pieces = table.pieces
        self.text = table.text
        self.count = table.count
        self.mode = table.mode
        self.hidden = UNKNOWN | (SPECIAL if skip_special_tokens else 0)
        self.first = True
        self.strip_left = table.strip_left
        self.stops = stop
        if stop is not None:
            self.automaton = &stop.automaton
        self.found = -1
        self.keep_stop = no_stop_trim
        self.raw_added = not (spaces_between_special_tokens or skip_special_tokens)
        self.min_tokens = min_tokens
        if self.mode == LIBRARY:
            self.library = LibraryStream(table.tokenizer, skip_special_tokens)
        if prompt_tail_ids is not None and len(prompt_tail_ids):
            continue_prompt(self, prompt_tail_ids)

    def push(self, token_ids):
        """The text that these tokens complete, perhaps "". `unknown` counts ids outside the vocabulary."""
        cdef Buffer out = Buffer(NULL, 0, 0)
        cdef Py_ssize_t n = len(token_ids)
        cdef uint32_t *ids = copy_ids(token_ids, n)
        try:
            self.push_tokens(ids, n, &out)
            return PyUnicode_DecodeUTF8(<const char *>out.data, out.size, NULL) if out.size else ""
        finally:
            free(ids)
            buffer_free(&out)

    def finish(self):
        """What was held back. Nothing comes out of the stream afterwards."""
        cdef Buffer out = Buffer(NULL, 0, 0)
        try:
            self.finish_text(&out)
            return PyUnicode_DecodeUTF8(<const char *>out.data, out.size, NULL) if out.size else ""
        finally:
            buffer_free(&out)

    @property
    def stop_match(self):
        """The stop string that ended the text, None while there is none."""
        return self.stops.strings[self.found] if self.stopped else None

    cdef int push_tokens(self, const uint32_t *ids, Py_ssize_t n, Buffer *out) except -1:
        cdef size_t base
        cdef Py_ssize_t i
        for i in range(n):
            if self.ended:
                break
            base = out.size
            self.token_count += 1
            if self.mode == LIBRARY:
                put_library(self, ids[i], out)
            elif self.raw_added and follows_added(self, ids[i]):
                put_text(self, self.table.added[ids[i]], out)
            elif put_token(self, ids[i], out) < 0:
                raise MemoryError
            if self.automaton != NULL and self.token_count > self.min_tokens and scan(self, out, base) < 0:
                raise MemoryError
        return self.stopped

    cdef int finish_text(self, Buffer *out) except -1:
        cdef size_t base = out.size
        if self.ended:
            return self.stopped
        if self.mode == LIBRARY:
            put_text(self, self.library.rest(), out)
        elif end_pending(self, out) < 0:
            raise MemoryError
        if self.automaton != NULL and (scan(self, out, base) < 0 or release(self, out) < 0):
            raise MemoryError
        self.ended = True
        return self.stopped


cdef uint32_t *copy_ids(token_ids, Py_ssize_t n) except NULL:
    """Token ids as C integers, to be freed; what no vocabulary can hold becomes an id that none does."""
    cdef int64_t value
    cdef Py_ssize_t i = 0
    cdef uint32_t *ids = <uint32_t *>malloc(max(n, 1) * sizeof(uint32_t))
    if ids == NULL:
        raise MemoryError
    memset(ids, 0xFF, n * sizeof(uint32_t))
    try:
        for token in token_ids:
            if i == n:  # longer than it said
                break
            value = token
            if 0 <= value < 0xFFFFFFFF:
                ids[i] = <uint32_t>value
            i += 1
    except BaseException:
        free(ids)
        raise
    return ids


cdef int continue_prompt(Detokenizer self, token_ids) except -1:
    """Bring the stream into the state in which the prompt leaves it; its text goes nowhere."""
    cdef Buffer dropped = Buffer(NULL, 0, 0)
    cdef Py_ssize_t i, n = len(token_ids), seam
    cdef size_t size = 0
    cdef uint32_t *ids
    cdef const Piece *piece
    if n > PROMPT_TAIL:
        token_ids = token_ids[n - PROMPT_TAIL:]
        n = PROMPT_TAIL
        self.first = False  # some of all those tokens were visible
        self.strip_left = 0
    seam = n
    ids = copy_ids(token_ids, n)
    try:
        if self.mode == LIBRARY:
            for i in range(n):
                put_library(self, ids[i], &dropped)
            self.unknown = 0
            return 0
        # Back to a token at which the state no longer depends on what was before it.
        while seam > 0:
            seam -= 1
            if is_visible(self, ids[seam]):
                piece = &self.pieces[ids[seam]]
                size += piece.size
                if size >= 3 if self.mode == BYTES else not piece.flags & BYTE:
                    break
        for i in range(seam):
            if is_visible(self, ids[i]):
                self.first = False
                self.strip_left = 0
                break
        for i in range(seam, n):
            if put_token(self, ids[i], &dropped) < 0:
                raise MemoryError
        if put_stripped(self, self.run, self.run_size, &dropped) < 0:  # the prompt's, though its run goes on
            raise MemoryError
        self.run_size = 0
        self.pending_prompt = self.pending_size
        self.unknown = 0
        self.last_added = is_visible(self, ids[n - 1]) and self.pieces[ids[n - 1]].flags & ADDED
    finally:
        free(ids)
        buffer_free(&dropped)
    return 0


# ------------------------------------------------------------------------------- tokens to text, without GIL

cdef inline bint is_visible(Detokenizer self, uint32_t token) noexcept nogil:
    return token < self.count and not self.pieces[token].flags & self.hidden


cdef bint follows_added(Detokenizer self, uint32_t token) noexcept nogil:
    """An added token after an added token; keeps track of it."""
    cdef bint before = self.last_added
    self.last_added = is_visible(self, token) and self.pieces[token].flags & ADDED
    return before and self.last_added


cdef int put_library(Detokenizer self, uint32_t token, Buffer *out) except -1:
    if token >= self.count or self.pieces[token].flags & UNKNOWN:
        self.unknown += 1
        return 0
    return put_text(self, self.library.step(token), out)


cdef int put_text(Detokenizer self, bytes text, Buffer *out) except -1:
    if buffer_append(out, <const uint8_t *><const char *>text, len(text)) < 0:
        raise MemoryError
    return 0


cdef int put_token(Detokenizer self, uint32_t token, Buffer *out) noexcept nogil:
    cdef const Piece *piece
    if token >= self.count:
        self.unknown += 1
        return 0
    piece = &self.pieces[token]
    if piece.flags & self.hidden:
        self.unknown += piece.flags & UNKNOWN
        return 0
    if self.mode == BYTES:
        if self.pending_size == 0 and piece.flags & WHOLE:
            return buffer_append(out, self.text + piece.start, piece.size)
        return put_bytes(self, self.text + piece.start, piece.size, out)
    if piece.flags & BYTE:
        return put_run_byte(self, piece.byte, out)
    if self.run_open and end_pending(self, out) < 0:
        return -1
    if self.first:
        self.first = False
        return put_stripped(self, self.text + piece.first_start, piece.first_size, out)
    return put_stripped(self, self.text + piece.start, piece.size, out)


cdef int put_stripped(Detokenizer self, const uint8_t *text, size_t size, Buffer *out) noexcept nogil:
    while self.strip_left and size:
        if size < self.table.strip_size or memcmp(text, self.table.strip_char, self.table.strip_size) != 0:
            self.strip_left = 0
            break
        text += self.table.strip_size
        size -= self.table.strip_size
        self.strip_left -= 1
    return buffer_append(out, text, size)


cdef int put_bytes(Detokenizer self, const uint8_t *data, size_t size, Buffer *out) noexcept nogil:
    """Bytes of BYTES mode: characters as they are, one U+FFFD per maximal invalid part, as Rust has it."""
    cdef uint8_t joined[8]
    cdef size_t more, done = 0, given = 0
    cdef int step
    if self.pending_size:
        more = min(size, <size_t>(4 - self.pending_size))
        memcpy(joined, self.pending, self.pending_size)
        memcpy(joined + self.pending_size, data, more)
        step = utf8_step(joined, self.pending_size + more)
        if step == 0:
            memcpy(self.pending + self.pending_size, data, more)
            self.pending_size += <uint8_t>more
            return 0
        if step > 0:
            if buffer_append(out, joined, step) < 0:
                return -1
        elif -step > self.pending_prompt and buffer_append(out, REPLACEMENT, 3) < 0:
            return -1
        done = given = <size_t>(step if step > 0 else -step) - self.pending_size
        self.pending_size = self.pending_prompt = 0
    while done < size:
        step = utf8_step(data + done, size - done)
        if step > 0:
            done += step
            continue
        if buffer_append(out, data + given, done - given) < 0:
            return -1
        if step == 0:
            self.pending_size = <uint8_t>(size - done)
            memcpy(self.pending, data + done, self.pending_size)
            return 0
        if buffer_append(out, REPLACEMENT, 3) < 0:
            return -1
        done = given = done - step
    return buffer_append(out, data + given, done - given)


cdef int put_run_byte(Detokenizer self, uint8_t byte, Buffer *out) noexcept nogil:
    """One byte-fallback token. A run of them is text if all of it is UTF-8, else U+FFFD for each byte."""
    cdef int step
    self.run_open = True
    self.first = False
    if self.run_bad:
        return put_stripped(self, REPLACEMENT, 3, out)
    self.pending[self.pending_size] = byte
    self.pending_size += 1
    step = utf8_step(self.pending, self.pending_size)
    if step < 0:
        return spoil_run(self, out)
    if step > 0:
        memcpy(self.run + self.run_size, self.pending, step)
        self.run_size += <uint16_t>step
        self.pending_size = self.pending_prompt = 0
        if self.run_size >= RUN_HELD:
            step = put_stripped(self, self.run, self.run_size, out)
            self.run_size = 0
            return min(step, 0)
    return 0


cdef int spoil_run(Detokenizer self, Buffer *out) noexcept nogil:
    cdef int i, count = self.run_size + self.pending_size - self.pending_prompt
    self.run_bad = True
    self.run_size = self.pending_size = self.pending_prompt = 0
    for i in range(count):
        if put_stripped(self, REPLACEMENT, 3, out) < 0:
            return -1
    return 0


cdef int end_pending(Detokenizer self, Buffer *out) noexcept nogil:
    """Nothing follows that could complete a character or a run of bytes."""
    cdef int status = 0
    if self.mode == BYTES:
        if self.pending_size > self.pending_prompt:
            status = buffer_append(out, REPLACEMENT, 3)
    elif self.pending_size:
        status = spoil_run(self, out)
    else:
        status = put_stripped(self, self.run, self.run_size, out)
    self.pending_size = self.pending_prompt = 0
    self.run_size = 0
    self.run_open = self.run_bad = False
    return status


cdef int utf8_step(const uint8_t *data, size_t size) noexcept nogil:
    """What `data` begins with. n > 0: a character of n bytes; 0: the beginning of one, to the end of `data`;
    -n: an invalid part of n bytes, as long as it could have become a character (Unicode 3.9)."""
    cdef uint8_t lead = data[0], low = 0x80, high = 0xBF
    cdef int length, i
    if lead < 0x80:
        return 1
    if lead < 0xC2 or lead > 0xF4:
        return -1
    if lead < 0xE0:
        length = 2
    elif lead < 0xF0:
        length = 3
        if lead == 0xE0:
            low = 0xA0
        elif lead == 0xED:  # surrogates
            high = 0x9F
    else:
        length = 4
        if lead == 0xF0:
            low = 0x90
        elif lead == 0xF4:
            high = 0x8F
    for i in range(1, length):
        if <size_t>i == size:
            return 0
        if not low <= data[i] <= high:
            return -i
        low, high = 0x80, 0xBF
    return length


# -------------------------------------------------------------------------------- stop strings, without GIL

cdef int scan(Detokenizer self, Buffer *out, size_t base) noexcept nogil:
    """Take the text from `base` on through the stops: what was held comes back, what is to be held goes."""
    cdef const Automaton *stops = self.automaton
    cdef size_t size = out.size - base, i = 0
    cdef uint16_t before = self.state, state = self.state
    cdef uint64_t origin = self.position - stops.depth[before]  # where the held text begins
    cdef const uint8_t *text = out.data + base
    cdef int16_t match
    while i < size:
        state = stops.next[state * stops.width + stops.classes[text[i]]]
        i += 1
        match = stops.match[state]
        if match < 0 and self.found < 0:
            continue
        if match >= 0 and (self.found < 0 or self.position + i - stops.sizes[match] < self.found_start):
            self.found = match
            self.found_end = self.position + i
            self.found_start = self.found_end - stops.sizes[match]
        # Final once nothing that began earlier is still under way.
        if self.position + i - stops.depth[state] >= self.found_start:
            return end_with_stop(self, out, base, before, origin)
    self.position += size
    self.state = state
    return cut(self, out, base, before, <size_t>(self.position - stops.depth[state] - origin))


cdef int release(Detokenizer self, Buffer *out) noexcept nogil:
    """The text is over: what was held can become no stop any more, or is one already."""
    cdef uint16_t depth = self.automaton.depth[self.state]
    if self.found >= 0:
        return end_with_stop(self, out, out.size, self.state, self.position - depth)
    return cut(self, out, out.size, self.state, depth)


cdef int end_with_stop(
    Detokenizer self, Buffer *out, size_t base, uint16_t held, uint64_t origin
) noexcept nogil:
    cdef uint64_t end = self.found_end if self.keep_stop else self.found_start
    self.stopped = self.ended = True
    return cut(self, out, base, held, <size_t>(end - origin))


cdef int cut(Detokenizer self, Buffer *out, size_t base, uint16_t held, size_t keep) noexcept nogil:
    """Make the text from `base` on the first `keep` bytes of: what state `held` held back, then that text."""
    cdef size_t depth = self.automaton.depth[held]
    if depth:
        if buffer_reserve(out, depth) < 0:
            return -1
        memmove(out.data + base + depth, out.data + base, out.size - base)
        memcpy(out.data + base, self.automaton.text + self.automaton.start[held], depth)
    out.size = base + keep
    return 0
