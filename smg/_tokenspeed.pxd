# Phase one of TokenSpeed's output frame: a tagged array whose columns are parallel to `rids`.
#
#   0 tag "BatchTokenIDOutSlim"      5 completion_tokens [int]              10 num_running   int
#   1 rids [str]                     6 cached_tokens [int]                  11 num_waiting   int
#   2 output_ids [[int]]             7 output_token_logprobs_val [[float]]  12 kv_active_pages int
#   3 finished_reasons [str]         8 output_token_logprobs_idx [[int]]    13 kv_total_pages  int
#   4 prompt_tokens [int]            9 engine_index int
#
# Elements 0 to 8 are always there; older engines end at 9 or 10 elements, newer ones may append more.
# `smg/protocol/tokenspeed.py` has the same decoder in Python.

from libc.stdint cimport UINT32_MAX, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from smg._batch cimport WIRE_ID_DIGITS, batch_clear, fail, fail_read, finish_of, parse_digits, \
    parse_wire_id, reserve_asides, reserve_rows, reserve_tokens
from smg._frame cimport FINISH_NONE, Aside, Batch, Part, Row
from smg._msgpack cimport OK, Cursor, load_u16, load_u32, read_array, read_float, read_text, read_u32, \
    read_u64, read_valid_text, remaining, skip

cdef extern from *:
    """
    #define SMG_ARRAY_WANTED "must be an array, found {kind}"
    #define SMG_TEXT_WANTED "must be text, found {kind}"
    #define SMG_FLOATS_WANTED "must hold floats, found {kind}"
    #define SMG_UINT32_WANTED "must be an integer in 0..4294967295, found {kind}"
    #define SMG_UINT64_WANTED "must be an integer in 0..2**64-1, found {kind}"
    """
    const char *ARRAY_WANTED "SMG_ARRAY_WANTED"
    const char *TEXT_WANTED "SMG_TEXT_WANTED"
    const char *FLOATS_WANTED "SMG_FLOATS_WANTED"
    const char *UINT32_WANTED "SMG_UINT32_WANTED"
    const char *UINT64_WANTED "SMG_UINT64_WANTED"

cdef enum:
    SLIM_REQUIRED = 9        # elements of the oldest frame
    SLIM_KNOWN = 14          # elements this decoder reads
    SLIM_ROW_BYTES = 8       # the least that one request takes in a frame: one byte in each column

cdef struct Slim:            # one decoding in progress
    Cursor c
    const uint8_t *frame
    Batch *batch
    uint32_t row_count       # length of `rids`


cdef inline int decode_slim(const uint8_t *frame, size_t size, Batch *batch) noexcept nogil:
    """Fill `batch` from one frame and return 0, or fill its fault and return -1."""
    cdef Slim s
    cdef const uint8_t *tag
    cdef uint32_t elements = 0
    cdef uint32_t tag_size = 0
    cdef const char *what
    cdef uint32_t i
    cdef int status
    batch_clear(batch)
    if size > UINT32_MAX:
        return fail(batch, b"frame", -1, b"has {found} bytes, more than {expected}", size, UINT32_MAX, 0)
    s.c.at, s.c.end, s.frame, s.batch = frame, frame + size, frame, batch
    status = read_array(&s.c, &elements)
    if status != OK:
        return fail_read(batch, b"frame", -1, status, ARRAY_WANTED, &s.c, frame)
    if elements < SLIM_REQUIRED:
        what = b"has {found} elements, needs {expected}"
        return fail(batch, b"frame", -1, what, elements, SLIM_REQUIRED, 0)
    status = read_text(&s.c, &tag, &tag_size)
    if status != OK:
        return fail_read(batch, b"tag", -1, status, TEXT_WANTED, &s.c, frame)
    if tag_size != 19 or memcmp(tag, b"BatchTokenIDOutSlim", 19) != 0:
        return fail(batch, b"tag", -1, b"is not BatchTokenIDOutSlim", 0, 0, tag - frame)

    if slim_rids(&s) < 0 or slim_tokens(&s) < 0 or slim_reasons(&s) < 0:
        return -1
    if slim_counts(&s, b"prompt_tokens", &batch.rows.prompt_tokens) < 0:
        return -1
    if slim_counts(&s, b"completion_tokens", &batch.rows.completion_tokens) < 0:
        return -1
    if slim_counts(&s, b"cached_tokens", &batch.rows.cached_tokens) < 0:
        return -1
    if slim_logprob_values(&s) < 0 or slim_logprob_ids(&s) < 0 or slim_tail(&s, elements) < 0:
        return -1
    for i in range(SLIM_KNOWN, elements):
        status = skip(&s.c)
        if status != OK:
            return fail_read(batch, b"extra", i, status, b"must be a value, found {kind}", &s.c, frame)
    if s.c.at != s.c.end:
        what = b"has {found} bytes after its end"
        return fail(batch, b"frame", -1, what, remaining(&s.c), 0, s.c.at - frame)
    batch.row_count = s.row_count
    return 0


cdef inline int decode_slim_message(const Part *parts, uint32_t part_count, Batch *batch) noexcept nogil:
    """The Decoder of this engine, whose messages are one frame. Further parts are left alone."""
    return decode_slim(parts[0].data, parts[0].size, batch)


cdef inline int slim_column(Slim *s, const char *column) noexcept nogil:
    """The header of a column, which must be as long as `rids`."""
    cdef const char *what
    cdef uint32_t count = 0
    cdef int status = read_array(&s.c, &count)
    if status != OK:
        return fail_read(s.batch, column, -1, status, ARRAY_WANTED, &s.c, s.frame)
    if count != s.row_count:
        what = b"has {found} entries, rids has {expected}"
        return fail(s.batch, column, -1, what, count, s.row_count, s.c.at - s.frame)
    return 0


cdef inline int slim_rids(Slim *s) noexcept nogil:
    """Column 1, and with it the number of rows."""
    cdef const char *what
    cdef const uint8_t *at
    cdef const uint8_t *end = s.c.end
    cdef const uint8_t *text = NULL
    cdef uint32_t size = 0
    cdef uint32_t i
    cdef int status = read_array(&s.c, &s.row_count)
    cdef Row *rows
    cdef Row *row
    if status != OK:
        return fail_read(s.batch, b"rids", -1, status, ARRAY_WANTED, &s.c, s.frame)
    if s.row_count > remaining(&s.c) // SLIM_ROW_BYTES:
        return slim_too_many(s)
    if not reserve_rows(s.batch, s.row_count) or not reserve_asides(s.batch, s.row_count):
        what = b"has {found} entries, and there is no memory for them"
        return fail(s.batch, b"rids", -1, what, s.row_count, 0, s.c.at - s.frame)
    rows = s.batch.rows
    at = s.c.at
    for i in range(s.row_count):
        row = &rows[i]
        if end - at > WIRE_ID_DIGITS and at[0] == 0xA0 + WIRE_ID_DIGITS and parse_digits(at + 1, row):
            row.ours = True
            row.rid.start = <uint32_t>(at + 1 - s.frame)
            row.rid.size = WIRE_ID_DIGITS
            at += 1 + WIRE_ID_DIGITS
            continue
        s.c.at = at
        status = read_valid_text(&s.c, &text, &size)
        if status != OK:
            return fail_read(s.batch, b"rids", i, status, TEXT_WANTED, &s.c, s.frame)
        parse_wire_id(text, size, row)
        row.rid.start = <uint32_t>(text - s.frame)
        row.rid.size = size
        at = s.c.at
    s.c.at = at
    return 0


cdef inline int slim_too_many(Slim *s) noexcept nogil:
    """More rids than the frame has room for, so that some column is short or cut off. Say which; returns -1.

    Nothing is kept: rows for all these rids would take more memory than the frame is worth.
    """
    cdef const char **column = [
        b"rids", b"output_ids", b"finished_reasons", b"prompt_tokens", b"completion_tokens", b"cached_tokens",
        b"output_token_logprobs_val", b"output_token_logprobs_idx"
    ]
    cdef const uint8_t *text = NULL
    cdef const char *wanted = NULL
    cdef double value = 0
    cdef uint32_t token = 0
    cdef uint32_t count = 0
    cdef uint32_t i, k, e
    cdef int status = OK
    for k in range(8):
        if k > 0 and slim_column(s, column[k]) < 0:
            return -1
        for i in range(s.row_count):
            if k == 0 or k == 2:
                wanted, status = TEXT_WANTED, read_valid_text(&s.c, &text, &count)
            elif 3 <= k <= 5:
                wanted, status = UINT32_WANTED, read_u32(&s.c, &token)
            else:
                wanted, status = ARRAY_WANTED, read_array(&s.c, &count)
                for e in range(count if status == OK else 0):
                    if k == 6:
                        wanted, status = FLOATS_WANTED, read_float(&s.c, &value)
                    else:
                        wanted, status = UINT32_WANTED, read_u32(&s.c, &token)
                    if status != OK:
                        break
            if status != OK:
                return fail_read(s.batch, column[k], i, status, wanted, &s.c, s.frame)
    # Not reached: eight columns of that many entries do not fit in the frame.
    return fail(s.batch, b"frame", -1, b"has too few bytes for {found} requests", s.row_count, 0, 0)


cdef inline int slim_tokens(Slim *s) noexcept nogil:
    """Column 2. Each token takes a byte of the frame at least, which bounds the room for them."""
    cdef const uint8_t *at
    cdef const uint8_t *end = s.c.end
    cdef uint32_t *tokens
    cdef uint32_t total = 0
    cdef uint32_t count = 0
    cdef uint32_t i, k
    cdef int status
    cdef Row *rows = s.batch.rows
    cdef Row *row
    if slim_column(s, b"output_ids") < 0:
        return -1
    if not reserve_tokens(s.batch, <uint32_t>remaining(&s.c)):
        return fail(s.batch, b"output_ids", -1, b"has no memory for its tokens", 0, 0, s.c.at - s.frame)
    tokens = s.batch.tokens
    at = s.c.at
    for i in range(s.row_count):
        row = &rows[i]
        row.first_token = total
        if end - at >= 6 and at[0] == 0x91:   # one token, as nearly always
            row.token_count = 1
            if at[1] == 0xCD:
                tokens[total] = load_u16(at + 2)
                total += 1
                at += 4
                continue
            if at[1] == 0xCE:
                tokens[total] = load_u32(at + 2)
                total += 1
                at += 6
                continue
        if at < end and (at[0] & 0xF0) == 0x90:
            count = at[0] & 0x0F
            at += 1
        else:
            s.c.at = at
            status = read_array(&s.c, &count)
            if status != OK:
                return fail_read(s.batch, b"output_ids", i, status, ARRAY_WANTED, &s.c, s.frame)
            at = s.c.at
        row.token_count = count
        for k in range(count):
            if end - at >= 5 and at[0] == 0xCD:
                tokens[total] = load_u16(at + 1)
                at += 3
            elif end - at >= 5 and at[0] == 0xCE:
                tokens[total] = load_u32(at + 1)
                at += 5
            elif end - at >= 5 and at[0] < 0x80:
                tokens[total] = at[0]
                at += 1
            else:
                s.c.at = at
                status = read_u32(&s.c, &tokens[total])
                if status != OK:
                    return fail_read(s.batch, b"output_ids", i, status, UINT32_WANTED, &s.c, s.frame)
                at = s.c.at
            total += 1
    s.c.at = at
    s.batch.token_count = total
    return 0


cdef inline int slim_reasons(Slim *s) noexcept nogil:
    """Column 3."""
    cdef const uint8_t *at
    cdef const uint8_t *end = s.c.end
    cdef const uint8_t *text = NULL
    cdef uint32_t size = 0
    cdef uint32_t i
    cdef int status
    cdef Row *rows = s.batch.rows
    cdef Row *row
    cdef Aside *asides = s.batch.asides
    if slim_column(s, b"finished_reasons") < 0:
        return -1
    at = s.c.at
    for i in range(s.row_count):
        row = &rows[i]
        if at < end and at[0] == 0xA0:   # "", still running
            row.finish = FINISH_NONE
            at += 1
            continue
        s.c.at = at
        status = read_valid_text(&s.c, &text, &size)
        if status != OK:
            return fail_read(s.batch, b"finished_reasons", i, status, TEXT_WANTED, &s.c, s.frame)
        row.finish = finish_of(text, size)
        if size:
            asides[i].finish_text.start = <uint32_t>(text - s.frame)
            asides[i].finish_text.size = size
        at = s.c.at
    s.c.at = at
    return 0


cdef inline int slim_counts(Slim *s, const char *column, uint32_t *field) noexcept nogil:
    """Columns 4 to 6; `field` is where the first row keeps its value."""
    cdef const uint8_t *at
    cdef const uint8_t *end = s.c.end
    cdef uint32_t i
    cdef int status
    if slim_column(s, column) < 0:
        return -1
    at = s.c.at
    for i in range(s.row_count):
        if end - at >= 3 and at[0] < 0x80:
            field[0] = at[0]
            at += 1
        elif end - at >= 3 and at[0] == 0xCD:
            field[0] = load_u16(at + 1)
            at += 3
        else:
            s.c.at = at
            status = read_u32(&s.c, field)
            if status != OK:
                return fail_read(s.batch, column, i, status, UINT32_WANTED, &s.c, s.frame)
            at = s.c.at
        field = <uint32_t *>(<uint8_t *>field + sizeof(Row))
    s.c.at = at
    return 0


cdef inline int slim_logprob_values(Slim *s) noexcept nogil:
    """Column 7. Until column 8 is read, an aside's `logprob_ids.size` is the length of its array here."""
    cdef const char *column = b"output_token_logprobs_val"
    cdef const uint8_t *at
    cdef const uint8_t *end = s.c.end
    cdef uint32_t count = 0
    cdef uint32_t i, k
    cdef double value = 0
    cdef int status
    cdef Aside *aside
    if slim_column(s, column) < 0:
        return -1
    at = s.c.at
    for i in range(s.row_count):
        if at < end and at[0] == 0x90:   # logprobs are off
            at += 1
            continue
        s.c.at = at
        status = read_array(&s.c, &count)
        if status != OK:
            return fail_read(s.batch, column, i, status, ARRAY_WANTED, &s.c, s.frame)
        for k in range(count):
            status = read_float(&s.c, &value)
            if status != OK:
                return fail_read(s.batch, column, i, status, FLOATS_WANTED, &s.c, s.frame)
        if count:
            if not s.batch.has_logprobs:
                slim_start_logprobs(s)
            aside = &s.batch.asides[i]
            aside.logprob_values.start = <uint32_t>(at - s.frame)
            aside.logprob_values.size = <uint32_t>(s.c.at - at)
            aside.logprob_ids.size = count
        at = s.c.at
    s.c.at = at
    return 0


cdef inline void slim_start_logprobs(Slim *s) noexcept nogil:
    """At the first row that has some: no aside has been written yet, and none has any."""
    cdef Aside *asides = s.batch.asides
    cdef uint32_t i
    for i in range(s.row_count):
        asides[i].logprob_values.size = asides[i].logprob_ids.size = 0
    s.batch.has_logprobs = True


cdef inline int slim_logprob_ids(Slim *s) noexcept nogil:
    """Column 8, each array as long as its row's in column 7."""
    cdef const char *column = b"output_token_logprobs_idx"
    cdef const uint8_t *at
    cdef const uint8_t *end = s.c.end
    cdef uint32_t count = 0
    cdef uint32_t token = 0
    cdef uint32_t wanted, i, k
    cdef int status
    cdef bint has_logprobs = s.batch.has_logprobs
    cdef Aside *asides = s.batch.asides
    if slim_column(s, column) < 0:
        return -1
    at = s.c.at
    for i in range(s.row_count):
        wanted = asides[i].logprob_ids.size if has_logprobs else 0
        if at < end and at[0] == 0x90 and wanted == 0:
            at += 1
            continue
        s.c.at = at
        status = read_array(&s.c, &count)
        if status != OK:
            return fail_read(s.batch, column, i, status, ARRAY_WANTED, &s.c, s.frame)
        if count != wanted:
            return fail(
                s.batch, column, i, b"has {found} entries, output_token_logprobs_val has {expected}",
                count, wanted, at - s.frame
            )
        for k in range(count):
            status = read_u32(&s.c, &token)
            if status != OK:
                return fail_read(s.batch, column, i, status, UINT32_WANTED, &s.c, s.frame)
        if count:
            asides[i].logprob_ids.start = <uint32_t>(at - s.frame)
            asides[i].logprob_ids.size = <uint32_t>(s.c.at - at)
        at = s.c.at
    s.c.at = at
    return 0


cdef inline int slim_tail(Slim *s, uint32_t elements) noexcept nogil:
    """Elements 9 to 13, as many as there are. A load report needs all of them and pages to speak of."""
    cdef const char **column = [
        b"engine_index", b"num_running", b"num_waiting", b"kv_active_pages", b"kv_total_pages"
    ]
    cdef uint64_t *value = [0, 0, 0, 0, 0]
    cdef uint32_t present = (elements if elements < SLIM_KNOWN else SLIM_KNOWN) - SLIM_REQUIRED
    cdef uint32_t i
    cdef int status
    for i in range(present):
        status = read_u64(&s.c, &value[i])
        if status != OK:
            return fail_read(s.batch, column[i], -1, status, UINT64_WANTED, &s.c, s.frame)
    s.batch.has_engine_index = present > 0
    s.batch.engine_index = value[0]
    if value[4]:
        s.batch.has_load = True
        s.batch.running = value[1]
        s.batch.waiting = value[2]
        s.batch.kv_usage = 1.0 if value[3] >= value[4] else <double>value[3] / <double>value[4]
    return 0
