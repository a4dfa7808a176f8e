# The checked cursor that every compiled decoder is built on.
#
# Each read checks the bound and the type before it moves. A read returns OK, or a negative Status and leaves
# `at` on the first byte of the value it refused, so that the caller can say where and what it is. Nothing
# here allocates, and a header whose count or length cannot fit in the bytes that are left is refused at once.
#
# Format: the msgpack specification. Lead bytes: 00-7f fixint, 80-8f fixmap, 90-9f fixarray, a0-bf fixstr,
# c0 nil, c1 reserved, c2/c3 bool, c4-c6 bin, c7-c9 ext, ca/cb float, cc-cf uint, d0-d3 int, d4-d8 fixext,
# d9-db str, dc/dd array, de/df map, e0-ff negative fixint.

from libc.stdint cimport UINT32_MAX, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef enum Status:
    OK = 0
    TRUNCATED = -1       # the value goes on past the end
    WRONG_TYPE = -2      # another type than asked for, or the reserved byte c1
    NEGATIVE = -3        # an integer below zero where none may be
    OVER_RANGE = -4      # an integer over the range asked for
    BAD_TEXT = -5        # text that is not UTF-8
    TOO_DEEP = -6        # containers nested deeper than MAX_DEPTH

cdef enum:
    MAX_DEPTH = 64       # non-empty containers inside each other that `skip` follows

cdef struct Cursor:
    const uint8_t *at    # next byte to read
    const uint8_t *end   # one past the last byte


cdef inline size_t remaining(const Cursor *c) noexcept nogil:
    return <size_t>(c.end - c.at)


# Big-endian loads; the compiler makes each a load and a byte swap.

cdef inline uint16_t load_u16(const uint8_t *p) noexcept nogil:
    return <uint16_t>((<uint32_t>p[0] << 8) | p[1])


cdef inline uint32_t load_u32(const uint8_t *p) noexcept nogil:
    return (<uint32_t>p[0] << 24) | (<uint32_t>p[1] << 16) | (<uint32_t>p[2] << 8) | p[3]


cdef inline uint64_t load_u64(const uint8_t *p) noexcept nogil:
    return (
        (<uint64_t>p[0] << 56) | (<uint64_t>p[1] << 48) | (<uint64_t>p[2] << 40) | (<uint64_t>p[3] << 32)
        | (<uint64_t>p[4] << 24) | (<uint64_t>p[5] << 16) | (<uint64_t>p[6] << 8) | p[7]
    )


# Integers

cdef inline int read_integer(Cursor *c, uint64_t *magnitude, bint *negative) noexcept nogil:
    """Any msgpack integer. A negative one comes as its two's complement in `magnitude`."""
    cdef size_t left = remaining(c)
    cdef uint8_t lead
    cdef size_t width
    cdef int64_t signed_value
    if left == 0:
        return TRUNCATED
    lead = c.at[0]
    if lead < 0x80:
        magnitude[0] = lead
        negative[0] = False
        c.at += 1
        return OK
    if lead >= 0xE0:
        magnitude[0] = <uint64_t><int64_t><int8_t>lead
        negative[0] = True
        c.at += 1
        return OK
    if lead < 0xCC or lead > 0xD3:
        return WRONG_TYPE
    width = 1 << (lead & 3)
    if left < 1 + width:
        return TRUNCATED
    if lead < 0xD0:
        negative[0] = False
        if lead == 0xCC:
            magnitude[0] = c.at[1]
        elif lead == 0xCD:
            magnitude[0] = load_u16(c.at + 1)
        elif lead == 0xCE:
            magnitude[0] = load_u32(c.at + 1)
        else:
            magnitude[0] = load_u64(c.at + 1)
    else:
        if lead == 0xD0:
            signed_value = <int8_t>c.at[1]
        elif lead == 0xD1:
            signed_value = <int16_t>load_u16(c.at + 1)
        elif lead == 0xD2:
            signed_value = <int32_t>load_u32(c.at + 1)
        else:
            signed_value = <int64_t>load_u64(c.at + 1)
        negative[0] = signed_value < 0
        magnitude[0] = <uint64_t>signed_value
    c.at += 1 + width
    return OK


cdef inline int read_u64(Cursor *c, uint64_t *value) noexcept nogil:
    """An integer in 0..2**64-1, in any encoding that can hold it."""
    cdef const uint8_t *start = c.at
    cdef bint negative = False
    cdef int status = read_integer(c, value, &negative)
    if status == OK and negative:
        c.at = start
        return NEGATIVE
    return status


cdef inline int read_u32(Cursor *c, uint32_t *value) noexcept nogil:
    """An integer in 0..2**32-1, in any encoding that can hold it."""
    cdef const uint8_t *start = c.at
    cdef uint64_t wide = 0
    cdef int status = read_u64(c, &wide)
    if status == OK and wide > UINT32_MAX:
        c.at = start
        return OVER_RANGE
    value[0] = <uint32_t>wide
    return status


cdef inline int read_i64(Cursor *c, int64_t *value) noexcept nogil:
    """An integer in -2**63..2**63-1, in any encoding that can hold it."""
    cdef const uint8_t *start = c.at
    cdef bint negative = False
    cdef uint64_t magnitude = 0
    cdef int status = read_integer(c, &magnitude, &negative)
    if status == OK and not negative and magnitude > <uint64_t>0x7FFFFFFFFFFFFFFF:
        c.at = start
        return OVER_RANGE
    value[0] = <int64_t>magnitude
    return status


# Other scalars

cdef inline bint take_nil(Cursor *c) noexcept nogil:
    """True, and past it, when the next value is nil."""
    if c.at < c.end and c.at[0] == 0xC0:
        c.at += 1
        return True
    return False


cdef inline int read_bool(Cursor *c, bint *value) noexcept nogil:
    if c.at >= c.end:
        return TRUNCATED
    if c.at[0] != 0xC2 and c.at[0] != 0xC3:
        return WRONG_TYPE
    value[0] = c.at[0] == 0xC3
    c.at += 1
    return OK


cdef inline int read_float(Cursor *c, double *value) noexcept nogil:
    """A float of either width, or an integer, which the engines' own decoders take for a float as well."""
    cdef size_t left = remaining(c)
    cdef uint64_t bits = 0
    cdef uint32_t half
    cdef float narrow
    cdef bint negative = False
    cdef int status
    if left == 0:
        return TRUNCATED
    if c.at[0] == 0xCB:
        if left < 9:
            return TRUNCATED
        bits = load_u64(c.at + 1)
        memcpy(value, &bits, 8)
        c.at += 9
        return OK
    if c.at[0] == 0xCA:
        if left < 5:
            return TRUNCATED
        half = load_u32(c.at + 1)
        memcpy(&narrow, &half, 4)
        value[0] = narrow
        c.at += 5
        return OK
    status = read_integer(c, &bits, &negative)
    if status == OK:
        value[0] = <double><int64_t>bits if negative else <double>bits
    return status


# Headers and byte spans

cdef inline int read_header(
    Cursor *c, uint8_t fix_lead, uint8_t fix_mask, uint8_t wide_lead, size_t unit, uint32_t *count
) noexcept nogil:
    """A fix, 16-bit or 32-bit header whose `count` parts take at least `unit` bytes each."""
    cdef size_t left = remaining(c)
    cdef size_t size
    cdef uint32_t parts
    cdef uint8_t lead
    if left == 0:
        return TRUNCATED
    lead = c.at[0]
    if (lead & ~fix_mask) == fix_lead:
        parts = lead & fix_mask
        size = 1
    elif lead == wide_lead:
        if left < 3:
            return TRUNCATED
        parts = load_u16(c.at + 1)
        size = 3
    elif lead == wide_lead + 1:
        if left < 5:
            return TRUNCATED
        parts = load_u32(c.at + 1)
        size = 5
    else:
        return WRONG_TYPE
    if <uint64_t>parts * unit > left - size:
        return TRUNCATED
    count[0] = parts
    c.at += size
    return OK


cdef inline int read_array(Cursor *c, uint32_t *count) noexcept nogil:
    """The header of an array; its `count` elements follow."""
    return read_header(c, 0x90, 0x0F, 0xDC, 1, count)


cdef inline int read_map(Cursor *c, uint32_t *pairs) noexcept nogil:
    """The header of a map; `pairs` keys and values follow in turn."""
    return read_header(c, 0x80, 0x0F, 0xDE, 2, pairs)


cdef inline int read_text(Cursor *c, const uint8_t **start, uint32_t *size) noexcept nogil:
    """The bytes of a str, not yet checked to be UTF-8 (`valid_utf8` does that)."""
    cdef const uint8_t *head = c.at
    cdef int status
    if c.at < c.end and c.at[0] == 0xD9:
        if remaining(c) < 2 or remaining(c) - 2 < c.at[1]:
            return TRUNCATED
        size[0] = c.at[1]
        c.at += 2
    else:
        status = read_header(c, 0xA0, 0x1F, 0xDA, 1, size)
        if status != OK:
            c.at = head
            return status
    start[0] = c.at
    c.at += size[0]
    return OK


cdef inline int read_bin(Cursor *c, const uint8_t **start, uint32_t *size) noexcept nogil:
    """The bytes of a bin."""
    cdef size_t left = remaining(c)
    cdef size_t head
    cdef uint32_t length
    if left == 0:
        return TRUNCATED
    if c.at[0] < 0xC4 or c.at[0] > 0xC6:
        return WRONG_TYPE
    head = 1 + (1 << (c.at[0] - 0xC4))
    if left < head:
        return TRUNCATED
    length = c.at[1] if head == 2 else load_u16(c.at + 1) if head == 3 else load_u32(c.at + 1)
    if left - head < length:
        return TRUNCATED
    start[0] = c.at + head
    size[0] = length
    c.at += head + length
    return OK


cdef inline int read_ext(Cursor *c, int8_t *code, const uint8_t **start, uint32_t *size) noexcept nogil:
    """The type code and the bytes of an ext."""
    cdef size_t left = remaining(c)
    cdef size_t head
    cdef uint32_t length
    cdef uint8_t lead
    if left == 0:
        return TRUNCATED
    lead = c.at[0]
    if 0xD4 <= lead <= 0xD8:
        head = 2
        if left < head:
            return TRUNCATED
        length = 1 << (lead - 0xD4)
    elif 0xC7 <= lead <= 0xC9:
        head = 2 + (1 << (lead - 0xC7))
        if left < head:
            return TRUNCATED
        length = c.at[1] if head == 3 else load_u16(c.at + 1) if head == 4 else load_u32(c.at + 1)
    else:
        return WRONG_TYPE
    if left - head < length:
        return TRUNCATED
    code[0] = <int8_t>c.at[head - 1]
    start[0] = c.at + head
    size[0] = length
    c.at += head + length
    return OK


# Whole values

cdef inline int skip(Cursor *c) noexcept nogil:
    """Past one well-formed value of any type, without recursion."""
    cdef uint32_t pending[MAX_DEPTH + 1]   # values to come at each level, keys of maps included
    cdef uint64_t children
    cdef uint32_t length
    cdef const uint8_t *start = c.at
    cdef const uint8_t *span
    cdef int8_t code
    cdef uint8_t lead
    cdef int depth = 0
    cdef int status
    pending[0] = 1
    while True:
        if c.at >= c.end:
            status = TRUNCATED
            break
        pending[depth] -= 1
        lead = c.at[0]
        children = 0
        status = OK
        if lead < 0x80 or lead >= 0xE0 or lead == 0xC0 or lead == 0xC2 or lead == 0xC3:
            c.at += 1
        elif (lead & 0xF0) == 0x90 or lead == 0xDC or lead == 0xDD:
            status = read_array(c, &length)
            children = length
        elif (lead & 0xF0) == 0x80 or lead == 0xDE or lead == 0xDF:
            status = read_map(c, &length)
            children = 2 * <uint64_t>length
        elif lead < 0xC0 or 0xD9 <= lead <= 0xDB:
            status = read_text(c, &span, &length)
        elif 0xC4 <= lead <= 0xC6:
            status = read_bin(c, &span, &length)
        elif lead == 0xCA or lead == 0xCB:
            length = 5 if lead == 0xCA else 9
            if remaining(c) < length:
                status = TRUNCATED
            else:
                c.at += length
        elif 0xCC <= lead <= 0xD3:
            length = 1 + (1 << (lead & 3))
            if remaining(c) < length:
                status = TRUNCATED
            else:
                c.at += length
        else:
            status = read_ext(c, &code, &span, &length)
        if status == OK and children:
            if depth == MAX_DEPTH:
                status = TOO_DEEP
            elif children > UINT32_MAX:
                status = TRUNCATED
            else:
                depth += 1
                pending[depth] = <uint32_t>children
        if status != OK:
            break
        while depth > 0 and pending[depth] == 0:
            depth -= 1
        if pending[depth] == 0:
            return OK
    if status != WRONG_TYPE:   # then `at` is already on the byte that is none
        c.at = start
    return status


cdef inline bint valid_utf8(const uint8_t *p, size_t size) noexcept nogil:
    """Strict UTF-8 (RFC 3629): no overlong form, no surrogate, nothing over U+10FFFF."""
    cdef const uint8_t *end = p + size
    cdef uint64_t eight
    cdef uint8_t lead, low, high
    cdef int follow
    while p < end:
        if end - p >= 8:
            memcpy(&eight, p, 8)
            if (eight & <uint64_t>0x8080808080808080) == 0:
                p += 8
                continue
        lead = p[0]
        p += 1
        if lead < 0x80:
            continue
        # The first continuation byte carries the limits; the others are 80..bf.
        low, high = 0x80, 0xBF
        if 0xC2 <= lead <= 0xDF:
            follow = 1
        elif 0xE0 <= lead <= 0xEF:
            follow = 2
            if lead == 0xE0:
                low = 0xA0
            elif lead == 0xED:
                high = 0x9F
        elif 0xF0 <= lead <= 0xF4:
            follow = 3
            if lead == 0xF0:
                low = 0x90
            elif lead == 0xF4:
                high = 0x8F
        else:
            return False
        if end - p < follow or p[0] < low or p[0] > high:
            return False
        p += 1
        follow -= 1
        while follow:
            if (p[0] & 0xC0) != 0x80:
                return False
            p += 1
            follow -= 1
    return True


cdef inline int read_valid_text(Cursor *c, const uint8_t **start, uint32_t *size) noexcept nogil:
    """The bytes of a str that is valid UTF-8."""
    cdef const uint8_t *head = c.at
    cdef int status = read_text(c, start, size)
    if status == OK and not valid_utf8(start[0], size[0]):
        c.at = head
        return BAD_TEXT
    return status
