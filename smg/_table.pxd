# The slot table of one group: slots, ranks and outlets, all in C under one mutex.
#
# Rules that everything here keeps:
# * every function that takes a Table is called with its mutex held, unless it says otherwise;
# * with the mutex held nobody creates, touches or releases a Python object. `record` is an opaque owned
#   reference: whoever frees a slot gets it back and releases it after unlocking;
# * a request leaves SLOT_LIVE through `end` and nowhere else. Exactly-once and the counters live there;
# * the mutex is held for one batch, one take or one message at most.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset
from posix.unistd cimport read, write

from smg._frame cimport (
    FINISH_NONE, FINISH_OTHER, Batch, Row,
)
from smg._zmq cimport Zmq, zmq_msg_t

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *, const void *)
    int pthread_mutex_destroy(pthread_mutex_t *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)

cdef enum:
    NIL = 0xFFFFFFFF           # no slot
    SLOTS_PER_BLOCK = 1024
    WIRE_ID_SIZE = 24          # hex digits: epoch, slot, generation
    SUFFIX_MAX = 33            # '-' and 32 characters of the request's own id
    TYPE_ADD = 0               # message type bytes
    TYPE_ABORT = 1
    TYPE_WAVE = 2
    TYPE_UTILITY = 3
    WAVE_SIZE = 11             # bytes of a wave message's payload
    REASON_MAX = 24            # bytes kept of a finish reason this code does not know
    QUEUE_FRAMES = 1024        # requests not yet sent to one rank
    KEPT_TOKENS = 64           # a freed slot keeps a token buffer up to this size
    QUEUE_BYTES = 67108864     # bytes not yet sent to one rank

cdef enum SlotState:
    SLOT_FREE = 0
    SLOT_LIVE = 1              # counted in its rank's in-flight
    SLOT_ENDED = 2             # terminal, not yet taken by its consumer

cdef enum Cause:
    CAUSE_NONE = 0
    CAUSE_FINISHED = 1         # the engine's own terminal output
    CAUSE_ABORTED = 2          # abort() by the consumer
    CAUSE_DROPPED = 3          # the consumer went away
    CAUSE_DIED = 4             # its rank died
    CAUSE_DEADLINE = 5
    CAUSE_CLOSED = 6           # the group was closed
    CAUSE_LOST = 7             # no memory for its tokens
    CAUSE_FORGOTTEN = 8        # the engine is done with it, and sent no last output
    CAUSE_COUNT = 9

cdef enum RankState:           # the values of lifecycle.State, in its order
    RANK_ABSENT = 0
    RANK_HELLO = 1
    RANK_LIVE = 2
    RANK_STALLED = 3
    RANK_DRAINING = 4
    RANK_DEAD = 5

cdef enum Refusal:             # what `choose` and `reserve` return instead of a rank
    REFUSED_NO_RANK = -1
    REFUSED_INVALID_RANK = -2
    REFUSED_OVERLOADED = -3
    REFUSED_CLOSED = -4
    REFUSED_NO_MEMORY = -5

cdef struct Outlet:
    int read_fd                # readable when the ready list is not empty
    int write_fd
    uint8_t signalled          # a wake is in the fd
    uint8_t signalling         # on the table's list of outlets to signal
    uint8_t eager              # every stream of it is always wanted
    uint8_t closed
    uint32_t ready_head
    uint32_t ready_tail
    uint32_t ready_count
    uint32_t slot_count        # slots attached
    Outlet *next_signal

cdef struct Slot:
    uint32_t generation
    uint8_t state              # SlotState
    uint8_t cause              # Cause, once ended
    uint8_t finish             # Finish, once the engine finished it; how its rank died, for CAUSE_DIED
    uint8_t wanted             # a consumer waits: the next output wakes it
    uint8_t ready              # on its outlet's ready list
    uint8_t sent               # its ADD was handed to libzmq
    uint8_t suffix_size
    uint8_t stop_kind          # StopKind: what the engine matched
    int32_t rank
    uint32_t incarnation       # of the rank, when it was reserved
    uint32_t prompt_tokens     # as submitted, until the engine says otherwise
    uint32_t completion_tokens # cumulative, as the engine counts
    uint32_t cached_tokens
    uint32_t token_count       # tokens not yet taken
    uint32_t token_capacity
    uint32_t *tokens
    int64_t stop_id            # of STOP_ID
    uint8_t *cold              # cold entries not yet taken, one after the other
    uint32_t cold_size
    uint32_t cold_capacity
    uint32_t heap_at           # place in the deadline heap, NIL = no deadline
    double deadline            # monotonic seconds
    Outlet *outlet
    void *record               # owned reference to the Python side's record
    uint32_t next_live         # its rank's list
    uint32_t prev_live
    uint32_t next_ready        # its outlet's list
    uint32_t prev_ready
    uint32_t next_free
    char reason[24]            # the engine's word: of FINISH_OTHER, else of STOP_TEXT
    char suffix[33]            # what follows the 24 digits on the wire

cdef struct Message:           # one request or abort on its way to a rank
    Message *next
    uint8_t type_byte
    uint32_t slot              # of an ADD; NIL for others
    uint32_t generation
    size_t size
    zmq_msg_t payload

cdef struct RankCounters:
    uint64_t frames
    uint64_t rows
    uint64_t tokens
    uint64_t undecodable       # frames
    uint64_t extra_parts       # message parts after the first
    uint64_t late              # rows of an old generation, incarnation or ended request
    uint64_t foreign           # rows with an id of another epoch or shape
    uint64_t misattributed     # frames whose engine_index is not the socket's rank
    uint64_t requests          # ADDs sent
    uint64_t aborts            # ABORTs sent
    uint64_t unsent            # ADDs dropped before they were sent
    uint64_t overloaded        # submits refused at a bound
    uint64_t ended[9]          # requests by Cause

cdef struct Rank:
    uint8_t state              # RankState
    uint32_t incarnation
    int64_t in_flight
    int64_t running            # last report; zero while nothing is in flight
    int64_t waiting
    double kv_usage            # 0..1, last report
    uint8_t reported           # any report since this incarnation went live
    double quiet_since         # monotonic seconds: last frame, or first request after idling
    uint32_t live_head         # its live slots
    Message *queue_head
    Message *queue_tail
    uint32_t queue_count
    size_t queue_bytes
    uint64_t wave_told         # the last wave it was told to start
    uint64_t wave_done         # the last wave after which it parked
    uint64_t parks             # of this incarnation
    uint8_t flushing           # on the table's list of ranks with messages to send
    uint32_t next_flush        # rank, NIL = last
    RankCounters count

cdef struct Table:
    pthread_mutex_t mutex
    uint32_t epoch             # random per start of a group
    uint8_t closed
    uint8_t lockstep           # ranks step together, in waves
    uint64_t wave              # the last one that was started; ranks ignore those before their own
    Slot **blocks
    uint32_t block_count
    uint32_t slot_count
    uint32_t free_head
    uint32_t free_tail
    uint32_t live_count
    Rank *ranks
    uint32_t rank_count
    uint32_t scan_start
    int64_t max_inflight       # per rank; 0 = unbounded
    uint32_t *heap             # slots with a deadline, earliest first
    uint32_t heap_size
    uint32_t heap_capacity
    Outlet *to_signal          # outlets that got an entry since the last signal
    uint32_t to_flush          # ranks that got a message since the pump last looked, NIL = none
    int wake_fd                # the pump's
    uint8_t wake_pending

# ---------------------------------------------------------------- slots

cdef inline Slot *slot_at(Table *table, uint32_t index) noexcept nogil:
    return &table.blocks[index // SLOTS_PER_BLOCK][index % SLOTS_PER_BLOCK]

# The slot of a handle, or NULL when it was freed since.
cdef inline Slot *find(Table *table, uint32_t index, uint32_t generation) noexcept nogil:
    cdef Slot *slot
    if index >= table.slot_count:
        return NULL
    slot = slot_at(table, index)
    if slot.generation != generation or slot.state == SLOT_FREE:
        return NULL
    return slot

cdef inline int add_block(Table *table) noexcept nogil:
    cdef Slot **blocks
    cdef Slot *block
    cdef uint32_t i, index
    blocks = <Slot **>realloc(table.blocks, (table.block_count + 1) * sizeof(Slot *))
    if blocks == NULL:
        return -1
    table.blocks = blocks
    block = <Slot *>calloc(SLOTS_PER_BLOCK, sizeof(Slot))
    if block == NULL:
        return -1
    blocks[table.block_count] = block
    table.block_count += 1
    for i in range(<uint32_t>SLOTS_PER_BLOCK):
        index = table.slot_count + i
        block[i].next_free = index + 1 if i + 1 < SLOTS_PER_BLOCK else NIL
        block[i].heap_at = NIL
    if table.free_tail == NIL:
        table.free_head = table.slot_count
    else:
        slot_at(table, table.free_tail).next_free = table.slot_count
    table.free_tail = table.slot_count + SLOTS_PER_BLOCK - 1
    table.slot_count += SLOTS_PER_BLOCK
    return 0

# Makes a slot free and gives its record back. The slot must not be live.
cdef inline void *free_slot(Table *table, uint32_t index) noexcept nogil:
    cdef Slot *slot = slot_at(table, index)
    cdef void *record = slot.record
    unlink_ready(table, index)
    if slot.outlet != NULL:
        slot.outlet.slot_count -= 1
    slot.outlet = NULL
    slot.record = NULL
    slot.state = SLOT_FREE
    slot.generation += 1
    slot.token_count = 0
    if slot.token_capacity > KEPT_TOKENS:
        free(slot.tokens)
        slot.tokens = NULL
        slot.token_capacity = 0
    free(slot.cold)
    slot.cold = NULL
    slot.cold_size = slot.cold_capacity = 0
    slot.next_free = NIL
    if table.free_tail == NIL:
        table.free_head = index
    else:
        slot_at(table, table.free_tail).next_free = index
    table.free_tail = index
    return record

# ---------------------------------------------------------------- outlets

cdef inline void unlink_ready(Table *table, uint32_t index) noexcept nogil:
    cdef Slot *slot = slot_at(table, index)
    cdef Outlet *outlet = slot.outlet
    if not slot.ready:
        return
    if slot.prev_ready == NIL:
        outlet.ready_head = slot.next_ready
    else:
        slot_at(table, slot.prev_ready).next_ready = slot.next_ready
    if slot.next_ready == NIL:
        outlet.ready_tail = slot.prev_ready
    else:
        slot_at(table, slot.next_ready).prev_ready = slot.prev_ready
    outlet.ready_count -= 1
    if not outlet.ready_count:
        outlet.signalled = 0   # its fd may have been cleared while something was ready: the next entry writes again
    slot.ready = 0

# Puts a slot on its outlet's ready list, if somebody waits for it and it is not there yet.
cdef inline void mark_ready(Table *table, uint32_t index) noexcept nogil:
    cdef Slot *slot = slot_at(table, index)
    cdef Outlet *outlet = slot.outlet
    if outlet == NULL or outlet.closed or slot.ready or not slot.wanted:
        return
    slot.ready = 1
    slot.next_ready = NIL
    slot.prev_ready = outlet.ready_tail
    if outlet.ready_tail == NIL:
        outlet.ready_head = index
    else:
        slot_at(table, outlet.ready_tail).next_ready = index
    outlet.ready_tail = index
    outlet.ready_count += 1
    if not outlet.signalling:
        outlet.signalling = 1
        outlet.next_signal = table.to_signal
        table.to_signal = outlet

cdef inline void signal_fd(int fd) noexcept nogil:
    cdef uint64_t one = 1
    write(fd, &one, sizeof(one))

cdef inline void clear_fd(int fd) noexcept nogil:
    cdef char waste[512]
    while read(fd, waste, sizeof(waste)) == <ssize_t>sizeof(waste):
        pass

# Wakes every outlet that got an entry since the last call: one write each, none if a wake is still in its fd.
cdef inline void signal_outlets(Table *table) noexcept nogil:
    cdef Outlet *outlet
    while table.to_signal != NULL:
        outlet = table.to_signal
        table.to_signal = outlet.next_signal
        outlet.signalling = 0
        if outlet.ready_count and not outlet.signalled and not outlet.closed:
            outlet.signalled = 1
            signal_fd(outlet.write_fd)

# Takes an outlet off the signal list before its memory goes.
cdef inline void forget_outlet(Table *table, Outlet *outlet) noexcept nogil:
    cdef Outlet **at = &table.to_signal
    while at[0] != NULL:
        if at[0] == outlet:
            at[0] = outlet.next_signal
            break
        at = &at[0].next_signal
    outlet.signalling = 0

cdef inline void wake_pump(Table *table) noexcept nogil:
    if not table.wake_pending and table.wake_fd >= 0:
        table.wake_pending = 1
        signal_fd(table.wake_fd)

# ---------------------------------------------------------------- deadlines

cdef inline void heap_place(Table *table, uint32_t at, uint32_t index) noexcept nogil:
    table.heap[at] = index
    slot_at(table, index).heap_at = at

cdef inline void heap_up(Table *table, uint32_t at, uint32_t index) noexcept nogil:
    cdef double deadline = slot_at(table, index).deadline
    cdef uint32_t parent
    while at > 0:
        parent = (at - 1) // 2
        if slot_at(table, table.heap[parent]).deadline <= deadline:
            break
        heap_place(table, at, table.heap[parent])
        at = parent
    heap_place(table, at, index)

cdef inline void heap_down(Table *table, uint32_t at, uint32_t index) noexcept nogil:
    cdef double deadline = slot_at(table, index).deadline
    cdef uint32_t child
    while True:
        child = 2 * at + 1
        if child >= table.heap_size:
            break
        if (child + 1 < table.heap_size and
                slot_at(table, table.heap[child + 1]).deadline < slot_at(table, table.heap[child]).deadline):
            child += 1
        if deadline <= slot_at(table, table.heap[child]).deadline:
            break
        heap_place(table, at, table.heap[child])
        at = child
    heap_place(table, at, index)

cdef inline int heap_push(Table *table, uint32_t index) noexcept nogil:
    cdef uint32_t capacity
    cdef uint32_t *heap
    if table.heap_size == table.heap_capacity:
        capacity = table.heap_capacity * 2 if table.heap_capacity else 256
        heap = <uint32_t *>realloc(table.heap, capacity * sizeof(uint32_t))
        if heap == NULL:
            return -1
        table.heap = heap
        table.heap_capacity = capacity
    table.heap_size += 1
    heap_up(table, table.heap_size - 1, index)
    return 0

cdef inline void heap_remove(Table *table, uint32_t index) noexcept nogil:
    cdef Slot *slot = slot_at(table, index)
    cdef uint32_t at = slot.heap_at
    cdef uint32_t last
    if at == NIL:
        return
    slot.heap_at = NIL
    table.heap_size -= 1
    last = table.heap[table.heap_size]
    if last == index:
        return
    if at > 0 and slot_at(table, last).deadline < slot_at(table, table.heap[(at - 1) // 2]).deadline:
        heap_up(table, at, last)
    else:
        heap_down(table, at, last)

# ---------------------------------------------------------------- messages to a rank

cdef inline void enqueue(Table *table, uint32_t rank_index, Message *message) noexcept nogil:
    cdef Rank *rank = &table.ranks[rank_index]
    message.next = NULL
    if rank.queue_tail == NULL:
        rank.queue_head = message
    else:
        rank.queue_tail.next = message
    rank.queue_tail = message
    rank.queue_count += 1
    rank.queue_bytes += message.size
    if not rank.flushing:
        rank.flushing = 1
        rank.next_flush = table.to_flush
        table.to_flush = rank_index
    wake_pump(table)

# Room for a message of `size` payload bytes; NULL when memory is out.
cdef inline Message *new_message(const Zmq *zmq, uint8_t type_byte, size_t size) noexcept nogil:
    cdef Message *message = <Message *>malloc(sizeof(Message))
    if message == NULL or zmq.msg_init_size(&message.payload, size) != 0:
        free(message)
        return NULL
    message.type_byte = type_byte
    message.slot = NIL
    message.size = size
    return message

cdef inline Message *dequeue(Rank *rank) noexcept nogil:
    cdef Message *message = rank.queue_head
    rank.queue_head = message.next
    if rank.queue_head == NULL:
        rank.queue_tail = NULL
    rank.queue_count -= 1
    rank.queue_bytes -= message.size
    return message

cdef inline void write_hex(char *out, uint32_t value) noexcept nogil:
    cdef int i
    cdef uint32_t digit
    for i in range(8):
        digit = (value >> (28 - 4 * i)) & 15
        out[i] = <char>(digit + 48 if digit < 10 else digit + 87)

# The id a request has on the wire; returns its length.
cdef inline uint32_t write_wire_id(Table *table, uint32_t index, char *out) noexcept nogil:
    cdef Slot *slot = slot_at(table, index)
    write_hex(out, table.epoch)
    write_hex(out + 8, index)
    write_hex(out + 16, slot.generation)
    memcpy(out + WIRE_ID_SIZE, slot.suffix, slot.suffix_size)
    return WIRE_ID_SIZE + slot.suffix_size

# ---------------------------------------------------------------- the one ending

# Ends a live request. Returns 1 if it was live, 0 if it had ended before.
cdef inline int end(Table *table, uint32_t index, uint8_t cause) noexcept nogil:
    cdef Slot *slot = slot_at(table, index)
    cdef Rank *rank = &table.ranks[slot.rank]
    if slot.state != SLOT_LIVE:
        return 0
    slot.state = SLOT_ENDED
    slot.cause = cause
    table.live_count -= 1
    rank.in_flight -= 1
    rank.count.ended[cause] += 1
    if rank.in_flight == 0:
        rank.running = rank.waiting = 0
    if slot.prev_live == NIL:
        rank.live_head = slot.next_live
    else:
        slot_at(table, slot.prev_live).next_live = slot.next_live
    if slot.next_live != NIL:
        slot_at(table, slot.next_live).prev_live = slot.prev_live
    heap_remove(table, index)
    mark_ready(table, index)
    return 1

# Ends a live request that the engine may still hold: a request it was sent is followed by one ABORT, a request
# that still waits here is dropped unsent when its turn comes.
cdef inline int end_here(Table *table, const Zmq *zmq, uint32_t index, uint8_t cause) noexcept nogil:
    cdef Slot *slot = slot_at(table, index)
    cdef Rank *rank = &table.ranks[slot.rank]
    cdef Message *message
    cdef uint8_t *payload
    cdef size_t size
    if not end(table, index, cause):
        return 0
    if not slot.sent or rank.incarnation != slot.incarnation or rank.state < RANK_LIVE or rank.state > RANK_DRAINING:
        return 1
    size = 2 + WIRE_ID_SIZE + slot.suffix_size
    if size - 2 > 31:
        size += 1
    message = new_message(zmq, TYPE_ABORT, size)
    if message == NULL:
        return 1   # the engine runs on to the request's own end, and its rows are late
    payload = <uint8_t *>zmq.msg_data(&message.payload)
    payload[0] = 0x91   # msgpack: array of one string
    if slot.suffix_size + WIRE_ID_SIZE > 31:
        payload[1] = 0xd9
        payload[2] = WIRE_ID_SIZE + slot.suffix_size
        write_wire_id(table, index, <char *>payload + 3)
    else:
        payload[1] = 0xa0 | (WIRE_ID_SIZE + slot.suffix_size)
        write_wire_id(table, index, <char *>payload + 2)
    enqueue(table, slot.rank, message)
    return 1

# Ends every request of a rank; `detail` says how the rank died.
cdef inline void end_all(Table *table, int rank_index, uint8_t cause, uint8_t detail) noexcept nogil:
    cdef Rank *rank = &table.ranks[rank_index]
    while rank.live_head != NIL:
        slot_at(table, rank.live_head).finish = detail
        end(table, rank.live_head, cause)

# Ends what is past its deadline. Returns how many.
cdef inline uint32_t end_expired(Table *table, const Zmq *zmq, double now) noexcept nogil:
    cdef uint32_t count = 0
    while table.heap_size and slot_at(table, table.heap[0]).deadline <= now:
        end_here(table, zmq, table.heap[0], CAUSE_DEADLINE)
        count += 1
    return count

# ---------------------------------------------------------------- waves

# Starts the next wave: every rank of a lockstep group steps until all are idle, so that none waits in a collective
# for one that sleeps. Returns -1 when memory is out.
cdef inline int start_wave(Table *table, const Zmq *zmq) noexcept nogil:
    cdef uint32_t i
    table.wave += 1
    for i in range(table.rank_count):
        if tell_wave(table, zmq, i) != 0:
            return -1
    return 0

# Tells a rank of the latest wave. A start that still waits to be sent to it is renewed.
cdef inline int tell_wave(Table *table, const Zmq *zmq, uint32_t rank_index) noexcept nogil:
    cdef Rank *rank = &table.ranks[rank_index]
    cdef Message *message = rank.queue_tail
    if rank.state < RANK_LIVE or rank.state > RANK_DRAINING:
        return 0
    if message == NULL or message.type_byte != TYPE_WAVE:
        message = new_message(zmq, TYPE_WAVE, WAVE_SIZE)
        if message == NULL:
            return -1
        enqueue(table, rank_index, message)
    write_wave(<uint8_t *>zmq.msg_data(&message.payload), table.wave)
    rank.wave_told = table.wave
    return 0

# Once all ranks have parked, and said so: those that had not read the start they were last told of wake up by it, and
# would wait in a collective for those that had read it before they parked. These are told of another.
cdef inline void wake_together(Table *table, const Zmq *zmq) noexcept nogil:
    cdef uint32_t i, waking = 0
    for i in range(table.rank_count):
        if table.ranks[i].parks != table.ranks[0].parks:
            return
        waking += table.ranks[i].wave_done < table.ranks[i].wave_told
    if waking == 0 or waking == table.rank_count:
        return
    table.wave += 1
    for i in range(table.rank_count):
        if table.ranks[i].wave_done >= table.ranks[i].wave_told:
            tell_wave(table, zmq, i)

# msgpack: [wave, nil], nil for no rank that is left out
cdef inline void write_wave(uint8_t *payload, uint64_t wave) noexcept nogil:
    cdef int i
    payload[0], payload[1], payload[10] = 0x92, 0xcf, 0xc0
    for i in range(8):
        payload[2 + i] = <uint8_t>(wave >> (56 - 8 * i))
