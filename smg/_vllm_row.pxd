# One EngineCoreOutput of vLLM's output message, an array:
#
#   0 request_id        str                    5 finish_reason      int | nil
#   1 new_token_ids     [int]                  6 stop_reason        int | str | nil
#   2 new_logprobs      arrays | nil           8 kv_transfer_params map | nil
#   3 new_prompt_logprobs_tensors arrays|nil  11 prefill_stats      map | nil, with the first output
#   4 pooling_output    array | nil
#
# The others are of no use to a router and are skipped, whatever they are. 0.20 to 0.25 send 13 elements, and
# have prefill_stats at 10. Elements missing at the end have their defaults, additional ones are skipped.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from smg._batch cimport WIRE_ID_DIGITS, extra_of, fail, fail_read, new_cold, parse_digits, parse_wire_id
from smg._frame cimport COLD_KV_TRANSFER, COLD_LOGPROBS, COLD_PROMPT_LOGPROBS, FINISH_ABORT, FINISH_ERROR, \
    FINISH_LENGTH, FINISH_NONE, FINISH_REPETITION, FINISH_STOP, STOP_ID, STOP_TEXT, Cold, Extra, Row
from smg._msgpack cimport OK, OVER_RANGE, WRONG_TYPE, load_u16, load_u32, load_u64, read_array, read_i64, \
    read_integer, read_map, read_text, read_u32, read_valid_text, remaining, skip, take_nil
from smg._tensor cimport NUMBERS_FLOAT, NUMBERS_INTEGER, Source, Tensor, read_tensor

cdef extern from *:
    """
    #define SMG_CORE_ARRAY "must be an array, found {kind}"
    #define SMG_CORE_MAP "must be a map or nil, found {kind}"
    #define SMG_CORE_TEXT "must be text, found {kind}"
    #define SMG_CORE_COUNT "must be an integer of 0 or more, found {kind}"
    #define SMG_CORE_VALUE "must be a value, found {kind}"
    """
    const char *ARRAY "SMG_CORE_ARRAY"
    const char *MAP "SMG_CORE_MAP"
    const char *TEXT "SMG_CORE_TEXT"
    const char *COUNT "SMG_CORE_COUNT"
    const char *VALUE "SMG_CORE_VALUE"

cdef enum:
    CORE_ROW_REQUIRED = 2    # elements of the shortest output
    CORE_ROW_BYTES = 3       # the least that one takes in a frame: its header and two elements
    CORE_EXTRA_BYTES = 5     # the least more that it takes to have an Extra: four nils and a stop reason
    CORE_COLD_BYTES = 7      # and for each Cold: six nils and a map
    CORE_ROW_KNOWN = 18      # elements with a name
    CORE_ROW_BEFORE_EC = 13  # elements of an output of 0.20 to 0.25
    CORE_FINISH_KNOWN = 5    # finish reasons with a meaning


cdef inline int core_row(Source *s, uint32_t at) noexcept nogil:
    cdef const char *what
    cdef Row *row = &s.batch.rows[at]
    cdef uint64_t nils = 0xC0C0C0C0C0C0C0C0
    cdef uint32_t elements = 0
    cdef uint32_t prefill_stats, k
    cdef int status = read_array(&s.c, &elements)
    if status != OK:
        return core_fault(s, b"outputs", at, status, ARRAY)
    if elements < CORE_ROW_REQUIRED:
        what = b"has {found} elements, needs {expected}"
        return fail(s.batch, b"outputs", at, what, elements, CORE_ROW_REQUIRED, s.c.at - s.parts[0].data)
    if core_rid(s, at, row) < 0 or core_tokens(s, at, row) < 0:
        return -1
    row.finish = FINISH_NONE
    row.prompt_tokens = row.cached_tokens = 0
    row.counts_absent = True
    # Most outputs have nothing more to say: nil in elements 2 to 9 and on, and no NaNs at 13.
    k = 2
    if elements >= 10 and remaining(&s.c) >= 8 and load_u64(s.c.at) == nils:
        s.c.at += 8
        k = 10
        if elements == 18 and remaining(&s.c) >= 8 and load_u64(s.c.at) == <uint64_t>0xC0C0C000C0C0C0C0:
            s.c.at += 8
            return 0
        if elements == 14 and remaining(&s.c) >= 4 and load_u32(s.c.at) == <uint32_t>0xC0C0C000:
            s.c.at += 4
            return 0
    prefill_stats = 10 if elements == CORE_ROW_BEFORE_EC else 11
    while k < elements:
        if take_nil(&s.c):
            pass
        elif k == 2:
            if core_logprobs(s, b"new_logprobs", at, COLD_LOGPROBS) < 0:
                return -1
        elif k == 3:
            if core_logprobs(s, b"new_prompt_logprobs_tensors", at, COLD_PROMPT_LOGPROBS) < 0:
                return -1
        elif k == 4:
            if core_pooling(s, at) < 0:
                return -1
        elif k == 5:
            if core_finish(s, at, row) < 0:
                return -1
        elif k == 6:
            if core_stop(s, at) < 0:
                return -1
        elif k == 8:
            if core_kv_transfer(s, at) < 0:
                return -1
        elif k == prefill_stats:
            if core_prefill(s, at, row) < 0:
                return -1
        elif core_skip(s, core_name(k), at) < 0:
            return -1
        k += 1
    return 0


cdef inline const char *core_name(uint32_t element) noexcept nogil:
    """For a fault in an element that is skipped."""
    cdef const char **names = [
        b"events", b"kv_transfer_params", b"ec_transfer_params", b"trace_headers", b"prefill_stats",
        b"routed_experts", b"num_nans_in_logits", b"mm_cache_miss_hashes", b"new_sampling_mask",
        b"spec_decode_metrics", b"prompt_token_id_logprobs"
    ]
    if element >= CORE_ROW_KNOWN:
        return b"extra"
    return names[element - 7]


cdef inline int core_rid(Source *s, uint32_t at, Row *row) noexcept nogil:
    cdef const uint8_t *text = NULL
    cdef uint32_t size = 0
    cdef int status
    cdef const uint8_t *p = s.c.at
    if remaining(&s.c) > WIRE_ID_DIGITS and p[0] == 0xA0 + WIRE_ID_DIGITS and parse_digits(p + 1, row):
        row.ours = True
        text, size = p + 1, WIRE_ID_DIGITS
        s.c.at += 1 + WIRE_ID_DIGITS
    else:
        status = read_valid_text(&s.c, &text, &size)
        if status != OK:
            return core_fault(s, b"request_id", at, status, TEXT)
        parse_wire_id(text, size, row)
    row.rid.start = <uint32_t>(text - s.parts[0].data)
    row.rid.size = size
    return 0


cdef inline int core_tokens(Source *s, uint32_t at, Row *row) noexcept nogil:
    cdef const char *column = b"new_token_ids"
    cdef uint32_t total = s.batch.token_count
    cdef uint32_t *tokens = s.batch.tokens
    cdef const uint8_t *p = s.c.at
    cdef uint32_t count = 0
    cdef uint32_t i
    cdef int status
    row.first_token = total
    if s.c.end - p >= 6 and p[0] == 0x91 and (p[1] == 0xCD or p[1] == 0xCE):   # one token, as nearly always
        tokens[total] = load_u16(p + 2) if p[1] == 0xCD else load_u32(p + 2)
        s.c.at = p + (4 if p[1] == 0xCD else 6)
        row.token_count = 1
        s.batch.token_count = total + 1
        return 0
    status = read_array(&s.c, &count)
    if status != OK:
        return core_fault(s, column, at, status, ARRAY)
    for i in range(count):
        status = read_u32(&s.c, &tokens[total + i])
        if status != OK:
            return core_fault(s, column, at, status, b"must be an integer in 0..4294967295, found {kind}")
    row.token_count = count
    s.batch.token_count = total + count
    return 0


cdef inline int core_logprobs(Source *s, const char *column, uint32_t at, uint8_t kind) noexcept nogil:
    """Token ids and logprobs of shape [positions, 1 + top], ranks of shape [positions], then what is skipped.

    In a row's own logprobs a fourth element would say that they are not for its tokens alone.
    """
    cdef const uint8_t *start = s.c.at
    cdef const char *what
    cdef Tensor ids, values, ranks
    cdef Cold *cold
    cdef uint32_t elements = 0
    cdef uint32_t i
    cdef int status = read_array(&s.c, &elements)
    if status == OK and elements < 3:
        what = b"has {found} elements, needs {expected}"
        return fail(s.batch, column, at, what, elements, 3, start - s.parts[0].data)
    if status != OK:
        return core_fault(s, column, at, status, b"must be an array or nil, found {kind}")
    if read_tensor(s, column, at, &ids) < 0 or read_tensor(s, column, at, &values) < 0:
        return -1
    if read_tensor(s, column, at, &ranks) < 0:
        return -1
    if ids.numbers != NUMBERS_INTEGER or values.numbers != NUMBERS_FLOAT or ranks.numbers != NUMBERS_INTEGER:
        what = b"must be arrays of integers, floats and integers"
        return fail(s.batch, column, at, what, 0, 0, start - s.parts[0].data)
    if ids.dimensions != 2 or values.dimensions != 2 or ranks.dimensions != 1 or ids.shape[1] == 0 or (
        ids.shape[0] != values.shape[0] or ids.shape[1] != values.shape[1] or ids.shape[0] != ranks.shape[0]
    ):
        what = b"must be arrays of shapes [n, k], [n, k] and [n]"
        return fail(s.batch, column, at, what, 0, 0, start - s.parts[0].data)
    if kind == COLD_LOGPROBS and elements > 3 and not take_nil(&s.c):
        what = b"must have nil as cu_num_generated_tokens"
        return fail(s.batch, column, at, what, 0, 0, s.c.at - s.parts[0].data)
    for i in range(4 if kind == COLD_LOGPROBS else 3, elements):
        if core_skip(s, column, at) < 0:
            return -1
    cold = new_cold(s.batch, at)
    cold.kind = kind
    cold.value.start = <uint32_t>(start - s.parts[0].data)
    cold.value.size = <uint32_t>(s.c.at - start)
    cold.aux_count = 0
    for i in range(3):
        cold.aux[cold.aux_count] = ids.aux if i == 0 else values.aux if i == 1 else ranks.aux
        cold.aux_count += cold.aux[cold.aux_count] != 0
    return 0


cdef inline int core_pooling(Source *s, uint32_t at) noexcept nogil:
    """Not for generated text, so that it is checked and passed over."""
    cdef Tensor pooled
    return read_tensor(s, b"pooling_output", at, &pooled)


cdef inline int core_finish(Source *s, uint32_t at, Row *row) noexcept nogil:
    """Any reason ends the request; one that is not known here ends it as an error."""
    cdef uint8_t *reasons = [FINISH_STOP, FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR, FINISH_REPETITION]
    cdef uint64_t reason = 0
    cdef bint negative = False
    cdef int status = read_integer(&s.c, &reason, &negative)
    if status != OK:
        return core_fault(s, b"finish_reason", at, status, b"must be an integer or nil, found {kind}")
    row.finish = reasons[reason] if reason < CORE_FINISH_KNOWN and not negative else FINISH_ERROR
    return 0


cdef inline int core_stop(Source *s, uint32_t at) noexcept nogil:
    cdef const char *column = b"stop_reason"
    cdef const uint8_t *text = NULL
    cdef uint32_t size = 0
    cdef int64_t number = 0
    cdef Extra *extra
    cdef const char *wanted = b"must be an integer, text or nil, found {kind}"
    cdef int status = read_valid_text(&s.c, &text, &size)
    if status == WRONG_TYPE:
        if core_i64(s, column, at, &number, wanted) < 0:
            return -1
    elif status != OK:
        return core_fault(s, column, at, status, wanted)
    extra = extra_of(s.batch, at)
    extra.stop_kind = STOP_ID if text == NULL else STOP_TEXT
    extra.stop_id = number
    extra.stop_text.start = <uint32_t>(text - s.parts[0].data) if text != NULL else 0
    extra.stop_text.size = size
    return 0


cdef inline int core_kv_transfer(Source *s, uint32_t at) noexcept nogil:
    cdef const char *column = b"kv_transfer_params"
    cdef const uint8_t *start = s.c.at
    cdef Cold *cold
    cdef uint32_t pairs = 0
    cdef int status = read_map(&s.c, &pairs)
    if status != OK:
        return core_fault(s, column, at, status, MAP)
    s.c.at = start
    if core_skip(s, column, at) < 0:
        return -1
    cold = new_cold(s.batch, at)
    cold.kind, cold.aux_count = COLD_KV_TRANSFER, 0
    cold.value.start = <uint32_t>(start - s.parts[0].data)
    cold.value.size = <uint32_t>(s.c.at - start)
    return 0


cdef inline int core_prefill(Source *s, uint32_t at, Row *row) noexcept nogil:
    cdef const char *column = b"prefill_stats"
    cdef const uint8_t *key = NULL
    cdef uint32_t pairs = 0
    cdef uint32_t size = 0
    cdef uint32_t i
    cdef int status = read_map(&s.c, &pairs)
    if status != OK:
        return core_fault(s, column, at, status, MAP)
    for i in range(pairs):
        status = read_text(&s.c, &key, &size)
        if status == WRONG_TYPE:
            status, size = skip(&s.c), 0
        if status != OK:
            return core_fault(s, column, at, status, VALUE)
        if key_is(key, size, b"num_prompt_tokens", 17):
            status = read_u32(&s.c, &row.prompt_tokens)
            row.counts_absent = False
        elif key_is(key, size, b"num_cached_tokens", 17):
            status = read_u32(&s.c, &row.cached_tokens)
        else:
            status = skip(&s.c)
        if status != OK:
            return core_fault(s, column, at, status, COUNT)
    return 0


cdef inline int core_fault(
    Source *s, const char *column, int64_t row, int status, const char *wanted
) noexcept nogil:
    return fail_read(s.batch, column, row, status, wanted, &s.c, s.parts[0].data)


cdef inline int core_i64(
    Source *s, const char *column, int64_t row, int64_t *value, const char *wanted
) noexcept nogil:
    cdef int status = read_i64(&s.c, value)
    if status == OVER_RANGE:
        return fail(s.batch, column, row, b"is over 9223372036854775807", 0, 0, s.c.at - s.parts[0].data)
    return 0 if status == OK else core_fault(s, column, row, status, wanted)


cdef inline int core_skip(Source *s, const char *column, int64_t row) noexcept nogil:
    """Past a value that means nothing here."""
    cdef int status = skip(&s.c)
    return 0 if status == OK else core_fault(s, column, row, status, VALUE)


cdef inline bint key_is(const uint8_t *key, uint32_t size, const char *name, uint32_t length) noexcept nogil:
    return size == length and memcmp(key, name, length) == 0
