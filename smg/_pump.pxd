# The pump: one thread's wait, receive, decode, apply, send and signal, without the GIL.
#
# It owns the sockets of every attached rank while `run` runs: output PULL (hot), input ROUTER (requests out,
# registrations in) and the output's monitor. Everything rare is handed to Python as an Event.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport read

from smg._batch cimport batch_bytes, batch_free
from smg._delivery cimport apply
from smg._frame cimport WAVE_COMPLETE, WAVE_NONE, WAVE_START, Batch, Decoder, Fault, Part
from smg._table cimport (
    CAUSE_DIED, NIL, RANK_DEAD, RANK_LIVE, RANK_STALLED, SLOT_LIVE, TYPE_ABORT, TYPE_ADD, Message, Rank, Slot, Table,
    dequeue, end_all, end_expired, find, pthread_mutex_lock, pthread_mutex_unlock, signal_outlets, slot_at, start_wave,
    wake_together,
)
from smg._wait cimport WAIT_TAGS, Waiter, wait
from smg._zmq cimport (
    EAGAIN, EHOSTUNREACH, EINTR, ZMQ_DONTWAIT, ZMQ_EVENT_ACCEPTED, ZMQ_EVENT_DISCONNECTED, ZMQ_EVENTS, ZMQ_POLLIN,
    ZMQ_POLLOUT, ZMQ_SNDMORE, Zmq, send_bytes, zmq_msg_t,
)

cdef enum:
    TURN_FRAMES = 256          # frames read from one rank before the others get their turn
    BAD_FRAMES = 3             # undecodable in a row: the rank is failed
    BATCH_KEPT = 4 << 20       # bytes of memory for decoding that are kept from one frame to the next
    HEAD_BYTES = 64            # of a bad frame, for the log
    SETTLE_ROUNDS = 4          # attempts to bring a ROUTER to rest before the next wake

cdef enum Role:                # which socket a wait tag stands for
    ROLE_WAKE = 0
    ROLE_RARE = 1              # a socket that Python serves
    ROLE_OUTPUT = 2
    ROLE_INPUT = 3
    ROLE_MONITOR = 4

cdef enum EventKind:
    EVENT_INPUT = 1            # a message on a rank's input socket; detail = its parts, -1 = foreign identity
    EVENT_DEAD = 2             # the rank's requests have been ended; detail = Death
    EVENT_STALLED = 3
    EVENT_RESUMED = 4
    EVENT_UNDECODABLE = 5      # at most once a minute per rank; bytes = the frame's head, detail = its size
    EVENT_MISATTRIBUTED = 6    # once per incarnation; detail = the engine_index that was claimed
    EVENT_UTILITY = 7          # the reply to a utility call; detail = call id, bytes = the reply
    EVENT_SILENT = 8           # half of the stall timeout is over: time to ask whether the rank still hears
    EVENT_CONNECTED = 9        # the output has its engine: from now on its end is seen

cdef enum Death:
    DEATH_DISCONNECTED = 1
    DEATH_SENTINEL = 2
    DEATH_UNREACHABLE = 3
    DEATH_UNDECODABLE = 4
    DEATH_SOCKET = 5           # libzmq refused the socket itself
    DEATH_LOCKSTEP = 6         # another rank of its lockstep group died

cdef enum Outcome:             # why `run` returned
    OUTCOME_TIMEOUT = 0
    OUTCOME_EVENTS = 1         # events to take, or a rare socket to serve
    OUTCOME_STOPPED = 2

cdef struct Event:
    uint8_t kind
    int32_t rank
    uint32_t incarnation
    int64_t detail
    uint8_t *bytes             # owned
    uint32_t size
    Fault fault                # of EVENT_UNDECODABLE

cdef struct Connection:        # the sockets of one incarnation of one rank
    uint8_t attached
    uint8_t failed             # its death has been handled
    uint8_t blocked            # the input pipe is full
    uint8_t unread             # the last turn left frames behind; counted in Pump.unread
    uint8_t claimed            # a wrong engine_index has been reported
    uint8_t identity[2]
    uint32_t incarnation
    uint32_t bad_in_row
    int engine_fd              # the output connection that is the engine's, -1 = not yet
    double next_report         # of undecodable frames, monotonic seconds
    double probed              # when EVENT_SILENT was last raised, monotonic seconds
    void *input
    void *output
    void *monitor
    int input_fd
    int output_fd
    int monitor_fd

cdef struct Pump:
    Zmq zmq
    Table *table
    Connection *connections    # one per rank
    uint32_t connection_count
    Decoder decode
    Batch batch
    zmq_msg_t *message         # the output message that is being read, part by part
    Part *parts                # where their bytes are
    uint32_t part_capacity
    Event *events              # ring's worth of room; drained by Python after each run
    uint32_t event_count
    uint32_t event_capacity
    uint64_t events_lost       # reports dropped because Python was behind
    double stall_timeout       # seconds; 0 = never
    uint8_t probes             # raise EVENT_SILENT
    double next_tick
    uint32_t unread            # ranks whose last turn left frames behind
    uint8_t stopped
    uint8_t rare               # a socket that Python serves has something
    int wake_fd                # the read end
    Waiter waiter

cdef inline double monotonic() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + now.tv_nsec * 1e-9

cdef inline uint64_t tag_of(uint64_t role, uint32_t rank) noexcept nogil:
    return (role << 32) | rank

# ---------------------------------------------------------------- events for Python

# Deaths always fit: room for two of them per rank is never given to anything else.
cdef inline Event *new_event(Pump *pump, uint8_t kind, uint32_t rank) noexcept nogil:
    cdef Event *event
    cdef uint32_t reserved = 0 if kind == EVENT_DEAD else 2 * pump.connection_count
    if pump.event_count + reserved >= pump.event_capacity:
        pump.events_lost += 1
        return NULL
    event = &pump.events[pump.event_count]
    pump.event_count += 1
    memset(event, 0, sizeof(Event))
    event.kind = kind
    event.rank = <int32_t>rank
    event.incarnation = pump.connections[rank].incarnation
    return event

# An event with a detail and a copy of some bytes.
cdef inline Event *detailed_event(
    Pump *pump, uint8_t kind, uint32_t rank, int64_t detail, const void *data, size_t size
) noexcept nogil:
    cdef Event *event = new_event(pump, kind, rank)
    if event == NULL:
        return NULL
    event.detail = detail
    event.bytes = <uint8_t *>malloc(size if size else 1)
    if event.bytes != NULL and size:
        memcpy(event.bytes, data, size)
        event.size = <uint32_t>size
    return event

# ---------------------------------------------------------------- death

# The one way a rank dies: what it had already sent still reaches its streams, the rest ends with CAUSE_DIED.
cdef inline void fail_rank(Pump *pump, uint32_t rank_index, uint8_t death) noexcept nogil:
    cdef Connection *connection = &pump.connections[rank_index]
    cdef Table *table = pump.table
    cdef Rank *rank = &table.ranks[rank_index]
    cdef Event *event
    cdef uint32_t other
    if not connection.attached or connection.failed:
        return
    connection.failed = 1
    while read_output(pump, rank_index, 1):
        pass
    pthread_mutex_lock(&table.mutex)
    rank.state = RANK_DEAD
    end_all(table, <int>rank_index, CAUSE_DIED, death)
    drop_queue(pump, rank)
    signal_outlets(table)
    pthread_mutex_unlock(&table.mutex)
    event = new_event(pump, EVENT_DEAD, rank_index)
    if event != NULL:
        event.detail = death
    if table.lockstep:
        for other in range(pump.connection_count):
            fail_rank(pump, other, DEATH_LOCKSTEP)

cdef inline void drop_queue(Pump *pump, Rank *rank) noexcept nogil:
    cdef Message *message
    while rank.queue_head != NULL:
        message = dequeue(rank)
        if message.type_byte == TYPE_ADD:
            rank.count.unsent += 1
        pump.zmq.msg_close(&message.payload)
        free(message)

# ---------------------------------------------------------------- receiving

cdef inline void report_undecodable(Pump *pump, uint32_t rank_index, const uint8_t *frame, size_t size, double now) noexcept nogil:
    cdef Connection *connection = &pump.connections[rank_index]
    cdef Event *event
    if now < connection.next_report:
        return
    connection.next_report = now + 60.0
    event = detailed_event(pump, EVENT_UNDECODABLE, rank_index, <int64_t>size, frame,
                           size if size < HEAD_BYTES else HEAD_BYTES)
    if event != NULL:
        event.fault = pump.batch.fault

# Decodes one message and applies it. Returns 0, or the Death that it is to its rank. What a huge one took of memory
# is not kept for the next.
cdef inline int handle_message(
    Pump *pump, uint32_t rank_index, const Part *parts, uint32_t part_count, double now
) noexcept nogil:
    cdef int death = take_message(pump, rank_index, parts, part_count, now)
    if batch_bytes(&pump.batch) > BATCH_KEPT:
        batch_free(&pump.batch)
    return death

cdef inline int take_message(
    Pump *pump, uint32_t rank_index, const Part *parts, uint32_t part_count, double now
) noexcept nogil:
    cdef Connection *connection = &pump.connections[rank_index]
    cdef Table *table = pump.table
    cdef Rank *rank = &table.ranks[rank_index]
    cdef Batch *batch = &pump.batch
    cdef int resumed, misattributed
    if pump.decode(parts, part_count, batch) != 0:
        connection.bad_in_row += 1
        pthread_mutex_lock(&table.mutex)
        rank.count.undecodable += 1
        rank.count.extra_parts += part_count - 1
        pthread_mutex_unlock(&table.mutex)
        report_undecodable(pump, rank_index, parts[0].data, parts[0].size, now)
        return DEATH_UNDECODABLE if connection.bad_in_row >= BAD_FRAMES else 0
    connection.bad_in_row = 0
    pthread_mutex_lock(&table.mutex)
    resumed = rank.state == RANK_STALLED
    if resumed:
        rank.state = RANK_LIVE
    misattributed = batch.has_engine_index and batch.engine_index != rank_index
    rank.count.misattributed += misattributed
    rank.count.extra_parts += part_count - 1
    apply(table, <int>rank_index, batch, parts, now)
    if batch.wave != WAVE_NONE and table.lockstep:
        hear_wave(pump, rank, batch)
    pthread_mutex_unlock(&table.mutex)
    if resumed:
        new_event(pump, EVENT_RESUMED, rank_index)
    if misattributed and not connection.claimed:
        connection.claimed = 1
        detailed_event(pump, EVENT_MISATTRIBUTED, rank_index, <int64_t>batch.engine_index, NULL, 0)
    if batch.utility.size:
        detailed_event(pump, EVENT_UTILITY, rank_index, batch.utility_call, parts[0].data + batch.utility.start,
                       batch.utility.size)
    return 0

# What a rank says of waves: it has parked after one, which raises its own count, or it needs another.
cdef inline void hear_wave(Pump *pump, Rank *rank, const Batch *batch) noexcept nogil:
    cdef Table *table = pump.table
    cdef uint64_t past = batch.wave_number + (batch.wave == WAVE_COMPLETE)
    if past > table.wave:
        table.wave = past
    if batch.wave == WAVE_START:
        start_wave(table, &pump.zmq)
        return
    rank.wave_done = batch.wave_number
    rank.parks += 1
    wake_together(table, &pump.zmq)

# Room for one more part after the first `count`, which are kept.
cdef inline bint part_room(Pump *pump, uint32_t count) noexcept nogil:
    cdef uint32_t capacity = 2 * count + 4
    cdef void *grown
    if count < pump.part_capacity:
        return True
    grown = realloc(pump.message, capacity * sizeof(zmq_msg_t))
    if grown == NULL:
        return False
    pump.message = <zmq_msg_t *>grown
    grown = realloc(pump.parts, capacity * sizeof(Part))
    if grown == NULL:
        return False
    pump.parts = <Part *>grown
    pump.part_capacity = capacity
    return True

# Receives one whole message into pump.message and pump.parts. Returns its parts; 0 = none, and zmq's errno says why.
# The parts are closed by `close_message`. Where memory is out the message ends early, which its decoder refuses.
cdef inline uint32_t receive(Pump *pump, void *socket) noexcept nogil:
    cdef zmq_msg_t part
    cdef uint32_t count = 0
    cdef uint32_t i
    cdef int more = 1
    while more:
        pump.zmq.msg_init(&part)
        if pump.zmq.msg_recv(&part, socket, ZMQ_DONTWAIT) < 0:   # the first; a message is there as a whole
            break
        more = pump.zmq.msg_more(&part)
        if part_room(pump, count):
            pump.message[count] = part
            count += 1
        else:
            pump.zmq.msg_close(&part)
    for i in range(count):   # now that nothing moves any more: short parts are inside of their zmq_msg_t
        pump.parts[i].data = <const uint8_t *>pump.zmq.msg_data(&pump.message[i])
        pump.parts[i].size = pump.zmq.msg_size(&pump.message[i])
    return count

cdef inline void close_message(Pump *pump, uint32_t count) noexcept nogil:
    cdef uint32_t i
    for i in range(count):
        pump.zmq.msg_close(&pump.message[i])

cdef inline bint is_sentinel(const Part *parts, uint32_t count) noexcept nogil:
    return count == 1 and parts[0].size == 16 and memcmp(parts[0].data, <const char *>b"ENGINE_CORE_DEAD", 16) == 0

# Reads one turn's worth of messages. Returns 1 when more may be there. `last` = the rank is being failed: take
# everything, and let no message fail it again.
cdef inline int read_output(Pump *pump, uint32_t rank_index, int last) noexcept nogil:
    cdef Connection *connection = &pump.connections[rank_index]
    cdef uint32_t count
    cdef int turn, error, death
    cdef double now = monotonic()
    for turn in range(TURN_FRAMES):
        if connection.failed and not last:
            return 0
        count = receive(pump, connection.output)
        if count == 0:
            error = pump.zmq.errno_()
            if error != EAGAIN and error != EINTR and not last:
                fail_rank(pump, rank_index, DEATH_SOCKET)
            return error == EINTR
        if is_sentinel(pump.parts, count):
            death = DEATH_SENTINEL
        else:
            death = handle_message(pump, rank_index, pump.parts, count, now)
        close_message(pump, count)
        if death and not last:
            fail_rank(pump, rank_index, <uint8_t>death)
            return 0
    return 1

# Reads whatever is on a rank's input ROUTER (registrations, or noise) until there is nothing.
cdef inline void read_input(Pump *pump, uint32_t rank_index) noexcept nogil:
    cdef Connection *connection = &pump.connections[rank_index]
    cdef zmq_msg_t msg
    cdef int parts, more, foreign, error
    cdef Event *event
    while not connection.failed:
        parts = foreign = 0
        event = NULL
        while True:
            pump.zmq.msg_init(&msg)
            if pump.zmq.msg_recv(&msg, connection.input, ZMQ_DONTWAIT) < 0:
                error = pump.zmq.errno_()
                pump.zmq.msg_close(&msg)
                if error == EINTR:
                    continue
                if error != EAGAIN:
                    fail_rank(pump, rank_index, DEATH_SOCKET)
                return
            if parts == 0:
                foreign = (pump.zmq.msg_size(&msg) != 2 or
                           memcmp(pump.zmq.msg_data(&msg), connection.identity, 2) != 0)
            elif parts == 1:
                event = detailed_event(pump, EVENT_INPUT, rank_index, 0, pump.zmq.msg_data(&msg), pump.zmq.msg_size(&msg))
            parts += 1
            more = pump.zmq.msg_more(&msg)
            pump.zmq.msg_close(&msg)
            if not more:
                break
        if event != NULL:
            event.detail = -1 if foreign else parts

# The output's monitor: the connection that was accepted first is the engine's, and its end is the rank's death.
cdef inline void read_monitor(Pump *pump, uint32_t rank_index) noexcept nogil:
    cdef Connection *connection = &pump.connections[rank_index]
    cdef zmq_msg_t msg
    cdef int part, more
    cdef uint16_t what = 0
    cdef uint32_t value = 0
    cdef const uint8_t *data
    while True:
        part = 0
        what = 0
        while True:
            pump.zmq.msg_init(&msg)
            if pump.zmq.msg_recv(&msg, connection.monitor, ZMQ_DONTWAIT) < 0:
                pump.zmq.msg_close(&msg)
                return
            if part == 0 and pump.zmq.msg_size(&msg) == 6:
                data = <const uint8_t *>pump.zmq.msg_data(&msg)
                memcpy(&what, data, 2)
                memcpy(&value, data + 2, 4)
            part += 1
            more = pump.zmq.msg_more(&msg)
            pump.zmq.msg_close(&msg)
            if not more:
                break
        if what == ZMQ_EVENT_ACCEPTED and connection.engine_fd < 0:
            connection.engine_fd = <int>value
            new_event(pump, EVENT_CONNECTED, rank_index)
        elif what == ZMQ_EVENT_DISCONNECTED and <int>value == connection.engine_fd:
            fail_rank(pump, rank_index, DEATH_DISCONNECTED)

# ---------------------------------------------------------------- sending

# Sends what is queued for a rank until the queue is empty or its pipe is full.
cdef inline void flush(Pump *pump, uint32_t rank_index) noexcept nogil:
    cdef Connection *connection = &pump.connections[rank_index]
    cdef Table *table = pump.table
    cdef Rank *rank = &table.ranks[rank_index]
    cdef Message *message
    cdef Slot *slot
    cdef int error = 0
    while not error:
        pthread_mutex_lock(&table.mutex)
        message = rank.queue_head
        slot = NULL
        if message == NULL or connection.failed or not connection.attached:
            pthread_mutex_unlock(&table.mutex)
            break
        if message.type_byte == TYPE_ADD:
            slot = find(table, message.slot, message.generation)
            if slot == NULL or slot.state != SLOT_LIVE:
                dequeue(rank)
                rank.count.unsent += 1
                pthread_mutex_unlock(&table.mutex)
                pump.zmq.msg_close(&message.payload)
                free(message)
                continue
        error = send(pump, connection, message)
        if not error:
            dequeue(rank)
            if slot != NULL:
                slot.sent = 1
            rank.count.requests += message.type_byte == TYPE_ADD
            rank.count.aborts += message.type_byte == TYPE_ABORT
        pthread_mutex_unlock(&table.mutex)
        if not error:
            free(message)
    connection.blocked = error == EAGAIN
    if error and error != EAGAIN:
        fail_rank(pump, rank_index, DEATH_UNREACHABLE if error == EHOSTUNREACH else DEATH_SOCKET)

# Identity, type byte, payload. Only the identity can find a full pipe, so a message goes whole or not at all.
cdef inline int send(Pump *pump, Connection *connection, Message *message) noexcept nogil:
    if send_bytes(&pump.zmq, connection.input, connection.identity, 2, ZMQ_SNDMORE | ZMQ_DONTWAIT) != 0:
        return pump.zmq.errno_() or EHOSTUNREACH
    if (send_bytes(&pump.zmq, connection.input, &message.type_byte, 1, ZMQ_SNDMORE | ZMQ_DONTWAIT) != 0 or
            pump.zmq.msg_send(&message.payload, connection.input, ZMQ_DONTWAIT) < 0):
        return EHOSTUNREACH
    return 0

# Flushes and reads a ROUTER until it rests: a send can swallow the signal of an incoming message, and a receive
# the signal that a full pipe drained. What four rounds leave is retried by the next tick.
cdef inline void settle(Pump *pump, uint32_t rank_index) noexcept nogil:
    cdef Connection *connection = &pump.connections[rank_index]
    cdef int events, round_
    cdef size_t size
    for round_ in range(SETTLE_ROUNDS):
        if not connection.attached or connection.failed:
            return
        flush(pump, rank_index)
        read_input(pump, rank_index)
        size = sizeof(events)
        if connection.failed or pump.zmq.getsockopt(connection.input, ZMQ_EVENTS, &events, &size) != 0:
            return
        if not (events & ZMQ_POLLIN or (connection.blocked and events & ZMQ_POLLOUT)):
            return

cdef inline void flush_queued(Pump *pump) noexcept nogil:
    cdef Table *table = pump.table
    cdef uint32_t at, following
    pthread_mutex_lock(&table.mutex)
    table.wake_pending = 0
    at = table.to_flush
    table.to_flush = NIL
    pthread_mutex_unlock(&table.mutex)
    while at != NIL:
        pthread_mutex_lock(&table.mutex)
        following = table.ranks[at].next_flush
        table.ranks[at].flushing = 0
        pthread_mutex_unlock(&table.mutex)
        if not pump.connections[at].blocked:
            settle(pump, at)
        at = following

# ---------------------------------------------------------------- timers

cdef inline double tick_length(const Pump *pump) noexcept nogil:
    cdef double length = 1.0
    if pump.stall_timeout > 0 and pump.stall_timeout / 8 < length:
        length = pump.stall_timeout / 8
    return length if length > 0.005 else 0.005

# Once a tick: ranks that are silent with work in flight, and pipes that were full.
cdef inline void tick(Pump *pump, double now) noexcept nogil:
    cdef Table *table = pump.table
    cdef Rank *rank
    cdef uint32_t i
    cdef int stalled, silent
    for i in range(pump.connection_count):
        if not pump.connections[i].attached or pump.connections[i].failed:
            continue
        if pump.connections[i].blocked:
            settle(pump, i)
        if pump.stall_timeout <= 0:
            continue
        rank = &table.ranks[i]
        pthread_mutex_lock(&table.mutex)
        silent = rank.state == RANK_LIVE and rank.in_flight > 0 and now - rank.quiet_since > pump.stall_timeout / 2
        stalled = silent and now - rank.quiet_since > pump.stall_timeout
        silent = silent and pump.probes and pump.connections[i].probed < rank.quiet_since
        if stalled:
            rank.state = RANK_STALLED
        pthread_mutex_unlock(&table.mutex)
        if silent:
            pump.connections[i].probed = now
            new_event(pump, EVENT_SILENT, i)
        if stalled:
            new_event(pump, EVENT_STALLED, i)

# Milliseconds to wait: up to the next deadline, tick or `until`.
cdef inline int timers(Pump *pump, double until) noexcept nogil:
    cdef Table *table = pump.table
    cdef double now = monotonic(), next_
    if now >= pump.next_tick:
        tick(pump, now)
        pump.next_tick = now + tick_length(pump)
    next_ = until if until < pump.next_tick else pump.next_tick
    pthread_mutex_lock(&table.mutex)
    if end_expired(table, &pump.zmq, now):
        signal_outlets(table)
    if table.heap_size and slot_at(table, table.heap[0]).deadline < next_:
        next_ = slot_at(table, table.heap[0]).deadline
    pthread_mutex_unlock(&table.mutex)
    return 0 if next_ <= now else <int>((next_ - now) * 1000.0) + 1

# ---------------------------------------------------------------- the loop

cdef inline void read_turn(Pump *pump, uint32_t rank_index) noexcept nogil:
    cdef Connection *connection = &pump.connections[rank_index]
    pump.unread -= connection.unread
    connection.unread = read_output(pump, rank_index, 0)
    pump.unread += connection.unread

cdef inline void serve(Pump *pump, uint64_t tag) noexcept nogil:
    cdef uint32_t rank_index = <uint32_t>tag   # the low half
    cdef uint32_t role = <uint32_t>(tag >> 32)
    cdef uint64_t wakes
    if role == ROLE_OUTPUT:
        read_turn(pump, rank_index)
    elif role == ROLE_WAKE:
        read(pump.wake_fd, &wakes, sizeof(wakes))
        flush_queued(pump)
    elif role == ROLE_INPUT:
        settle(pump, rank_index)
    elif role == ROLE_MONITOR:
        read_monitor(pump, rank_index)
    else:
        pump.rare = 1

# Runs until `until` (monotonic seconds), an event for Python, or `stopped`. Never called by two threads.
cdef inline int run(Pump *pump, double until) noexcept nogil:
    cdef uint64_t tags[WAIT_TAGS]
    cdef uint32_t rank_index
    cdef int count, at, timeout_ms
    while True:
        timeout_ms = timers(pump, until)
        if pump.stopped:
            return OUTCOME_STOPPED
        if pump.event_count or pump.rare:
            pump.rare = 0   # before Python looks, so that a wake from here on is for the next run
            return OUTCOME_EVENTS
        count = wait(&pump.waiter, tags, 0 if pump.unread else timeout_ms)
        for at in range(count):
            serve(pump, tags[at])
        if pump.unread:
            for rank_index in range(pump.connection_count):
                if pump.connections[rank_index].unread:
                    read_turn(pump, rank_index)
        if monotonic() >= until:   # also when there is always something to read
            return OUTCOME_TIMEOUT
