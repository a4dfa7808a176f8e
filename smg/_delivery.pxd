# A frame's rows into slots, and a slot's output out of it. Called with the table's mutex held.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset

from smg._frame cimport FINISH_NONE, FINISH_OTHER, Batch, Row
from smg._table cimport (
    CAUSE_FINISHED, CAUSE_LOST, REASON_MAX, SLOT_ENDED, SLOT_LIVE, Rank, Slot, Table, end, free_slot, mark_ready,
    signal_outlets, slot_at, unlink_ready,
)

# One output on its way from a slot to Python. `cold`, and `record` when `freed`, belong to the taker.
cdef struct Taken:
    void *record
    uint8_t freed              # the slot was freed by this take
    uint8_t cause
    uint8_t finish
    int32_t rank
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

cdef inline int append_cold(Slot *slot, const uint8_t *bytes_, uint32_t size) noexcept nogil:
    cdef uint32_t capacity
    cdef uint8_t *cold
    if slot.cold_size + size > slot.cold_capacity:
        capacity = slot.cold_capacity * 2 if slot.cold_capacity * 2 > slot.cold_size + size else slot.cold_size + size
        cold = <uint8_t *>realloc(slot.cold, capacity)
        if cold == NULL:
            return -1
        slot.cold = cold
        slot.cold_capacity = capacity
    memcpy(slot.cold + slot.cold_size, bytes_, size)
    slot.cold_size += size
    return 0

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

# Phase two: hands the rows of a whole, checked frame to their slots, and wakes who waits.
cdef inline void apply(Table *table, int rank_index, const Batch *batch, const uint8_t *frame, double now) noexcept nogil:
    cdef Rank *rank = &table.ranks[rank_index]
    cdef const Row *row
    cdef Slot *slot
    cdef uint32_t i, size
    for i in range(batch.row_count):
        row = &batch.rows[i]
        if not row.ours or row.epoch != table.epoch or row.slot >= table.slot_count:
            rank.count.foreign += 1
            continue
        slot = slot_at(table, row.slot)
        if (slot.generation != row.generation or slot.state != SLOT_LIVE or
                slot.rank != rank_index or slot.incarnation != rank.incarnation):
            rank.count.late += 1
            continue
        if row.token_count and append_tokens(slot, batch.tokens + row.first_token, row.token_count) != 0:
            end(table, row.slot, CAUSE_LOST)
            continue
        slot.prompt_tokens = row.prompt_tokens
        slot.completion_tokens = row.completion_tokens
        slot.cached_tokens = row.cached_tokens
        if row.logprob_values.size:
            if (append_cold(slot, frame + row.logprob_values.start, row.logprob_values.size) != 0 or
                    append_cold(slot, frame + row.logprob_ids.start, row.logprob_ids.size) != 0):
                end(table, row.slot, CAUSE_LOST)
                continue
        if row.finish != FINISH_NONE:
            slot.finish = row.finish
            if row.finish == FINISH_OTHER:
                size = row.finish_text.size if row.finish_text.size < REASON_MAX else REASON_MAX - 1
                memcpy(slot.reason, frame + row.finish_text.start, size)
                slot.reason[size] = 0
            end(table, row.slot, CAUSE_FINISHED)
        elif row.token_count:
            mark_ready(table, row.slot)
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
    if taken.cause == CAUSE_FINISHED and taken.finish == FINISH_OTHER:
        memcpy(taken.reason, slot.reason, REASON_MAX)
    if taken.freed:
        free_slot(table, index)
    return 1
