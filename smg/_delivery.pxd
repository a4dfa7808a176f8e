# A frame's rows into slots, and a slot's output out of it. Called with the table's mutex held.

from libc.stdint cimport UINT32_MAX, int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset

from smg._batch cimport cold_bytes, parse_wire_id, write_cold
from smg._frame cimport (
    FINISH_NONE, FINISH_OTHER, STOP_NONE, STOP_TEXT, Aside, Batch, Extra, Part, Row, Span,
)
from smg._msgpack cimport Cursor, read_array, read_text
from smg._table cimport (
    CAUSE_FINISHED, CAUSE_FORGOTTEN, CAUSE_LOST, REASON_MAX, SLOT_ENDED, SLOT_LIVE, Rank, Slot, Table, end, find,
    free_slot, mark_ready, signal_outlets, slot_at, unlink_ready,
)

# One output on its way from a slot to Python. `cold`, and `record` when `freed`, belong to the taker.
cdef struct Taken:
    void *record
    uint8_t freed              # the slot was freed by this take
    uint8_t cause
    uint8_t finish
    uint8_t stop_kind
    int32_t rank
    int64_t stop_id
    uint32_t prompt_tokens
    uint32_t completion_tokens
    uint32_t cached_tokens
    uint32_t first_token       # range in Scratch.tokens
    uint32_t token_count
    uint8_t *cold
    uint32_t cold_size
    char reason[24]

cdef struct Scratch:
    Taken *taken
    uint32_t count
    uint32_t capacity
    uint32_t *tokens
    uint32_t token_count
    uint32_t token_capacity

# ---------------------------------------------------------------- applying a batch

# Room for `size` more bytes of cold entries, which become part of them; NULL when memory is out.
cdef inline uint8_t *more_cold(Slot *slot, size_t size) noexcept nogil:
    cdef size_t needed = slot.cold_size + size
    cdef size_t capacity = 2 * <size_t>slot.cold_capacity
    cdef uint8_t *cold
    if needed > UINT32_MAX:
        return NULL
    if needed > slot.cold_capacity:
        if capacity < needed or capacity > UINT32_MAX:
            capacity = needed
        cold = <uint8_t *>realloc(slot.cold, capacity)
        if cold == NULL:
            return NULL
        slot.cold = cold
        slot.cold_capacity = <uint32_t>capacity
    slot.cold_size += <uint32_t>size
    return slot.cold + slot.cold_size - size

# Logprobs that came as columns: values, ids. Returns -1 when memory is out.
cdef inline int append_columns(Slot *slot, const Aside *aside, const uint8_t *frame) noexcept nogil:
    cdef uint8_t *at
    if aside.logprob_values.size == 0:
        return 0
    at = more_cold(slot, <size_t>aside.logprob_values.size + aside.logprob_ids.size)
    if at == NULL:
        return -1
    memcpy(at, frame + aside.logprob_values.start, aside.logprob_values.size)
    memcpy(at + aside.logprob_values.size, frame + aside.logprob_ids.start, aside.logprob_ids.size)
    return 0

# What few rows have. Returns -1 when memory is out.
cdef inline int append_extra(Slot *slot, const Extra *extra, const Batch *batch, const Part *parts) noexcept nogil:
    cdef uint8_t *at
    cdef uint32_t i
    if extra.stop_kind != STOP_NONE:
        slot.stop_kind = extra.stop_kind
        slot.stop_id = extra.stop_id
        if extra.stop_kind == STOP_TEXT:
            keep_word(slot, parts[0].data, extra.stop_text)
    for i in range(extra.first_cold, extra.first_cold + extra.cold_count):
        at = more_cold(slot, cold_bytes(&batch.colds[i], parts))
        if at == NULL:
            return -1
        write_cold(&batch.colds[i], parts, at)
    return 0

cdef inline void keep_word(Slot *slot, const uint8_t *frame, Span word) noexcept nogil:
    cdef uint32_t size = word.size if word.size < REASON_MAX else REASON_MAX - 1
    memcpy(slot.reason, frame + word.start, size)
    slot.reason[size] = 0

cdef inline int append_tokens(Slot *slot, const uint32_t *tokens, uint32_t count) noexcept nogil:
    cdef uint32_t capacity, i
    cdef uint32_t *grown
    if slot.token_count + count > slot.token_capacity:
        capacity = slot.token_capacity * 2 if slot.token_capacity else 8
        while capacity < slot.token_count + count:
            capacity *= 2
        grown = <uint32_t *>realloc(slot.tokens, capacity * sizeof(uint32_t))
        if grown == NULL:
            return -1
        slot.tokens = grown
        slot.token_capacity = capacity
    for i in range(count):
        slot.tokens[slot.token_count + i] = tokens[i]
    slot.token_count += count
    return 0

# The slot of an id on the wire while this rank runs it, else NULL, counted: the id of another router, or of a
# request that has ended.
cdef inline Slot *running(
    Table *table, int rank_index, uint8_t ours, uint32_t epoch, uint32_t index, uint32_t generation
) noexcept nogil:
    cdef Rank *rank = &table.ranks[rank_index]
    cdef Slot *slot
    if not ours or epoch != table.epoch or index >= table.slot_count:
        rank.count.foreign += 1
        return NULL
    slot = slot_at(table, index)
    if (slot.generation != generation or slot.state != SLOT_LIVE or
            slot.rank != rank_index or slot.incarnation != rank.incarnation):
        rank.count.late += 1
        return NULL
    return slot

# Phase two: hands the rows of a whole, checked message to their slots, and wakes who waits.
cdef inline void apply(Table *table, int rank_index, const Batch *batch, const Part *parts, double now) noexcept nogil:
    cdef Rank *rank = &table.ranks[rank_index]
    cdef const Extra *extra = batch.extras
    cdef const Extra *extras_end = batch.extras + batch.extra_count
    cdef const Extra *own
    cdef const Row *row
    cdef Slot *slot
    cdef bint has_logprobs = batch.has_logprobs
    cdef uint32_t i
    for i in range(batch.row_count):
        row = &batch.rows[i]
        own = NULL
        if extra < extras_end and extra.row == i:
            own = extra
            extra += 1
        slot = running(table, rank_index, row.ours, row.epoch, row.slot, row.generation)
        if slot == NULL:
            continue
        if ((row.token_count and append_tokens(slot, batch.tokens + row.first_token, row.token_count) != 0) or
                (has_logprobs and append_columns(slot, &batch.asides[i], parts[0].data) != 0) or
                (own != NULL and append_extra(slot, own, batch, parts) != 0)):
            end(table, row.slot, CAUSE_LOST)
            continue
        if batch.deltas:
            slot.completion_tokens += row.token_count
        else:
            slot.completion_tokens = row.completion_tokens
        if not row.counts_absent:
            slot.prompt_tokens = row.prompt_tokens
            slot.cached_tokens = row.cached_tokens
        if row.finish != FINISH_NONE:
            slot.finish = row.finish
            if row.finish == FINISH_OTHER:
                keep_word(slot, parts[0].data, batch.asides[i].finish_text)
            end(table, row.slot, CAUSE_FINISHED)
        elif row.token_count:
            mark_ready(table, row.slot)
    if batch.finished.size:
        end_forgotten(table, rank_index, parts[0].data + batch.finished.start, batch.finished.size)
    rank.count.frames += 1
    rank.count.rows += batch.row_count
    rank.count.tokens += batch.token_count
    rank.quiet_since = now
    if batch.has_load:
        rank.reported = 1
        rank.kv_usage = batch.kv_usage
        if rank.in_flight:
            rank.running = <int64_t>batch.running
            rank.waiting = <int64_t>batch.waiting
    signal_outlets(table)

# Ends the requests that the engine is done with although no row said so. Most of the ids have ended before.
# They are read from the frame again, already checked: a table of them would take many times what they take there.
cdef inline void end_forgotten(Table *table, int rank_index, const uint8_t *ids, uint32_t size) noexcept nogil:
    cdef Cursor c
    cdef Row id_
    cdef Slot *slot
    cdef const uint8_t *text = NULL
    cdef uint32_t count = 0
    cdef uint32_t length = 0
    cdef uint32_t i
    c.at, c.end = ids, ids + size
    read_array(&c, &count)
    for i in range(count):
        read_text(&c, &text, &length)
        parse_wire_id(text, length, &id_)
        if not id_.ours or id_.epoch != table.epoch:
            continue
        slot = find(table, id_.slot, id_.generation)
        if slot != NULL and slot.rank == rank_index and slot.incarnation == table.ranks[rank_index].incarnation:
            end(table, id_.slot, CAUSE_FORGOTTEN)

# ---------------------------------------------------------------- taking outputs

cdef inline int scratch_room(Scratch *scratch, uint32_t entries, uint32_t tokens) noexcept nogil:
    cdef uint32_t capacity
    cdef void *grown
    if scratch.count + entries > scratch.capacity:
        capacity = scratch.capacity * 2 if scratch.capacity else 16
        while capacity < scratch.count + entries:
            capacity *= 2
        grown = realloc(scratch.taken, capacity * sizeof(Taken))
        if grown == NULL:
            return -1
        scratch.taken = <Taken *>grown
        scratch.capacity = capacity
    if scratch.token_count + tokens > scratch.token_capacity:
        capacity = scratch.token_capacity * 2 if scratch.token_capacity else 64
        while capacity < scratch.token_count + tokens:
            capacity *= 2
        grown = realloc(scratch.tokens, capacity * sizeof(uint32_t))
        if grown == NULL:
            return -1
        scratch.tokens = <uint32_t *>grown
        scratch.token_capacity = capacity
    return 0

cdef inline void scratch_free(Scratch *scratch) noexcept nogil:
    free(scratch.taken)
    free(scratch.tokens)
    memset(scratch, 0, sizeof(Scratch))

# Moves what a slot holds into scratch; a terminal output frees the slot. Returns 1, or 0 when there is no
# output, or -1 when there is no memory (nothing was moved).
cdef inline int take_slot(Table *table, uint32_t index, Scratch *scratch) noexcept nogil:
    cdef Slot *slot = slot_at(table, index)
    cdef Taken *taken
    cdef uint32_t i
    if slot.token_count == 0 and slot.state != SLOT_ENDED:
        return 0
    if scratch_room(scratch, 1, slot.token_count) != 0:
        return -1
    unlink_ready(table, index)
    taken = &scratch.taken[scratch.count]
    scratch.count += 1
    taken.record = slot.record
    taken.cause = slot.cause
    taken.finish = slot.finish
    taken.stop_kind = slot.stop_kind
    taken.stop_id = slot.stop_id
    taken.rank = slot.rank
    taken.prompt_tokens = slot.prompt_tokens
    taken.completion_tokens = slot.completion_tokens
    taken.cached_tokens = slot.cached_tokens
    taken.first_token = scratch.token_count
    taken.token_count = slot.token_count
    for i in range(slot.token_count):
        scratch.tokens[scratch.token_count + i] = slot.tokens[i]
    scratch.token_count += slot.token_count
    slot.token_count = 0
    taken.cold = slot.cold
    taken.cold_size = slot.cold_size
    slot.cold = NULL
    slot.cold_size = slot.cold_capacity = 0
    taken.freed = slot.state == SLOT_ENDED
    if taken.cause == CAUSE_FINISHED and (taken.finish == FINISH_OTHER or taken.stop_kind == STOP_TEXT):
        memcpy(taken.reason, slot.reason, REASON_MAX)
    if taken.freed:
        free_slot(table, index)
    return 1
