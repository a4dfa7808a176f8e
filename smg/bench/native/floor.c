/* The least a gateway could cost: reads requests, and writes one ready-made event per stream and step.

   floor PORT STEP_MS TOKENS

   No engine, no routing, no JSON: what is left is the kernel's share of a request and of a write per token, on this
   machine, with this client. Every request is answered by TOKENS events of the size that the Rust gateway sends. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { STREAMS_MAX = 4096, EVENT_SIZE = 280 };

static const char HEAD[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
static char event[400], last[64];
static int left[STREAMS_MAX], running[STREAMS_MAX], count;   /* by descriptor; descriptors of running streams */

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static size_t chunk(char *out, const char *body, size_t size) {
    return sprintf(out, "%zx\r\n%.*s\r\n", size, (int)size, body);
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    int64_t step = atof(argv[2]) * 1e6, due = 0;
    int tokens = atoi(argv[3]), one = 1;
    const char *end = "\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" the\"}}]}\n\n";
    char body[EVENT_SIZE];
    memset(body, 'x', EVENT_SIZE);
    memcpy(body, "data: {\"id\":\"", 13);
    memcpy(body + EVENT_SIZE - strlen(end), end, strlen(end));
    size_t event_size = chunk(event, body, EVENT_SIZE), last_size = chunk(last, "data: [DONE]\n\n", 14);
    last_size += sprintf(last + last_size, "0\r\n\r\n");

    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 1024)) { perror("floor"); return 1; }
    struct epoll_event wanted = {.events = EPOLLIN, .data.fd = listener}, events[256];
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &wanted);
    puts("ready");
    fflush(stdout);
    for (;;) {
        int64_t wait = count ? due - now_ns() : 1000000000;
        if (wait < 0) wait = 0;
        struct timespec timeout = {wait / 1000000000, wait % 1000000000};
        int ready = epoll_pwait2(epoll_fd, events, 256, &timeout, NULL);
        for (int i = 0; i < ready; i++) {
            static char request[1 << 16];
            int fd = events[i].data.fd;
            if (fd == listener) {
                fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
                if (fd < 0 || fd >= STREAMS_MAX) return 1;
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                wanted.data.fd = fd;
                epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &wanted);
                continue;
            }
            if (recv(fd, request, sizeof request, 0) <= 0) { close(fd); left[fd] = 0; continue; }
            if (send(fd, HEAD, sizeof HEAD - 1, MSG_NOSIGNAL) < 0) continue;
            if (!count) due = now_ns() + step;
            left[fd] = tokens;
            running[count++] = fd;
        }
        if (!count || now_ns() < due) continue;
        due += step;
        for (int i = 0; i < count;) {
            int fd = running[i];
            if (left[fd] > 0) send(fd, event, event_size, MSG_NOSIGNAL);
            if (--left[fd] > 0) { i++; continue; }
            send(fd, last, last_size, MSG_NOSIGNAL);
            running[i] = running[--count];
        }
    }
}
