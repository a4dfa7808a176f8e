# The parts of a Batch's life that every compiled decoder shares: memory, faults, wire ids, reasons.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset

from smg._frame cimport FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, FINISH_NONE, FINISH_OTHER, \
    FINISH_REPETITION, FINISH_STOP, WAVE_NONE, Aside, Batch, Cold, Extra, Fault, Part, Row
from smg._msgpack cimport BAD_TEXT, NEGATIVE, OVER_RANGE, TOO_DEEP, WRONG_TYPE, Cursor, load_u64


# Memory. A decoder asks once for room for as much of each thing as the bytes that are left in the frame can hold,
# before it reads the first, so that nothing grows or moves while it reads.

cdef inline void batch_init(Batch *batch) noexcept nogil:
    memset(batch, 0, sizeof(Batch))


cdef inline void batch_free(Batch *batch) noexcept nogil:
    free(batch.rows)
    free(batch.asides)
    free(batch.tokens)
    free(batch.extras)
    free(batch.colds)
    batch_init(batch)


cdef inline size_t batch_bytes(const Batch *batch) noexcept nogil:
    """The memory that it has."""
    return (
        batch.row_capacity * sizeof(Row) + batch.aside_capacity * sizeof(Aside)
        + batch.token_capacity * sizeof(uint32_t) + batch.extra_capacity * sizeof(Extra)
        + batch.cold_capacity * sizeof(Cold)
    )


cdef inline void batch_clear(Batch *batch) noexcept nogil:
    """Empty, with the memory kept for the next message."""
    batch.row_count = 0
    batch.token_count = 0
    batch.extra_count = 0
    batch.cold_count = 0
    batch.has_logprobs = False
    batch.deltas = False
    batch.wave = WAVE_NONE
    batch.wave_number = 0
    batch.utility_call = 0
    batch.finished.start = batch.finished.size = 0
    batch.utility.start = batch.utility.size = 0
    batch.weight_version.start = batch.weight_version.size = 0
    batch.has_engine_index = False
    batch.has_load = False
    batch.engine_index = 0
    batch.running = 0
    batch.waiting = 0
    batch.kv_usage = 0


cdef inline bint reserve_rows(Batch *batch, uint32_t count) noexcept nogil:
    """Room for `count` rows and one at least; False when memory is out. They hold old values, or zeros."""
    count = count or 1
    if count > batch.row_capacity:
        free(batch.rows)
        batch.rows = <Row *>calloc(count, sizeof(Row))
        batch.row_capacity = count if batch.rows != NULL else 0
    return count <= batch.row_capacity


cdef inline bint reserve(void **items, uint32_t *capacity, uint32_t count, size_t size) noexcept nogil:
    """Room for `count` items of that size, contents undefined; False when memory is out."""
    if count > capacity[0]:
        free(items[0])
        items[0] = malloc(count * size)
        capacity[0] = count if items[0] != NULL else 0
    return count <= capacity[0]


cdef inline bint reserve_asides(Batch *batch, uint32_t count) noexcept nogil:
    return reserve(<void **>&batch.asides, &batch.aside_capacity, count, sizeof(Aside))


cdef inline bint reserve_tokens(Batch *batch, uint32_t count) noexcept nogil:
    return reserve(<void **>&batch.tokens, &batch.token_capacity, count, sizeof(uint32_t))


cdef inline bint reserve_extras(Batch *batch, uint32_t count) noexcept nogil:
    return reserve(<void **>&batch.extras, &batch.extra_capacity, count, sizeof(Extra))


cdef inline bint reserve_colds(Batch *batch, uint32_t count) noexcept nogil:
    return reserve(<void **>&batch.colds, &batch.cold_capacity, count, sizeof(Cold))


cdef inline Extra *extra_of(Batch *batch, uint32_t row) noexcept nogil:
    """The extra of the row that is being read, a new one when it has none yet."""
    cdef Extra *extra
    if batch.extra_count and batch.extras[batch.extra_count - 1].row == row:
        return &batch.extras[batch.extra_count - 1]
    extra = &batch.extras[batch.extra_count]
    memset(extra, 0, sizeof(Extra))
    extra.row = row
    extra.first_cold = batch.cold_count
    batch.extra_count += 1
    return extra


cdef inline Cold *new_cold(Batch *batch, uint32_t row) noexcept nogil:
    """A cold entry of the row that is being read, contents undefined."""
    extra_of(batch, row).cold_count += 1
    batch.cold_count += 1
    return &batch.colds[batch.cold_count - 1]


# Cold entries outlive the message as a run of msgpack values: the kind as an integer, the value, and for each
# of its arrays that is in a part of its own, that part as a bin.

cdef enum:
    COLD_KIND_BYTES = 1
    BIN_HEADER_BYTES = 5


cdef inline size_t cold_bytes(const Cold *cold, const Part *parts) noexcept nogil:
    """What `write_cold` writes."""
    cdef size_t total = COLD_KIND_BYTES + cold.value.size
    cdef uint32_t i
    for i in range(cold.aux_count):
        total += BIN_HEADER_BYTES + parts[cold.aux[i]].size
    return total


cdef inline void write_cold(const Cold *cold, const Part *parts, uint8_t *at) noexcept nogil:
    """`cold_bytes` bytes at `at`, from the parts of the message that was decoded."""
    cdef const Part *part
    cdef uint32_t i
    at[0] = cold.kind
    memcpy(at + COLD_KIND_BYTES, parts[0].data + cold.value.start, cold.value.size)
    at += COLD_KIND_BYTES + cold.value.size
    for i in range(cold.aux_count):
        part = &parts[cold.aux[i]]
        at[0], at[1], at[2] = 0xC6, <uint8_t>(part.size >> 24), <uint8_t>(part.size >> 16)
        at[3], at[4] = <uint8_t>(part.size >> 8), <uint8_t>part.size
        memcpy(at + BIN_HEADER_BYTES, part.data, part.size)
        at += BIN_HEADER_BYTES + part.size


# Faults. `what` is a format for Python's str.format with {found}, {expected} and {kind}, the name of the type
# whose lead byte is `found`; `fault_error` in smg/_decoded.py fills it in.

cdef inline int fail(
    Batch *batch, const char *column, int64_t row, const char *what,
    uint64_t found, uint64_t expected, size_t offset
) noexcept nogil:
    """Put the fault down and return -1, for `return fail(...)`."""
    batch_clear(batch)
    batch.fault.column = column
    batch.fault.what = what
    batch.fault.row = row
    batch.fault.found = found
    batch.fault.expected = expected
    batch.fault.offset = <uint32_t>offset
    return -1


cdef inline int fail_read(
    Batch *batch, const char *column, int64_t row, int status, const char *wanted,
    const Cursor *c, const uint8_t *frame
) noexcept nogil:
    """`fail` for a read that was refused; `wanted` is the text for a wrong type."""
    cdef const char *what = b"goes on past the end of the frame"
    cdef uint64_t found = 0
    if status == WRONG_TYPE:
        what, found = wanted, c.at[0]
    elif status == NEGATIVE:
        what = b"is negative"
    elif status == OVER_RANGE:
        what = b"is over 4294967295"
    elif status == BAD_TEXT:
        what = b"is not valid UTF-8"
    elif status == TOO_DEEP:
        what = b"is nested deeper than 64 levels"
    return fail(batch, column, row, what, found, 0, c.at - frame)


cdef inline object fault_parts(const Fault *fault):
    """(column, what, row, found, expected, offset), as `fault_error` in smg/_decoded.py takes them."""
    column, what = fault.column.decode("ascii"), fault.what.decode("ascii")
    return column, what, fault.row, fault.found, fault.expected, fault.offset


# Wire ids: <epoch:08x><slot:08x><generation:08x>, optionally '-' and 1 to 32 characters of [A-Za-z0-9._-].

cdef enum:
    WIRE_ID_DIGITS = 24
    WIRE_ID_LONGEST = 24 + 1 + 32


cdef inline uint64_t hex8(const uint8_t *p, uint32_t *value) noexcept nogil:
    """Eight lower-case hex digits, all at once. Returns 0 when they all are."""
    cdef uint64_t ones = 0x0101010101010101
    cdef uint64_t text = load_u64(p)
    cdef uint64_t letter = (text >> 6) & ones                  # bit 6 tells 'a'..'f' from '0'..'9'
    cdef uint64_t nibble = (text & (0x0F * ones)) + 9 * letter
    cdef uint64_t over_nine = ((nibble + 0x76 * ones) >> 7) & ones
    # Written back as text, the nibbles must give what was read; that and their range are the whole check.
    cdef uint64_t wrong = ((nibble + 0x30 * ones + 0x27 * over_nine) ^ text) | (nibble & (0xF0 * ones))
    nibble = (nibble | (nibble >> 4)) & <uint64_t>0x00FF00FF00FF00FF
    nibble = (nibble | (nibble >> 8)) & <uint64_t>0x0000FFFF0000FFFF
    value[0] = <uint32_t>(nibble | (nibble >> 16))
    return wrong


cdef inline bint parse_digits(const uint8_t *p, Row *row) noexcept nogil:
    """The 24 digits at `p` into the row; False when they are not all lower-case hex digits."""
    cdef uint64_t wrong = hex8(p, &row.epoch)
    wrong |= hex8(p + 8, &row.slot)
    wrong |= hex8(p + 16, &row.generation)
    return wrong == 0


cdef inline void parse_wire_id(const uint8_t *p, size_t size, Row *row) noexcept nogil:
    """Fill epoch, slot, generation and `ours` from the bytes of any request id."""
    cdef size_t i
    cdef uint8_t byte
    cdef bint ours = size == WIRE_ID_DIGITS or WIRE_ID_DIGITS + 2 <= size <= WIRE_ID_LONGEST
    if ours:
        ours = parse_digits(p, row)
    if ours and size > WIRE_ID_DIGITS:
        ours = p[WIRE_ID_DIGITS] == c"-"
        for i in range(WIRE_ID_DIGITS + 1, size):
            byte = p[i]
            ours = ours and (
                c"a" <= byte <= c"z" or c"A" <= byte <= c"Z" or c"0" <= byte <= c"9"
                or byte == c"." or byte == c"_" or byte == c"-"
            )
    if not ours:
        row.epoch = row.slot = row.generation = 0
    row.ours = ours


# Finish reasons by name, as TokenSpeed and SGLang write them.

cdef inline uint8_t finish_of(const uint8_t *p, size_t size) noexcept nogil:
    if size == 0:
        return FINISH_NONE
    if size == 4 and memcmp(p, b"stop", 4) == 0:
        return FINISH_STOP
    if size == 6 and memcmp(p, b"length", 6) == 0:
        return FINISH_LENGTH
    if size == 5 and memcmp(p, b"abort", 5) == 0:
        return FINISH_ABORT
    if size == 5 and memcmp(p, b"error", 5) == 0:
        return FINISH_ERROR
    if size == 10 and memcmp(p, b"repetition", 10) == 0:
        return FINISH_REPETITION
    return FINISH_OTHER
