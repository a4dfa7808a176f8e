# What the pump waits on: descriptors with a tag each, in an epoll set, or for poll(2) where there is none.

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport realloc

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
    WAIT_TAGS = 64             # descriptors told of per wait

cdef struct Waiter:
    int epoll_fd               # -1 = use poll
    pollfd *polled
    uint64_t *tags
    uint32_t count
    uint32_t capacity

cdef inline int watch(Waiter *waiter, int fd, uint64_t tag) noexcept nogil:
    cdef void *grown
    if waiter.epoll_fd >= 0:
        return smg_epoll_add(waiter.epoll_fd, fd, tag)
    if waiter.count == waiter.capacity:
        grown = realloc(waiter.polled, (waiter.capacity + 16) * sizeof(pollfd))
        if grown == NULL:
            return -1
        waiter.polled = <pollfd *>grown
        grown = realloc(waiter.tags, (waiter.capacity + 16) * sizeof(uint64_t))
        if grown == NULL:
            return -1
        waiter.tags = <uint64_t *>grown
        waiter.capacity += 16
    waiter.polled[waiter.count].fd = fd
    waiter.polled[waiter.count].events = POLLIN
    waiter.tags[waiter.count] = tag
    waiter.count += 1
    return 0

cdef inline void unwatch(Waiter *waiter, int fd) noexcept nogil:
    cdef uint32_t i
    if waiter.epoll_fd >= 0:
        smg_epoll_remove(waiter.epoll_fd, fd)
        return
    for i in range(waiter.count):
        if waiter.polled[i].fd == fd:
            waiter.count -= 1
            waiter.polled[i] = waiter.polled[waiter.count]
            waiter.tags[i] = waiter.tags[waiter.count]
            return

# Waits; puts the tags of what is readable into `tags`, which has room for WAIT_TAGS, and returns how many.
cdef inline int wait(Waiter *waiter, uint64_t *tags, int timeout_ms) noexcept nogil:
    cdef uint32_t i
    cdef int count = 0
    if waiter.epoll_fd >= 0:
        return smg_epoll_wait(waiter.epoll_fd, tags, WAIT_TAGS, timeout_ms)
    if poll(waiter.polled, waiter.count, timeout_ms) <= 0:
        return 0
    for i in range(waiter.count):
        if waiter.polled[i].revents and count < WAIT_TAGS:
            tags[count] = waiter.tags[i]
            count += 1
    return count
