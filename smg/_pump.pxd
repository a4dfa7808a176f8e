# The pump: one thread's wait, receive, decode, apply, send and signal, without the GIL.
#
# It owns the sockets of every attached rank while `run` runs: output PULL (hot), input ROUTER (requests out,
# registrations in) and the output's monitor. Everything rare is handed to Python as an Event.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport read

from smg._delivery cimport apply
from smg._frame cimport Batch, Fault
from smg._table cimport (
    CAUSE_DIED, NIL, RANK_DEAD, RANK_LIVE, RANK_STALLED, SLOT_LIVE, TYPE_ADD, Message, Rank, Slot, Table,
    dequeue, end_all, end_expired, find, pthread_mutex_lock, pthread_mutex_unlock, signal_outlets, slot_at,
)
from smg._zmq cimport (
    EAGAIN, EHOSTUNREACH, EINTR, ZMQ_DONTWAIT, ZMQ_EVENT_ACCEPTED, ZMQ_EVENT_DISCONNECTED, ZMQ_EVENTS, ZMQ_POLLIN,
    ZMQ_POLLOUT, ZMQ_SNDMORE, Zmq, send_bytes, zmq_msg_t,
)

cdef extern from * nogil:
    """
    #include <poll.h>
    #include <unistd.h>
    #ifdef __linux__
    #include <sys/epoll.h>
    #define SMG_EPOLL 1
    static int smg_epoll_open(void) { return epoll_create1(EPOLL_CLOEXEC); }
    static int smg_epoll_add(int ep, int fd, uint64_t tag) {
        struct epoll_event event = {.events = EPOLLIN, .data = {.u64 = tag}};
        return epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event);
    }
    static int smg_epoll_remove(int ep, int fd) { return epoll_ctl(ep, EPOLL_CTL_DEL, fd, NULL); }
    static int smg_epoll_wait(int ep, uint64_t *tags, int capacity, int timeout_ms) {
        struct epoll_event events[64];
        int count = epoll_wait(ep, events, capacity < 64 ? capacity : 64, timeout_ms);
        for (int i = 0; i < count; i++) tags[i] = events[i].data.u64;
        return count;
    }
    #else
    #define SMG_EPOLL 0
    static int smg_epoll_open(void) { return -1; }
    static int smg_epoll_add(int ep, int fd, uint64_t tag) { (void)ep; (void)fd; (void)tag; return -1; }
    static int smg_epoll_remove(int ep, int fd) { (void)ep; (void)fd; return -1; }
    static int smg_epoll_wait(int ep, uint64_t *tags, int capacity, int timeout_ms) {
        (void)ep; (void)tags; (void)capacity; (void)timeout_ms; return -1;
    }
    #endif
    """
    enum:
        SMG_EPOLL
        POLLIN
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd *, unsigned long, int)
    int smg_epoll_open()
    int smg_epoll_add(int, int, uint64_t)
    int smg_epoll_remove(int, int)
    int smg_epoll_wait(int, uint64_t *, int, int)

cdef enum:
    TURN_FRAMES = 256          # frames read from one rank before the others get their turn
    WAIT_TAGS = 64             # sockets handled per wake
    BAD_FRAMES = 3             # undecodable in a row: the rank is failed
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

cdef enum Death:
    DEATH_DISCONNECTED = 1
    DEATH_SENTINEL = 2
    DEATH_UNREACHABLE = 3
    DEATH_UNDECODABLE = 4
    DEATH_SOCKET = 5           # libzmq refused the socket itself

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
    void *input
    void *output
    void *monitor
    int input_fd
    int output_fd
    int monitor_fd

ctypedef int (*Decoder)(const uint8_t *, size_t, Batch *) noexcept nogil

cdef struct Pump:
    Zmq zmq
    Table *table
    Connection *connections    # one per rank
    uint32_t connection_count
    Decoder decode
    Batch batch
    Event *events              # ring's worth of room; drained by Python after each run
    uint32_t event_count
    uint32_t event_capacity
    uint64_t events_lost       # reports dropped because Python was behind
    double stall_timeout       # seconds; 0 = never
    double next_tick
    uint32_t unread            # ranks whose last turn left frames behind
    uint8_t stopped
    uint8_t rare               # a socket that Python serves has something
    int wake_fd                # the read end
    int epoll_fd               # -1 = use poll
    pollfd *polled
    uint64_t *poll_tags
    uint32_t poll_count
    uint32_t poll_capacity

cdef inline double monotonic() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + now.tv_nsec * 1e-9

# ---------------------------------------------------------------- waiting

cdef inline uint64_t tag_of(uint64_t role, uint32_t rank) noexcept nogil:
    return (role << 32) | rank

cdef inline int watch(Pump *pump, int fd, uint64_t tag) noexcept nogil:
    cdef void *grown
    if pump.epoll_fd >= 0:
        return smg_epoll_add(pump.epoll_fd, fd, tag)
    if pump.poll_count == pump.poll_capacity:
        grown = realloc(pump.polled, (pump.poll_capacity + 16) * sizeof(pollfd))
        if grown == NULL:
            return -1
        pump.polled = <pollfd *>grown
        grown = realloc(pump.poll_tags, (pump.poll_capacity + 16) * sizeof(uint64_t))
        if grown == NULL:
            return -1
        pump.poll_tags = <uint64_t *>grown
        pump.poll_capacity += 16
    pump.polled[pump.poll_count].fd = fd
    pump.polled[pump.poll_count].events = POLLIN
    pump.poll_tags[pump.poll_count] = tag
    pump.poll_count += 1
    return 0

cdef inline void unwatch(Pump *pump, int fd) noexcept nogil:
    cdef uint32_t i
    if pump.epoll_fd >= 0:
        smg_epoll_remove(pump.epoll_fd, fd)
        return
    for i in range(pump.poll_count):
        if pump.polled[i].fd == fd:
            pump.poll_count -= 1
            pump.polled[i] = pump.polled[pump.poll_count]
            pump.poll_tags[i] = pump.poll_tags[pump.poll_count]
            return

cdef inline int wait(Pump *pump, uint64_t *tags, int timeout_ms) noexcept nogil:
    cdef uint32_t i
    cdef int count = 0
    if pump.epoll_fd >= 0:
        return smg_epoll_wait(pump.epoll_fd, tags, WAIT_TAGS, timeout_ms)
    if poll(pump.polled, pump.poll_count, timeout_ms) <= 0:
        return 0
    for i in range(pump.poll_count):
        if pump.polled[i].revents and count < WAIT_TAGS:
            tags[count] = pump.poll_tags[i]
            count += 1
    return count

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

cdef inline void event_bytes(Event *event, const void *data, size_t size) noexcept nogil:
    event.bytes = <uint8_t *>malloc(size if size else 1)
    if event.bytes != NULL:
        memcpy(event.bytes, data, size)
        event.size = <uint32_t>size

# ---------------------------------------------------------------- death

# The one way a rank dies: what it had already sent still reaches its streams, the rest ends with CAUSE_DIED.
cdef inline void fail_rank(Pump *pump, uint32_t rank_index, uint8_t death) noexcept nogil:
    cdef Connection *connection = &pump.connections[rank_index]
    cdef Table *table = pump.table
    cdef Rank *rank = &table.ranks[rank_index]
    cdef Event *event
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
    event = new_event(pump, EVENT_UNDECODABLE, rank_index)
    if event == NULL:
        return
    event.fault = pump.batch.fault
    event.detail = <int64_t>size
    event_bytes(event, frame, size if size < HEAD_BYTES else HEAD_BYTES)

cdef inline void handle_frame(Pump *pump, uint32_t rank_index, const uint8_t *frame, size_t size, double now) noexcept nogil:
    cdef Connection *connection = &pump.connections[rank_index]
    cdef Table *table = pump.table
    cdef Rank *rank = &table.ranks[rank_index]
    cdef Event *event
    cdef int resumed = 0
    if pump.decode(frame, size, &pump.batch) != 0:
        connection.bad_in_row += 1
        pthread_mutex_lock(&table.mutex)
        rank.count.undecodable += 1
        pthread_mutex_unlock(&table.mutex)
        report_undecodable(pump, rank_index, frame, size, now)
        if connection.bad_in_row >= BAD_FRAMES:
            fail_rank(pump, rank_index, DEATH_UNDECODABLE)
        return
    connection.bad_in_row = 0
    pthread_mutex_lock(&table.mutex)
    if rank.state == RANK_STALLED:
        rank.state = RANK_LIVE
        resumed = 1
    if pump.batch.has_engine_index and pump.batch.engine_index != rank_index:
        rank.count.misattributed += 1
        if not connection.claimed:
            connection.claimed = 1
            event = new_event(pump, EVENT_MISATTRIBUTED, rank_index)
            if event != NULL:
                event.detail = <int64_t>pump.batch.engine_index
    apply(table, <int>rank_index, &pump.batch, frame, now)
    pthread_mutex_unlock(&table.mutex)
    if resumed:
        new_event(pump, EVENT_RESUMED, rank_index)

# Reads one turn's worth of frames. Returns 1 when more may be there. `last` = the rank is being failed: take
# everything, and let no frame fail it again.
cdef inline int read_output(Pump *pump, uint32_t rank_index, int last) noexcept nogil:
    cdef Connection *connection = &pump.connections[rank_index]
    cdef zmq_msg_t msg
    cdef zmq_msg_t extra
    cdef int turn, parts, error
    cdef double now = monotonic()
    cdef const uint8_t *frame
    cdef size_t size
    for turn in range(TURN_FRAMES):
        if connection.failed and not last:
            return 0
        pump.zmq.msg_init(&msg)
        if pump.zmq.msg_recv(&msg, connection.output, ZMQ_DONTWAIT) < 0:
            error = pump.zmq.errno_()
            pump.zmq.msg_close(&msg)
            if error != EAGAIN and error != EINTR and not last:
                fail_rank(pump, rank_index, DEATH_SOCKET)
            return error == EINTR
        parts = 1
        if pump.zmq.msg_more(&msg):
            while True:
                pump.zmq.msg_init(&extra)
                if pump.zmq.msg_recv(&extra, connection.output, ZMQ_DONTWAIT) < 0:
                    pump.zmq.msg_close(&extra)
                    break
                parts += 1
                error = pump.zmq.msg_more(&extra)
                pump.zmq.msg_close(&extra)
                if not error:
                    break
            pthread_mutex_lock(&pump.table.mutex)
            pump.table.ranks[rank_index].count.extra_parts += parts - 1
            pthread_mutex_unlock(&pump.table.mutex)
        frame = <const uint8_t *>pump.zmq.msg_data(&msg)
        size = pump.zmq.msg_size(&msg)
        if parts == 1 and size == 16 and memcmp(frame, <const char *>b"ENGINE_CORE_DEAD", 16) == 0:
            pump.zmq.msg_close(&msg)
            if not last:
                fail_rank(pump, rank_index, DEATH_SENTINEL)
                return 0
            continue
        handle_frame(pump, rank_index, frame, size, now)
        pump.zmq.msg_close(&msg)
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
                event = new_event(pump, EVENT_INPUT, rank_index)
                if event != NULL:
                    event_bytes(event, pump.zmq.msg_data(&msg), pump.zmq.msg_size(&msg))
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
                rank.count.requests += 1
            else:
                rank.count.aborts += 1
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
    cdef int stalled
    for i in range(pump.connection_count):
        if not pump.connections[i].attached or pump.connections[i].failed:
            continue
        if pump.connections[i].blocked:
            settle(pump, i)
        if pump.stall_timeout <= 0:
            continue
        rank = &table.ranks[i]
        pthread_mutex_lock(&table.mutex)
        stalled = (rank.state == RANK_LIVE and rank.in_flight > 0 and now - rank.quiet_since > pump.stall_timeout)
        if stalled:
            rank.state = RANK_STALLED
        pthread_mutex_unlock(&table.mutex)
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
        count = wait(pump, tags, 0 if pump.unread else timeout_ms)
        for at in range(count):
            serve(pump, tags[at])
        if pump.unread:
            for rank_index in range(pump.connection_count):
                if pump.connections[rank_index].unread:
                    read_turn(pump, rank_index)
        if monotonic() >= until:   # also when there is always something to read
            return OUTCOME_TIMEOUT
