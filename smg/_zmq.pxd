# The few libzmq calls the pump makes, through addresses taken from the libzmq that pyzmq itself loaded.
# No headers and no second libzmq: the structs below are libzmq's stable ABI (4.x).

from libc.stdint cimport uint64_t

cdef extern from "<errno.h>" nogil:
    int errno
    enum:
        EAGAIN
        EINTR
        EHOSTUNREACH
        ENOTSOCK

cdef enum:
    ZMQ_DONTWAIT = 1
    ZMQ_SNDMORE = 2
    ZMQ_POLLIN = 1
    ZMQ_POLLOUT = 2
    ZMQ_EVENTS = 15            # getsockopt: which of POLLIN/POLLOUT hold, after processing commands
    ZMQ_EVENT_ACCEPTED = 0x0020
    ZMQ_EVENT_DISCONNECTED = 0x0200
    ZMQ_ETERM = 156384765      # ZMQ_HAUSNUMERO + 53: the context is gone

ctypedef struct zmq_msg_t:
    uint64_t opaque[8]         # 64 bytes, pointer-aligned

cdef struct Zmq:
    int (*msg_init)(zmq_msg_t *) noexcept nogil
    int (*msg_init_size)(zmq_msg_t *, size_t) noexcept nogil
    int (*msg_close)(zmq_msg_t *) noexcept nogil
    int (*msg_recv)(zmq_msg_t *, void *, int) noexcept nogil
    int (*msg_send)(zmq_msg_t *, void *, int) noexcept nogil
    void *(*msg_data)(zmq_msg_t *) noexcept nogil
    size_t (*msg_size)(const zmq_msg_t *) noexcept nogil
    int (*msg_more)(const zmq_msg_t *) noexcept nogil
    int (*getsockopt)(void *, int, void *, size_t *) noexcept nogil
    int (*errno_)() noexcept nogil

# Sends one small frame by copy. Returns 0, or -1 with zmq errno set.
cdef inline int send_bytes(const Zmq *zmq, void *socket, const void *data, size_t size, int flags) noexcept nogil:
    cdef zmq_msg_t msg
    if zmq.msg_init_size(&msg, size) != 0:
        return -1
    copy_bytes(zmq.msg_data(&msg), data, size)
    if zmq.msg_send(&msg, socket, flags) < 0:
        zmq.msg_close(&msg)
        return -1
    return 0

cdef extern from "<string.h>" nogil:
    void *copy_bytes "memcpy"(void *, const void *, size_t)
