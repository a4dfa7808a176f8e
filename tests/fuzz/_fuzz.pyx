"""Fuzz targets: one per compiled decoder, each with what must hold for any bytes at all.

Built with sanitizers by compile_targets.py, and run by run.py. Beside the sanitizers' own findings a target ends the
process when a decoder gives a place outside the message, counts that do not add up, or takes more memory than
a multiple of the message, and when what it makes of a message depends on the message before it.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, strcmp

from smg._batch cimport batch_free, batch_init, cold_bytes, write_cold
from smg._frame cimport FINISH_OTHER, STOP_TEXT, WAVE_START, Aside, Batch, Cold, Extra, Part, Row, Span
from smg._tokenspeed cimport decode_slim
from smg._vllm cimport decode_core

cdef extern from "driver.h" nogil:
    ctypedef void (*fuzz_target)(const uint8_t *input, size_t size) noexcept nogil
    cdef struct fuzz_input:
        uint8_t *data
        size_t size
    cdef struct fuzz_run:
        fuzz_input *corpus
        size_t count
        uint64_t executions
        uint64_t places
    enum:
        FUZZ_LONGEST
    int fuzz_add(fuzz_run *run, const uint8_t *data, size_t size)
    void fuzz_mutate(fuzz_run *run, fuzz_target target, uint64_t executions, double seconds, uint64_t seed)
    void fuzz_keep_crash(const char *path)
    void fuzz_fail(const char *what)
    void fuzz_free(fuzz_run *run)

cdef enum:
    MEMORY = 16                # scratch bytes per byte of a message, beside one of each thing
    MEMORY_LEAST = 1024
    PARTS_MOST = 5             # of a message, the frame among them

LONGEST = FUZZ_LONGEST

ctypedef int (*Decoder)(const Part *parts, uint32_t part_count, Batch *batch) noexcept nogil

cdef Batch slim_used           # decodes every input as well, and so holds what came before it
cdef Batch core_used
batch_init(&slim_used)
batch_init(&core_used)


cdef int slim(const Part *parts, uint32_t part_count, Batch *batch) noexcept nogil:
    return decode_slim(parts[0].data, parts[0].size, batch)


cdef void fuzz_slim(const uint8_t *given, size_t size) noexcept nogil:
    """TokenSpeed: the input is the frame."""
    cdef Part part
    part.data, part.size = given, size
    check(slim, &part, 1, &slim_used)


cdef void fuzz_core(const uint8_t *given, size_t size) noexcept nogil:
    """vLLM: a byte with the number of parts after the frame, two bytes with the size of each, the frame, the parts."""
    cdef Part parts[PARTS_MOST]
    cdef uint32_t count = 1
    cdef uint32_t i
    cdef size_t at
    cdef size_t aux = 0
    if size:
        count += given[0] % PARTS_MOST
    if size < 2 * count:       # no room for their sizes
        count = 1
    at = 2 * count - 1 if size else 0
    for i in range(1, count):
        parts[i].size = given[2 * i - 1] << 8 | given[2 * i]
        aux += parts[i].size
    if aux > size - at:
        count, aux = 1, 0
    parts[0].data, parts[0].size = given + at, size - at - aux
    at = size - aux
    for i in range(1, count):
        parts[i].data = given + at
        at += parts[i].size
    check(decode_core, parts, count, &core_used)


cdef int overread(const Part *parts, uint32_t part_count, Batch *batch) noexcept nogil:
    """A decoder that goes one byte too far."""
    batch.fault.column = batch.fault.what = b"frame"
    batch.fault.offset = parts.data[parts.size] & 1
    return -1


cdef void fuzz_overread(const uint8_t *given, size_t size) noexcept nogil:
    """To show that the sanitizers watch."""
    cdef Part part
    part.data, part.size = given, size
    check(overread, &part, 1, &slim_used)


cdef void check(Decoder decode, const Part *given, uint32_t count, Batch *used) noexcept nogil:
    """Decodes a copy of the message, each part of which ends where its memory does."""
    cdef Part parts[PARTS_MOST]
    cdef Batch fresh
    cdef size_t size = 0
    cdef uint32_t i
    cdef int status
    for i in range(count):
        parts[i].size = given[i].size
        parts[i].data = <uint8_t *>malloc(given[i].size or 1)
        memcpy(<uint8_t *>parts[i].data, given[i].data, given[i].size)
        size += given[i].size
    batch_init(&fresh)
    status = decode(parts, count, &fresh)
    if scratch_bytes(&fresh) > MEMORY * size + MEMORY_LEAST:
        fuzz_fail("memory over its multiple of the message")
    if status == 0:
        check_decoded(&fresh, parts, count)
    elif fresh.row_count or fresh.finished.size or fresh.fault.column == NULL or fresh.fault.what == NULL:
        fuzz_fail("a refusal with rows, or without a fault")
    elif fresh.fault.offset > parts[0].size:
        fuzz_fail("a fault outside the frame")
    if decode(parts, count, used) != status:
        fuzz_fail("taken or refused by what came before")
    if status == 0:
        check_decoded(used, parts, count)
        check_same(&fresh, used)
    elif used.fault.offset != fresh.fault.offset or strcmp(used.fault.column, fresh.fault.column):
        fuzz_fail("another fault after another message")
    batch_free(&fresh)
    for i in range(count):
        free(<void *>parts[i].data)


cdef size_t scratch_bytes(const Batch *batch) noexcept nogil:
    return (
        batch.row_capacity * sizeof(Row) + batch.aside_capacity * sizeof(Aside)
        + batch.token_capacity * sizeof(uint32_t) + batch.extra_capacity * sizeof(Extra)
        + batch.cold_capacity * sizeof(Cold)
    )


cdef void check_span(Span span, size_t size) noexcept nogil:
    if span.size and (span.start > size or span.size > size - span.start):
        fuzz_fail("a span outside the frame")


cdef void check_decoded(const Batch *batch, const Part *parts, uint32_t count) noexcept nogil:
    cdef size_t size = parts[0].size
    cdef const Row *row
    cdef const Extra *extra
    cdef uint32_t i
    cdef uint32_t tokens = 0
    cdef uint32_t colds = 0
    for i in range(batch.row_count):
        row = &batch.rows[i]
        check_span(row.rid, size)
        if row.finish and batch.asides != NULL:
            check_span(batch.asides[i].finish_text, size)
        if batch.has_logprobs:
            check_span(batch.asides[i].logprob_values, size)
            check_span(batch.asides[i].logprob_ids, size)
        if row.first_token != tokens or row.finish > FINISH_OTHER:
            fuzz_fail("a row with another row's tokens, or an unknown end")
        tokens += row.token_count
    if tokens != batch.token_count:
        fuzz_fail("tokens that belong to no row")
    for i in range(batch.extra_count):
        extra = &batch.extras[i]
        check_span(extra.stop_text, size)
        if extra.row >= batch.row_count or (i > 0 and extra.row <= batch.extras[i - 1].row):
            fuzz_fail("an extra out of order")
        if extra.first_cold != colds or extra.stop_kind > STOP_TEXT:
            fuzz_fail("an extra with another one's values")
        colds += extra.cold_count
    if colds != batch.cold_count:
        fuzz_fail("cold values that belong to no row")
    for i in range(colds):
        check_cold(&batch.colds[i], parts, count)
    check_span(batch.finished, size)
    check_span(batch.utility, size)
    check_span(batch.weight_version, size)
    if batch.wave > WAVE_START or not 0 <= batch.kv_usage <= 1:
        fuzz_fail("a value outside its range")


cdef void check_cold(const Cold *cold, const Part *parts, uint32_t count) noexcept nogil:
    cdef uint8_t *copy
    cdef uint32_t i
    check_span(cold.value, parts[0].size)
    for i in range(cold.aux_count):
        if not 1 <= cold.aux[i] < count:
            fuzz_fail("a cold value in a part that is not there")
    copy = <uint8_t *>malloc(cold_bytes(cold, parts))
    write_cold(cold, parts, copy)
    free(copy)


cdef void check_same(const Batch *one, const Batch *other) noexcept nogil:
    cdef const Row *a
    cdef const Row *b
    cdef uint32_t i
    cdef bint same = one.row_count == other.row_count and one.token_count == other.token_count
    same = same and one.extra_count == other.extra_count and one.cold_count == other.cold_count
    same = same and one.finished.size == other.finished.size and one.has_load == other.has_load
    same = same and one.running == other.running and one.waiting == other.waiting
    same = same and one.wave == other.wave and one.engine_index == other.engine_index
    same = same and one.utility.size == other.utility.size and one.has_logprobs == other.has_logprobs
    for i in range(one.row_count if same else 0):
        a, b = &one.rows[i], &other.rows[i]
        same = same and a.ours == b.ours and a.epoch == b.epoch and a.slot == b.slot
        same = same and a.generation == b.generation and a.finish == b.finish
        same = same and a.first_token == b.first_token and a.token_count == b.token_count
        same = same and a.counts_absent == b.counts_absent and a.cached_tokens == b.cached_tokens
        same = same and a.prompt_tokens == b.prompt_tokens and a.rid.start == b.rid.start
        same = same and (one.deltas or a.completion_tokens == b.completion_tokens)
        if same and a.finish and one.asides != NULL:
            same = one.asides[i].finish_text.size == other.asides[i].finish_text.size
        if same and one.has_logprobs:
            same = one.asides[i].logprob_ids.size == other.asides[i].logprob_ids.size
            same = same and one.asides[i].logprob_values.size == other.asides[i].logprob_values.size
    for i in range(one.token_count if same else 0):
        same = same and one.tokens[i] == other.tokens[i]
    if not same:
        fuzz_fail("decoded to something else after another message")


# What run.py calls

cdef fuzz_target target_of(str name) except NULL:
    if name == "tokenspeed":
        return fuzz_slim
    if name == "vllm":
        return fuzz_core
    if name == "overread":
        return fuzz_overread
    raise ValueError(f"no fuzz target {name!r}")


def execute(str name, bytes given):
    """One input, as it is."""
    target_of(name)(<const uint8_t *><const char *>given, len(given))


def mutate(str name, corpus, uint64_t executions, double seconds, uint64_t seed, bytes crash_path):
    """Mutate the corpus until the executions or the seconds are used up.

    Returns (executions, places reached, corpus with the inputs that reached something new). What goes wrong
    ends the process, with the input written to `crash_path`.
    """
    cdef fuzz_run run
    cdef fuzz_target target = target_of(name)
    cdef bytes given
    cdef size_t i
    run.corpus, run.count, run.executions, run.places = NULL, 0, 0, 0
    fuzz_keep_crash(crash_path)
    try:
        for given in corpus:
            if fuzz_add(&run, <const uint8_t *><const char *>given, len(given)) < 0:
                raise MemoryError
        with nogil:
            fuzz_mutate(&run, target, executions, seconds, seed)
        found = [(<const char *>run.corpus[i].data)[:run.corpus[i].size] for i in range(run.count)]
        return run.executions, run.places, found
    finally:
        fuzz_free(&run)
