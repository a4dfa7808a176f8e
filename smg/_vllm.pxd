# Phase one of vLLM's output message: EngineCoreOutputs, an array with one array per request in it.
#
#   0 engine_index      int                    5 finished_requests  [str] | nil
#   1 outputs           [EngineCoreOutput]     6 wave_complete      int | nil
#   2 scheduler_stats   map | nil              7 start_wave         int | nil
#   3 timestamp         float                  8 weight_version     str | nil, since 0.32
#   4 utility_output    [call_id, failure, result] | nil
#
# A message is one of three: a step's outputs, with statistics or finished ids or neither; the reply to a
# utility call; a notice about waves. Any other is a fault. Elements missing at the end have their defaults,
# additional ones are skipped. `_vllm_row.pxd` reads the outputs one by one.
# `smg/protocol/vllm_outputs.py` has the same decoder in Python.

from libc.stdint cimport UINT32_MAX, uint8_t, uint32_t, uint64_t

from smg._batch cimport batch_clear, fail, fail_read, reserve_colds, reserve_extras, reserve_rows, reserve_tokens
from smg._frame cimport WAVE_COMPLETE, WAVE_NONE, WAVE_START, Batch, Part
from smg._msgpack cimport OK, WRONG_TYPE, read_array, read_float, read_map, read_text, read_u32, read_u64, \
    read_valid_text, remaining, skip, take_nil
from smg._tensor cimport Source
from smg._vllm_row cimport ARRAY, CORE_COLD_BYTES, CORE_EXTRA_BYTES, CORE_ROW_BYTES, COUNT, MAP, TEXT, VALUE, \
    core_fault, core_i64, core_row, core_skip, key_is

cdef enum:
    CORE_KNOWN = 9           # elements of the envelope that this decoder reads


cdef inline int decode_core(const Part *parts, uint32_t part_count, Batch *batch) noexcept nogil:
    """Fill `batch` from one message and return 0, or fill its fault and return -1.

    The first part is the frame; there is one at least.
    """
    cdef Source s
    cdef const char *what
    cdef uint32_t elements = 0
    cdef uint32_t i
    cdef bint has_stats = False
    cdef bint has_finished = False
    cdef int status
    batch_clear(batch)
    s.parts, s.part_count, s.batch, s.aux_left = parts, part_count, batch, 0
    for i in range(part_count):
        if parts[i].size > UINT32_MAX:
            what = b"has {found} bytes, more than {expected}"
            return fail(batch, b"part", i, what, parts[i].size, UINT32_MAX, 0)
        if i > 0:
            s.aux_left += parts[i].size
    s.c.at, s.c.end = parts[0].data, parts[0].data + parts[0].size
    status = read_array(&s.c, &elements)
    if status != OK:
        return fail_read(batch, b"frame", -1, status, ARRAY, &s.c, parts[0].data)
    batch.deltas = True
    if elements > 0 and core_index(&s) < 0:
        return -1
    if elements > 1 and core_outputs(&s) < 0:
        return -1
    if elements > 2 and core_stats(&s, &has_stats) < 0:
        return -1
    if elements > 3 and core_skip(&s, b"timestamp", -1) < 0:
        return -1
    if elements > 4 and core_utility(&s) < 0:
        return -1
    if elements > 5 and core_finished(&s, &has_finished) < 0:
        return -1
    if elements > 6 and core_wave(&s, b"wave_complete", WAVE_COMPLETE) < 0:
        return -1
    if elements > 7 and core_wave(&s, b"start_wave", WAVE_START) < 0:
        return -1
    if elements > 8 and core_version(&s) < 0:
        return -1
    for i in range(CORE_KNOWN, elements):
        if core_skip(&s, b"extra", i) < 0:
            return -1
    if s.c.at != s.c.end:
        what = b"has {found} bytes after its end"
        return fail(batch, b"frame", -1, what, remaining(&s.c), 0, s.c.at - parts[0].data)
    has_stats = has_stats or batch.row_count > 0 or has_finished
    if <int>has_stats + (batch.utility.size > 0) + (batch.wave != WAVE_NONE) != 1:
        what = b"is neither a step's outputs nor a utility reply nor a wave notice"
        return fail(batch, b"frame", -1, what, 0, 0, 0)
    return 0


cdef inline int core_index(Source *s) noexcept nogil:
    cdef int status = read_u64(&s.c, &s.batch.engine_index)
    if status != OK:
        return core_fault(s, b"engine_index", -1, status, COUNT)
    s.batch.has_engine_index = True
    return 0


cdef inline int core_outputs(Source *s) noexcept nogil:
    """Element 1. What its bytes are over the least that so many outputs take bounds the room for all they bring.

    That holds while the outputs are read too, because none may go on into the bytes which those after it need.
    """
    cdef const char *what
    cdef uint32_t count = 0
    cdef uint32_t spare, i
    cdef int status = read_array(&s.c, &count)
    if status != OK:
        return core_fault(s, b"outputs", -1, status, ARRAY)
    if count == 0:
        return 0
    if count > remaining(&s.c) // CORE_ROW_BYTES:
        what = b"has {found} entries, which do not fit in the frame"
        return fail(s.batch, b"outputs", -1, what, count, 0, s.c.at - s.parts[0].data)
    spare = <uint32_t>remaining(&s.c) - CORE_ROW_BYTES * count
    if not reserve_rows(s.batch, count) or not reserve_tokens(s.batch, spare) or (
        not reserve_extras(s.batch, spare // CORE_EXTRA_BYTES) or not reserve_colds(s.batch, spare // CORE_COLD_BYTES)
    ):
        return fail(s.batch, b"outputs", -1, b"has no memory", 0, 0, s.c.at - s.parts[0].data)
    s.c.end -= CORE_ROW_BYTES * count
    for i in range(count):
        s.c.end += CORE_ROW_BYTES
        if core_row(s, i) < 0:
            return -1
    s.batch.row_count = count
    return 0


cdef inline int core_stats(Source *s, bint *present) noexcept nogil:
    """A load report needs the two queues' lengths; other keys may be missing or new."""
    cdef const uint8_t *key = NULL
    cdef uint32_t[3] queue = [0, 0, 0]   # running, waiting, skipped waiting
    cdef uint32_t pairs = 0
    cdef uint32_t size = 0
    cdef uint32_t i
    cdef int which
    cdef bint has_running = False
    cdef bint has_waiting = False
    cdef double usage = 0
    cdef int status
    if take_nil(&s.c):
        return 0
    present[0] = True
    status = read_map(&s.c, &pairs)
    if status != OK:
        return core_fault(s, b"scheduler_stats", -1, status, MAP)
    for i in range(pairs):
        which = -1
        status = read_text(&s.c, &key, &size)
        if status == WRONG_TYPE:
            status = skip(&s.c)
        elif status == OK:
            if key_is(key, size, b"num_running_reqs", 16):
                which, has_running = 0, True
            elif key_is(key, size, b"num_waiting_reqs", 16):
                which, has_waiting = 1, True
            elif key_is(key, size, b"num_skipped_waiting_reqs", 24):
                which = 2
            elif key_is(key, size, b"kv_cache_usage", 14):
                which = 3
        if status != OK:
            return core_fault(s, b"scheduler_stats", -1, status, VALUE)
        if which < 0:
            status = skip(&s.c)
        elif which < 3:
            status = read_u32(&s.c, &queue[which])
        else:
            status = read_float(&s.c, &usage)
        if status != OK:
            return core_fault(s, b"scheduler_stats", -1, status, COUNT)
    if has_running and has_waiting:
        s.batch.has_load = True
        s.batch.running = queue[0]
        s.batch.waiting = <uint64_t>queue[1] + queue[2]
        s.batch.kv_usage = usage if 0 <= usage <= 1 else (1.0 if usage > 1 else 0.0)
    return 0


cdef inline int core_utility(Source *s) noexcept nogil:
    cdef const char *column = b"utility_output"
    cdef const uint8_t *start = s.c.at
    cdef const uint8_t *text = NULL
    cdef uint32_t elements = 0
    cdef uint32_t size = 0
    cdef uint32_t i
    cdef int status
    if take_nil(&s.c):
        return 0
    status = read_array(&s.c, &elements)
    if status == OK and elements == 0:
        return fail(s.batch, column, -1, b"has no call_id", 0, 0, start - s.parts[0].data)
    if status != OK:
        return core_fault(s, column, -1, status, b"must be an array or nil, found {kind}")
    if core_i64(s, column, -1, &s.batch.utility_call, b"must have an integer as call_id, found {kind}") < 0:
        return -1
    if elements > 1 and not take_nil(&s.c):
        status = read_valid_text(&s.c, &text, &size)
        if status != OK:
            return core_fault(s, column, -1, status, b"must have text as failure_message, found {kind}")
    for i in range(2, elements):
        if core_skip(s, column, -1) < 0:
            return -1
    s.batch.utility.start = <uint32_t>(start - s.parts[0].data)
    s.batch.utility.size = <uint32_t>(s.c.at - start)
    return 0


cdef inline int core_finished(Source *s, bint *present) noexcept nogil:
    cdef const char *column = b"finished_requests"
    cdef const uint8_t *start = s.c.at
    cdef const uint8_t *text = NULL
    cdef uint32_t count = 0
    cdef uint32_t size = 0
    cdef uint32_t i
    cdef int status
    if take_nil(&s.c):
        return 0
    present[0] = True
    status = read_array(&s.c, &count)
    if status != OK:
        return core_fault(s, column, -1, status, b"must be an array or nil, found {kind}")
    for i in range(count):
        status = read_valid_text(&s.c, &text, &size)
        if status != OK:
            return core_fault(s, column, i, status, TEXT)
    s.batch.finished.start = <uint32_t>(start - s.parts[0].data)
    s.batch.finished.size = <uint32_t>(s.c.at - start)
    return 0


cdef inline int core_wave(Source *s, const char *column, uint8_t wave) noexcept nogil:
    cdef int status
    if take_nil(&s.c):
        return 0
    if s.batch.wave != WAVE_NONE:
        return fail(s.batch, column, -1, b"must be nil beside wave_complete", 0, 0, s.c.at - s.parts[0].data)
    status = read_u64(&s.c, &s.batch.wave_number)
    if status != OK:
        return core_fault(s, column, -1, status, COUNT)
    s.batch.wave = wave
    return 0


cdef inline int core_version(Source *s) noexcept nogil:
    cdef const uint8_t *text = NULL
    cdef uint32_t size = 0
    cdef int status
    if take_nil(&s.c):
        return 0
    status = read_valid_text(&s.c, &text, &size)
    if status != OK:
        return core_fault(s, b"weight_version", -1, status, TEXT)
    s.batch.weight_version.start = <uint32_t>(text - s.parts[0].data)
    s.batch.weight_version.size = size
    return 0
