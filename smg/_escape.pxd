# JSON strings from UTF-8, in C: how long the escaped text is, and the text.

from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcpy

cdef extern from *:
    """
    // Bytes at which an escape may be due: control characters, the quote, the backslash, and what U+0085, U+2028,
    // U+2029 and surrogates begin with.
    static const unsigned char smg_awkward[256] = {
        [0x00 ... 0x1f] = 1, [0x22] = 1, [0x5c] = 1, [0xc2] = 1, [0xe2] = 1, [0xed] = 1,
    };
    """
    const uint8_t *awkward "smg_awkward"


cdef inline uint8_t hex_digit(uint32_t value) noexcept nogil:
    """The lower-case digit of the low four bits."""
    value &= 15
    return <uint8_t>(value + (0x30 if value < 10 else 0x57))


cdef inline uint32_t wide_escape(const uint8_t *text, Py_ssize_t size, Py_ssize_t i) noexcept nogil:
    """The code unit at `i` when it is one that line splitters or JSON readers trip over, else 0.

    U+0085, U+2028 and U+2029 end a line for some readers of server-sent events; a surrogate is not UTF-8.
    """
    cdef uint8_t c = text[i]
    if c == 0xc2 and i + 1 < size and text[i + 1] == 0x85:
        return 0x85
    if i + 2 < size:
        if c == 0xe2 and text[i + 1] == 0x80 and (text[i + 2] == 0xa8 or text[i + 2] == 0xa9):
            return 0x2028 + (text[i + 2] - 0xa8)
        if c == 0xed and text[i + 1] >= 0xa0:
            return 0xd000 | (text[i + 1] & 0x3f) << 6 | (text[i + 2] & 0x3f)
    return 0


cdef inline uint8_t short_escape(uint8_t c) noexcept nogil:
    """What follows the backslash where JSON has an escape of two characters for `c`, else 0."""
    if c == 0x22 or c == 0x5c:
        return c
    if c == 0x0a:
        return b"n"
    if c == 0x0d:
        return b"r"
    if c == 0x09:
        return b"t"
    if c == 0x08:
        return b"b"
    if c == 0x0c:
        return b"f"
    return 0


cdef inline Py_ssize_t plain_size(const uint8_t *text, Py_ssize_t size) noexcept nogil:
    """Bytes up to the first that may need an escape; most texts have none."""
    cdef Py_ssize_t i = 0
    while i < size and not awkward[text[i]]:
        i += 1
    return i


cdef inline Py_ssize_t escape_size(const uint8_t *text, Py_ssize_t size) noexcept nogil:
    """Bytes that `escape_into` will write."""
    cdef Py_ssize_t i = plain_size(text, size), total = size
    cdef uint8_t c
    while i < size:
        c = text[i]
        if short_escape(c):
            total += 1
        elif c < 0x20:
            total += 5
        elif wide_escape(text, size, i):
            total += 4 if c == 0xc2 else 3
            i += 1 if c == 0xc2 else 2
        i += 1
        i += plain_size(text + i, size - i)
    return total


cdef inline char *escape_into(char *out, const uint8_t *text, Py_ssize_t size) noexcept nogil:
    """Write `text` as the inside of a JSON string; returns the end."""
    cdef Py_ssize_t i = 0, run
    cdef uint32_t unit
    cdef uint8_t c, letter
    while i < size:
        run = plain_size(text + i, size - i)
        memcpy(out, text + i, run)
        out += run
        i += run
        if i == size:
            break
        c = text[i]
        letter = short_escape(c)
        unit = c if c < 0x20 else wide_escape(text, size, i)
        if letter:
            out[0] = 0x5c
            out[1] = <char>letter
            out += 2
        elif c < 0x20 or unit:
            out[0] = 0x5c
            out[1] = b"u"
            out[2] = hex_digit(unit >> 12)
            out[3] = hex_digit(unit >> 8)
            out[4] = hex_digit(unit >> 4)
            out[5] = hex_digit(unit)
            out += 6
            if c >= 0x20:
                i += 1 if c == 0xc2 else 2
        else:
            out[0] = <char>c
            out += 1
        i += 1
    return out
