/* A load client for OpenAI-style HTTP that costs well under a gateway: one thread, epoll, keep-alive.

   client PORT CONNECTIONS BODIES COUNT PIECE STAMPS COLUMNS RATE RAMP_MS LIMIT_S

   BODIES: a file of whole HTTP requests, each after its size as a little-endian uint32; request i is number i of the
   file. Every piece of text that the simulated engine makes has PIECE bytes and no character that JSON escapes, so
   tokens are counted exactly however a gateway merges them. STAMPS: the simulator's table (engine.c), "-" for none.
   RATE 0: every connection sends its next request when the last one is answered, until COUNT were sent; the first
   ones begin over RAMP_MS. Otherwise RATE requests a second for LIMIT_S seconds, from the first body again after
   COUNT.
   Connects, prints "ready", waits for a line on stdin, runs, prints one JSON object. LIMIT_S bounds the run. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { READ_SIZE = 1 << 18, KEPT_MAX = 1 << 20 };
enum State { IDLE, HEAD, CHUNK, LENGTH };

typedef struct { char *data; size_t size, capacity; } Bytes;

typedef struct {
    int fd;
    enum State state;
    const char *out;          /* what is left of the request */
    size_t out_size;
    int writing;              /* EPOLLOUT is asked for */
    int status;
    size_t left;              /* of a body with a length */
    uint32_t row, tokens;     /* of this request; tokens seen */
    int finished;             /* [DONE] was seen */
    int64_t sent, last;       /* ns: request sent, last text */
    Bytes kept, line;         /* unparsed bytes; an unfinished SSE line */
} Connection;

typedef struct { float *at; size_t count, capacity; } Samples;

static struct {
    uint64_t requests, ok, errors, refused, tokens, events, bytes, reads, late;
    int last_status;
    Samples ttft, gap, delay, whole;
} total;

static char **bodies;
static uint32_t *sizes;
static uint32_t body_count, next_body, limit_bodies;
static size_t piece;
static uint64_t *stamps;
static uint32_t columns, rows;
static int port, epoll_fd;
static char error_text[400];

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void add(Samples *s, int64_t ns) {
    if (s->count == s->capacity) s->at = realloc(s->at, (s->capacity = s->capacity ? 2 * s->capacity : 4096) * sizeof(float));
    s->at[s->count++] = ns * 1e-6f;
}

static void append(Bytes *b, const char *data, size_t size) {
    if (b->size + size > b->capacity) b->data = realloc(b->data, b->capacity = 2 * (b->size + size));
    memcpy(b->data + b->size, data, size);
    b->size += size;
}

static int dial(void) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to)) { perror("client: connect"); exit(1); }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

static void watch(Connection *c, int op) {
    struct epoll_event event = {.events = EPOLLIN | (c->writing ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(epoll_fd, op, c->fd, &event);
}

static void broken(Connection *c) {
    total.errors++;
    close(c->fd);
    c->fd = dial();
    c->state = IDLE;
    c->writing = 0;
    c->kept.size = c->line.size = 0;
    watch(c, EPOLL_CTL_ADD);
}

static void put(Connection *c) {
    while (c->out_size) {
        ssize_t n = send(c->fd, c->out, c->out_size, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno != EAGAIN) return;   /* the read side finds out */
        if (n < 0) break;
        c->out += n;
        c->out_size -= n;
    }
    int writing = c->out_size > 0;
    if (writing != c->writing) { c->writing = writing; watch(c, EPOLL_CTL_MOD); }
}

static void begin(Connection *c) {
    uint32_t index = next_body++ % limit_bodies;
    c->row = index;
    c->tokens = 0;
    c->finished = 0;
    c->state = HEAD;
    c->out = bodies[index];
    c->out_size = sizes[index];
    c->sent = c->last = now_ns();
    total.requests++;
    put(c);
}

/* -------------------------------------------------------------- what comes back */

static void on_event(Connection *c, const char *line, size_t size, int64_t now) {
    if (size < 6 || memcmp(line, "data:", 5)) return;
    total.events++;
    if (memmem(line, size, "[DONE]", 6)) { c->finished = 1; return; }
    const char *text = memmem(line, size, "\"content\":\"", 11);
    if (text) text += 11;
    else if ((text = memmem(line, size, "\"text\":\"", 8))) text += 8;
    else {
        if (memmem(line, size, "\"error\"", 7)) { total.errors++; snprintf(error_text, sizeof error_text, "%.*s", (int)size, line); }
        return;
    }
    const char *end = memchr(text, '"', line + size - text);
    size_t count = end ? (end - text) / piece : 0;
    if (end && (size_t)(end - text) != count * piece) { total.errors++; snprintf(error_text, sizeof error_text, "odd text: %.*s", (int)size, line); }
    if (!count) return;
    if (!c->tokens) add(&total.ttft, now - c->sent);
    else add(&total.gap, now - c->last);
    for (size_t i = 0; i < count; i++) {
        if (i) add(&total.gap, 0);
        if (stamps && c->row < rows && c->tokens + i + 1 < columns)
            add(&total.delay, now - (int64_t)stamps[(size_t)c->row * columns + 1 + c->tokens + i]);
    }
    c->tokens += count;
    c->last = now;
}

static void on_text(Connection *c, const char *data, size_t size, int64_t now) {
    const char *end;
    if (c->line.size) {
        if (!(end = memchr(data, '\n', size))) { append(&c->line, data, size); return; }
        append(&c->line, data, end - data);
        on_event(c, c->line.data, c->line.size, now);
        c->line.size = 0;
        size -= end + 1 - data;
        data = end + 1;
    }
    while ((end = memchr(data, '\n', size))) {
        on_event(c, data, end - data, now);
        size -= end + 1 - data;
        data = end + 1;
    }
    if (size) append(&c->line, data, size);
}

static void on_answer(Connection *c, const char *body, size_t size) {
    const char *at = memmem(body, size, "\"completion_tokens\":", 20);
    if (at) c->tokens = atoi(at + 20), c->finished = 1;
    else if (c->status == 200) snprintf(error_text, sizeof error_text, "%.*s", (int)size, body);
    if (c->status != 200) snprintf(error_text, sizeof error_text, "%.*s", (int)size, body);
}

static void done(Connection *c, int64_t now) {
    c->state = IDLE;
    if (c->status != 200) { total.refused++; total.last_status = c->status; return; }
    if (!c->finished) { total.errors++; return; }
    total.ok++;
    total.tokens += c->tokens;
    add(&total.whole, now - c->sent);
}

/* Parses what is whole; returns how many bytes it took. */
static size_t parse(Connection *c, const char *data, size_t size, int64_t now) {
    const char *at = data, *limit = data + size, *end;
    for (;;) {
        size_t left = limit - at;
        if (c->state == HEAD) {
            if (!(end = memmem(at, left, "\r\n\r\n", 4))) break;
            c->status = left > 12 ? atoi(at + 9) : 0;
            const char *header = at;
            c->state = IDLE;
            while ((header = memchr(header, '\n', end + 2 - header)) && ++header < end) {
                if (!strncasecmp(header, "content-length:", 15)) { c->left = strtoul(header + 15, NULL, 10); c->state = LENGTH; }
                if (!strncasecmp(header, "transfer-encoding:", 18)) c->state = CHUNK;
            }
            at = end + 4;
            if (c->state == IDLE) { total.errors++; done(c, now); }
        } else if (c->state == CHUNK) {
            if (!(end = memchr(at, '\n', left))) break;
            size_t chunk = strtoul(at, NULL, 16);
            if ((size_t)(limit - end - 1) < chunk + 2) break;
            at = end + 1;
            if (chunk) on_text(c, at, chunk, now);
            at += chunk + 2;
            if (!chunk) done(c, now);
        } else if (c->state == LENGTH) {
            if (left < c->left) break;
            on_answer(c, at, c->left);
            at += c->left;
            done(c, now);
        } else break;
    }
    return at - data;
}

static void readable(Connection *c) {
    static char buffer[KEPT_MAX + READ_SIZE];
    size_t kept = c->kept.size;
    if (kept > KEPT_MAX) { fprintf(stderr, "client: a response part of %zu bytes\n", kept); exit(1); }
    if (kept) memcpy(buffer, c->kept.data, kept);
    ssize_t n = recv(c->fd, buffer + kept, READ_SIZE, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) { broken(c); return; }
    total.reads++;
    total.bytes += n;
    size_t taken = parse(c, buffer, kept + n, now_ns());
    c->kept.size = 0;
    if (taken < kept + n) append(&c->kept, buffer + taken, kept + n - taken);
}

/* -------------------------------------------------------------- the run */

static int ascending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void print_samples(const char *name, Samples *s) {
    qsort(s->at, s->count, sizeof(float), ascending);
    const double shares[] = {0.5, 0.9, 0.99, 0.999};
    printf("\"%s\": [", name);
    for (int i = 0; i < 4; i++) {
        size_t at = shares[i] * s->count;
        printf("%s%.4f", i ? ", " : "", s->count ? s->at[at < s->count ? at : s->count - 1] : -1.0);
    }
    printf("], ");
}

static double own_cpu(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static char *map(const char *path, size_t *size) {
    struct stat info;
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &info)) { perror(path); exit(1); }
    *size = info.st_size;
    char *data = mmap(NULL, *size, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (data == MAP_FAILED) { perror(path); exit(1); }
    return data;
}

int main(int argc, char **argv) {
    if (argc != 11) { fprintf(stderr, "see the head of client.c\n"); return 2; }
    port = atoi(argv[1]);
    uint32_t connection_count = atoi(argv[2]), count = atoi(argv[4]);
    size_t size, stamps_size;
    char *data = map(argv[3], &size), *end = data + size;
    piece = atoi(argv[5]);
    columns = atoi(argv[7]);
    if (strcmp(argv[6], "-")) stamps = (uint64_t *)map(argv[6], &stamps_size), rows = stamps_size / 8 / columns;
    double rate = atof(argv[8]);
    int64_t ramp = atof(argv[9]) * 1e6, limit = atof(argv[10]) * 1e9;
    for (char *at = data; at < end; body_count++) at += 4 + *(uint32_t *)at;
    bodies = malloc(body_count * sizeof *bodies);
    sizes = malloc(body_count * sizeof *sizes);
    for (uint32_t i = 0; i < body_count; i++) { sizes[i] = *(uint32_t *)data; bodies[i] = data + 4; data += 4 + sizes[i]; }
    limit_bodies = count < body_count ? count : body_count;

    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    Connection *connections = calloc(connection_count, sizeof(Connection));
    for (uint32_t i = 0; i < connection_count; i++) {
        connections[i].fd = dial();
        watch(&connections[i], EPOLL_CTL_ADD);
        if (i % 64 == 63) usleep(2000);   /* the rival's listen backlog is 128 */
    }
    puts("ready");
    fflush(stdout);
    getchar();

    double cpu = own_cpu();
    int64_t start = now_ns(), now = start;
    uint32_t begun = 0;
    uint64_t answered = 0;
    struct epoll_event events[256];
    while (now - start < limit) {
        int64_t next = start + limit;
        if (rate > 0) {
            while ((next = start + (int64_t)(total.requests + total.late) * 1e9 / rate) <= now) {
                Connection *free_one = NULL;
                for (uint32_t i = 0; i < connection_count && !free_one; i++)
                    if (connections[i].state == IDLE) free_one = &connections[i];
                if (free_one) begin(free_one);
                else total.late++;
            }
        } else {
            for (; begun < connection_count && total.requests < count; begun++) {
                next = start + ramp * begun / connection_count;
                if (next > now) break;
                begin(&connections[begun]);
            }
            if (begun == connection_count || total.requests == count) next = start + limit;
            if (answered >= count) break;
        }
        int64_t wait = next - now;
        struct timespec timeout = {wait / 1000000000, wait % 1000000000};
        int ready = epoll_pwait2(epoll_fd, events, 256, &timeout, NULL);
        for (int i = 0; i < ready; i++) {
            Connection *c = events[i].data.ptr;
            if (events[i].events & EPOLLOUT) put(c);
            if (!(events[i].events & ~EPOLLOUT)) continue;
            int busy = c->state != IDLE;
            readable(c);
            if (busy && c->state == IDLE) {
                answered++;
                if (rate <= 0 && total.requests < count) begin(c);
            }
        }
        now = now_ns();
    }
    cpu = own_cpu() - cpu;
    for (char *p = error_text; *p; p++) if (*p == '"' || *p == '\\' || (unsigned char)*p < 32) *p = '\'';
    printf("{\"seconds\": %.6f, \"cpu\": %.6f, \"requests\": %lu, \"ok\": %lu, \"errors\": %lu, \"refused\": %lu, "
           "\"status\": %d, \"late\": %lu, \"tokens\": %lu, \"events\": %lu, \"bytes\": %lu, \"reads\": %lu, ",
           (now - start) * 1e-9, cpu, total.requests, total.ok, total.errors, total.refused, total.last_status,
           total.late, total.tokens, total.events, total.bytes, total.reads);
    print_samples("ttft", &total.ttft);
    print_samples("gap", &total.gap);
    print_samples("delay", &total.delay);
    print_samples("whole", &total.whole);
    printf("\"error\": \"%s\"}\n", error_text);
    return 0;
}
