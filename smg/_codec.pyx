"""The compiled codecs as plain Python functions.

The pump uses the decoders without any of this; here they are for tests, tools and fuzzing. The packing of
prompts is what every request is made with.
"""

from libc.stdint cimport UINT32_MAX, int8_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from array import array as Array

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from operator import index as as_index

from smg._batch cimport batch_bytes, batch_free, batch_init, cold_bytes, fault_parts, parse_wire_id, write_cold
from smg._frame cimport STOP_ID, STOP_TEXT, WAVE_COMPLETE, WAVE_NONE, Aside, Batch, Cold, Decoder, Extra, Part, Row, Span
from smg._msgpack cimport WRONG_TYPE, Cursor, read_array, read_bin, read_bool, read_ext, read_float, \
    read_i64, read_map, read_text, read_u32, read_u64, read_valid_text, skip, take_nil
from smg._tokenspeed cimport decode_slim_message
from smg._vllm cimport decode_core

from smg._decoded import DecodedBatch, DecodedOutput, DecodedOutputs, DecodedRow, Load, WireId, fault_error
from smg.errors import InvalidRequest

ctypedef object (*Maker)(const Part *parts, const Batch *batch)

FINISH_REASONS = ("", "stop", "length", "abort", "error", "repetition")


def decode_tokenspeed(frame):
    """One `BatchTokenIDOutSlim` frame (any bytes-like object) as a `DecodedBatch`. Raises `DecodeError`."""
    return decode_with(decode_slim_message, [frame], decoded_batch)


def measure_tokenspeed(frame):
    """Bytes of scratch memory that decoding the frame takes when it starts with none, even if it fails."""
    return decode_with(decode_slim_message, [frame], NULL)


def decode_vllm(parts):
    """One message of vLLM, its parts being bytes-like objects, as `DecodedOutputs`. Raises `DecodeError`."""
    return decode_with(decode_core, parts, decoded_outputs)


def measure_vllm(parts):
    """As `measure_tokenspeed`, for vLLM."""
    return decode_with(decode_core, parts, NULL)


def read_value(str kind, data):
    """One read of the checked cursor at the start of `data`: (status, value, where the cursor is then).

    `kind`: nil, bool, u32, u64, i64, float, text (any bytes), utf8, bin, ext, array, map, or any to skip a
    value. The status is 0 or one of `Status` in _msgpack.pxd. A header's value is its count, a skipped value
    is None.
    """
    cdef const uint8_t[::1] view = data if len(data) else b"\0"
    cdef Cursor c
    cdef const uint8_t *start = NULL
    cdef uint32_t size = 0
    cdef uint64_t wide = 0
    cdef int64_t signed_value = 0
    cdef int8_t code = 0
    cdef double real = 0
    cdef bint truth = False
    cdef int status
    c.at, c.end = &view[0], &view[0] + len(data)
    value = None
    if kind == "nil":
        status = 0 if take_nil(&c) else WRONG_TYPE
    elif kind == "bool":
        status = read_bool(&c, &truth)
        value = truth != 0
    elif kind == "u32":
        status = read_u32(&c, &size)
        value = size
    elif kind == "u64":
        status = read_u64(&c, &wide)
        value = wide
    elif kind == "i64":
        status = read_i64(&c, &signed_value)
        value = signed_value
    elif kind == "float":
        status = read_float(&c, &real)
        value = real
    elif kind == "text" or kind == "utf8":
        status = (read_valid_text if kind == "utf8" else read_text)(&c, &start, &size)
    elif kind == "bin":
        status = read_bin(&c, &start, &size)
    elif kind == "ext":
        status = read_ext(&c, &code, &start, &size)
    elif kind == "array":
        status = read_array(&c, &size)
        value = size
    elif kind == "map":
        status = read_map(&c, &size)
        value = size
    else:
        status = skip(&c)
    if start != NULL:
        value = (<const char *>start)[:size]
        if kind == "ext":
            value = code, value
    return status, value if status == 0 else None, c.at - &view[0]


def pack_token_ids(token_ids, int64_t below=UINT32_MAX + <int64_t>1):
    """A prompt as a msgpack array of integers.

    Takes a list, a tuple, any other iterable, or anything with `tolist` (numpy arrays, array.array). Raises
    `InvalidRequest` naming the first element that is not an integer of 0 or more and under `below`, which is
    at most 2**32; a bool is none. An array.array of type "I" is packed without the GIL, as suits a long prompt.
    """
    cdef bytes whole
    if type(token_ids) is Array and token_ids.typecode == "I" and token_ids:
        whole = pack_array(token_ids, below)
        if whole is not None:
            return whole
    cdef tuple items = token_tuple(token_ids)
    cdef Py_ssize_t count = len(items)
    if count > UINT32_MAX:
        raise InvalidRequest("prompt_token_ids", count, "a sequence of less than 2**32 token ids")
    cdef uint8_t *packed = <uint8_t *>malloc(5 * (count + 1))
    if packed == NULL:
        raise MemoryError
    cdef uint8_t *at = put_count(packed, <uint32_t>count)
    cdef Py_ssize_t i
    cdef long long value
    cdef int overflow = 0
    try:
        for i in range(count):
            item = items[i]
            if not PyLong_CheckExact(item):
                item = plain_int(item)
            value = -1 if item is None else PyLong_AsLongLongAndOverflow(item, &overflow)
            if value < 0 or value >= below:
                allowed = f"token ids that are integers in 0..{below - 1} (element {i} is not)"
                raise InvalidRequest("prompt_token_ids", items[i], allowed)
            at = put_id(at, <uint32_t>value)
        return PyBytes_FromStringAndSize(<char *>packed, at - packed)
    finally:
        free(packed)


cdef bytes pack_array(const uint32_t[::1] ids, int64_t below):
    """The same for one id or more; None when one is not under `below`."""
    cdef const uint32_t *first = &ids[0]
    cdef Py_ssize_t count = ids.shape[0], i
    cdef uint32_t highest = 0
    cdef uint8_t *packed
    cdef uint8_t *at
    if count > UINT32_MAX:
        return None
    packed = <uint8_t *>malloc(5 * (count + 1))
    if packed == NULL:
        raise MemoryError
    with nogil:
        at = put_count(packed, <uint32_t>count)
        for i in range(count):
            if first[i] > highest:
                highest = first[i]
            at = put_id(at, first[i])
    try:
        return PyBytes_FromStringAndSize(<char *>packed, at - packed) if highest < below else None
    finally:
        free(packed)


cdef tuple token_tuple(token_ids):
    if isinstance(token_ids, (list, tuple)):
        return tuple(token_ids)
    if not isinstance(token_ids, (str, bytes, bytearray, memoryview, set, frozenset, dict)):
        try:
            return tuple(token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids)
        except TypeError:
            pass
    raise InvalidRequest("prompt_token_ids", token_ids, "a sequence of token ids")


cdef object plain_int(item):
    """An int from any integer type but bool, else None."""
    if isinstance(item, bool):
        return None
    try:
        return int(as_index(item))
    except TypeError:
        return None


cdef inline uint8_t *put_count(uint8_t *at, uint32_t count) noexcept nogil:
    """The head of an array."""
    if count < 16:
        at[0] = <uint8_t>(0x90 | count)
        return at + 1
    return put_u16(at, 0xDC, count) if count <= 0xFFFF else put_u32(at, 0xDD, count)


cdef inline uint8_t *put_id(uint8_t *at, uint32_t value) noexcept nogil:
    if value < 0x80:
        at[0] = <uint8_t>value
        return at + 1
    if value <= 0xFF:
        at[0], at[1] = 0xCC, <uint8_t>value
        return at + 2
    return put_u16(at, 0xCD, value) if value <= 0xFFFF else put_u32(at, 0xCE, value)


cdef inline uint8_t *put_u16(uint8_t *at, uint8_t lead, uint32_t value) noexcept nogil:
    at[0], at[1], at[2] = lead, <uint8_t>(value >> 8), <uint8_t>value
    return at + 3


cdef inline uint8_t *put_u32(uint8_t *at, uint8_t lead, uint32_t value) noexcept nogil:
    at[0], at[1], at[2] = lead, <uint8_t>(value >> 24), <uint8_t>(value >> 16)
    at[3], at[4] = <uint8_t>(value >> 8), <uint8_t>value
    return at + 5


cdef object decode_with(Decoder decoder, given, Maker make):
    """What `make` makes of the decoded message, or, without it, the bytes of scratch memory that it took."""
    cdef Py_buffer *views
    cdef Part *parts
    cdef Batch batch
    cdef uint32_t count = 0
    cdef uint32_t i
    cdef int status
    cdef list frames = list(given)
    if not frames:
        raise ValueError("a message has one part at least")
    views = <Py_buffer *>malloc(len(frames) * sizeof(Py_buffer))
    parts = <Part *>malloc(len(frames) * sizeof(Part))
    batch_init(&batch)
    try:
        if views == NULL or parts == NULL:
            raise MemoryError
        for frame in frames:
            PyObject_GetBuffer(frame, &views[count], PyBUF_SIMPLE)
            parts[count].data = <const uint8_t *>views[count].buf
            parts[count].size = <size_t>views[count].len
            count += 1
        with nogil:
            status = decoder(parts, count, &batch)
        if make == NULL:
            return batch_bytes(&batch)
        if status < 0:
            raise fault_error(*fault_parts(&batch.fault))
        return make(parts, &batch)
    finally:
        batch_free(&batch)
        for i in range(count):
            PyBuffer_Release(&views[i])
        free(views)
        free(parts)


# TokenSpeed

cdef object decoded_batch(const Part *parts, const Batch *batch):
    cdef const uint8_t *frame = parts.data
    cdef uint32_t i
    rows = [decoded_row(frame, batch, &batch.rows[i], &batch.asides[i]) for i in range(batch.row_count)]
    load = Load(batch.running, batch.waiting, batch.kv_usage) if batch.has_load else None
    return DecodedBatch(rows, batch.engine_index if batch.has_engine_index else None, load)


cdef object decoded_row(const uint8_t *frame, const Batch *batch, const Row *row, const Aside *aside):
    cdef uint32_t k
    return DecodedRow(
        span_text(frame, row.rid),
        wire_id(row),
        [batch.tokens[row.first_token + k] for k in range(row.token_count)],
        span_text(frame, aside.finish_text) if row.finish else "",
        row.prompt_tokens,
        row.completion_tokens,
        row.cached_tokens,
        span_floats(frame, aside.logprob_values) if batch.has_logprobs else [],
        span_ids(frame, aside.logprob_ids) if batch.has_logprobs else [],
    )


# vLLM

cdef object decoded_outputs(const Part *parts, const Batch *batch):
    cdef const uint8_t *frame = parts.data
    cdef const Extra *extra
    cdef uint32_t i
    cdef uint32_t next_extra = 0
    rows = []
    for i in range(batch.row_count):
        extra = NULL
        if next_extra < batch.extra_count and batch.extras[next_extra].row == i:
            extra = &batch.extras[next_extra]
            next_extra += 1
        rows.append(decoded_output(parts, batch, &batch.rows[i], extra))
    waves = "complete" if batch.wave == WAVE_COMPLETE else "start"
    return DecodedOutputs(
        rows,
        batch.engine_index if batch.has_engine_index else None,
        Load(batch.running, batch.waiting, batch.kv_usage) if batch.has_load else None,
        finished_ids(frame, batch.finished),
        (batch.utility_call, span_bytes(frame, batch.utility)) if batch.utility.size else None,
        (waves, batch.wave_number) if batch.wave != WAVE_NONE else None,
        span_text(frame, batch.weight_version) if batch.weight_version.size else None,
    )


cdef object decoded_output(const Part *parts, const Batch *batch, const Row *row, const Extra *extra):
    cdef uint32_t k
    stop_reason = None
    colds = []
    if extra != NULL:
        if extra.stop_kind == STOP_ID:
            stop_reason = extra.stop_id
        elif extra.stop_kind == STOP_TEXT:
            stop_reason = span_text(parts.data, extra.stop_text)
        colds = [cold_copy(&batch.colds[extra.first_cold + k], parts) for k in range(extra.cold_count)]
    return DecodedOutput(
        span_text(parts.data, row.rid),
        wire_id(row),
        [batch.tokens[row.first_token + k] for k in range(row.token_count)],
        FINISH_REASONS[row.finish],
        stop_reason,
        None if row.counts_absent else (row.prompt_tokens, row.cached_tokens),
        colds,
    )


cdef list finished_ids(const uint8_t *frame, Span span):
    cdef Cursor c
    cdef Row row
    cdef const uint8_t *text = NULL
    cdef uint32_t count = 0
    cdef uint32_t size = 0
    c.at, c.end = frame + span.start, frame + span.start + span.size
    ids = []
    if span.size and read_array(&c, &count) == 0:
        for _ in range(count):
            read_text(&c, &text, &size)
            parse_wire_id(text, size, &row)
            ids.append(((<const char *>text)[:size].decode("utf-8"), wire_id(&row)))
    return ids


cdef object wire_id(const Row *row):
    return WireId(row.epoch, row.slot, row.generation) if row.ours else None


cdef bytes cold_copy(const Cold *cold, const Part *parts):
    cdef size_t size = cold_bytes(cold, parts)
    cdef bytes copy = PyBytes_FromStringAndSize(NULL, size)
    write_cold(cold, parts, <uint8_t *><char *>copy)
    return copy


# Spans

cdef bytes span_bytes(const uint8_t *frame, Span span):
    return (<const char *>frame)[span.start:span.start + span.size]


cdef str span_text(const uint8_t *frame, Span span):
    return span_bytes(frame, span).decode("utf-8")


cdef list span_floats(const uint8_t *frame, Span span):
    cdef Cursor c
    cdef uint32_t count = 0
    cdef double value = 0
    c.at, c.end = frame + span.start, frame + span.start + span.size
    floats = []
    if span.size and read_array(&c, &count) == 0:
        for _ in range(count):
            read_float(&c, &value)
            floats.append(value)
    return floats


cdef list span_ids(const uint8_t *frame, Span span):
    cdef Cursor c
    cdef uint32_t count = 0
    cdef uint32_t value = 0
    c.at, c.end = frame + span.start, frame + span.start + span.size
    ids = []
    if span.size and read_array(&c, &count) == 0:
        for _ in range(count):
            read_u32(&c, &value)
            ids.append(value)
    return ids
