# Which rank a request goes to, and the slot it gets there. Called with the table's mutex held.

from libc.stdint cimport int64_t, uint8_t, uint32_t

from smg._frame cimport FINISH_NONE
from smg._table cimport (
    CAUSE_NONE, NIL, QUEUE_BYTES, QUEUE_FRAMES, RANK_LIVE, RANK_STALLED, REFUSED_CLOSED, REFUSED_INVALID_RANK,
    REFUSED_NO_RANK, REFUSED_OVERLOADED, SLOT_LIVE, Rank, Slot, Table, add_block, heap_push, slot_at,
)

cdef inline double score(const Rank *rank) noexcept nogil:
    cdef int64_t queued
    cdef double value
    if rank.in_flight == 0:
        return 0.0   # whatever was reported last was taken before the rank's last request finished
    queued = rank.running + rank.waiting
    value = <double>(rank.in_flight if rank.in_flight > queued else queued)
    if rank.waiting > 0 and rank.kv_usage > 0.5:
        value += rank.waiting * 6.0 * (rank.kv_usage - 0.5)   # a queue behind a filling KV cache drains slowly
    return value

cdef inline int full(const Table *table, const Rank *rank, size_t size) noexcept nogil:
    return (rank.queue_count >= QUEUE_FRAMES or
            (rank.queue_count and rank.queue_bytes + size > QUEUE_BYTES) or
            (table.max_inflight and rank.in_flight >= table.max_inflight))

# Ranks in lockstep step together or not at all.
cdef inline int all_live(const Table *table) noexcept nogil:
    cdef uint32_t i
    for i in range(table.rank_count):
        if table.ranks[i].state != RANK_LIVE and table.ranks[i].state != RANK_STALLED:
            return 0
    return 1

# Whether a stalled rank is given one request, to see if it hears again: with nothing in flight it would not show it.
cdef inline int on_trial(const Table *table, const Rank *rank, size_t size, double quiet_before) noexcept nogil:
    return (rank.state == RANK_STALLED and rank.in_flight == 0 and rank.quiet_since < quiet_before and
            not full(table, rank, size))

# The rank for a message of `size` bytes, or a Refusal. `pinned` < 0 = any. A stalled rank may be tried again that was
# quiet since `quiet_before` (monotonic seconds, 0 = never).
cdef inline int choose(Table *table, int pinned, size_t size, double quiet_before) noexcept nogil:
    cdef Rank *rank
    cdef uint32_t i, at
    cdef int best = -1, seen = -1
    cdef uint8_t level
    cdef double value, best_value = 0
    if table.closed:
        return REFUSED_CLOSED
    if table.lockstep and not all_live(table):
        return REFUSED_NO_RANK
    if pinned >= 0:
        if <uint32_t>pinned >= table.rank_count:
            return REFUSED_INVALID_RANK
        rank = &table.ranks[pinned]
        if rank.state != RANK_LIVE and rank.state != RANK_STALLED:
            return REFUSED_INVALID_RANK
        if full(table, rank, size):
            rank.count.overloaded += 1
            return REFUSED_OVERLOADED
        return pinned
    for level in range(RANK_LIVE, RANK_STALLED + 1):
        for i in range(table.rank_count):
            at = (table.scan_start + i) % table.rank_count
            rank = &table.ranks[at]
            if rank.state != level and not (level == RANK_LIVE and on_trial(table, rank, size, quiet_before)):
                continue
            seen = <int>at
            if full(table, rank, size):
                continue
            value = score(rank)
            if best < 0 or value < best_value:
                best = <int>at
                best_value = value
        if seen >= 0:
            break
    table.scan_start = (table.scan_start + 1) % table.rank_count
    if best >= 0:
        return best
    if seen < 0:
        return REFUSED_NO_RANK
    table.ranks[seen].count.overloaded += 1   # any of them: each was full
    return REFUSED_OVERLOADED

# Takes a free slot for `rank`. Returns its index, or NIL when there is no memory.
cdef inline uint32_t reserve(Table *table, int rank_index, uint32_t prompt_tokens, double now,
                             double deadline) noexcept nogil:
    cdef Rank *rank = &table.ranks[rank_index]
    cdef Slot *slot
    cdef uint32_t index
    if table.free_head == NIL and add_block(table) != 0:
        return NIL
    index = table.free_head
    slot = slot_at(table, index)
    slot.deadline = deadline
    if deadline > 0 and heap_push(table, index) != 0:
        slot.heap_at = NIL
        return NIL
    table.free_head = slot.next_free
    if table.free_head == NIL:
        table.free_tail = NIL
    slot.state = SLOT_LIVE
    slot.cause = CAUSE_NONE
    slot.finish = FINISH_NONE
    slot.wanted = slot.ready = slot.sent = slot.suffix_size = slot.stop_kind = 0
    slot.rank = rank_index
    slot.incarnation = rank.incarnation
    slot.prompt_tokens = prompt_tokens
    slot.completion_tokens = slot.cached_tokens = 0
    slot.prev_live = NIL
    slot.next_live = rank.live_head
    if rank.live_head != NIL:
        slot_at(table, rank.live_head).prev_live = index
    rank.live_head = index
    if rank.in_flight == 0:
        rank.quiet_since = now
    rank.in_flight += 1
    table.live_count += 1
    return index
