/* The steps of simulated TokenSpeed or vLLM ranks, without Python: requests in, an output frame per rank and step out.

   simulator.py opens the sockets and does the handshake; this runs in its process and sends through the libzmq
   that pyzmq loaded, so that what a gateway sees is what a real engine's libzmq makes of one frame per step.
   A step's frame is byte for byte what msgspec makes of BatchTokenIDOutSlim, or of EngineCoreOutputs (a test checks).

   Stamps: row r of the stamp table belongs to the request whose seed is r; column 0 is when its ADD was read,
   column 1 + k when the frame with its token k was handed to libzmq. CLOCK_MONOTONIC, nanoseconds. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct { _Alignas(16) unsigned char opaque[64]; } zmq_msg_t;

static struct {
    int (*msg_init)(zmq_msg_t *);
    int (*msg_init_size)(zmq_msg_t *, size_t);
    int (*msg_close)(zmq_msg_t *);
    int (*msg_recv)(zmq_msg_t *, void *, int);
    int (*msg_send)(zmq_msg_t *, void *, int);
    void *(*msg_data)(zmq_msg_t *);
    size_t (*msg_size)(zmq_msg_t *);
    int (*msg_more)(zmq_msg_t *);
} zmq;

enum { DONTWAIT = 1, ID_MAX = 120, RANKS_MAX = 128, NO_ROW = -1, PROMPT_PAGES = 64 };
enum Wire { TOKENSPEED, VLLM };

typedef struct {
    char id[ID_MAX];
    uint8_t id_size;
    int32_t row;       /* of the stamp table */
    uint32_t prompt;   /* tokens */
    uint32_t limit;    /* tokens to make */
    uint32_t made;
} Request;

typedef struct {
    void *input, *output;
    int input_fd;
    uint32_t running, capacity;
    Request *requests;
    int64_t due;       /* of the next step, ns */
} Rank;

typedef struct {
    uint32_t rank_count, elements, start_at, token_kinds, rows, columns;
    enum Wire wire;
    int64_t step;      /* ns, 0 = as fast as it goes */
    int started;
    uint64_t *stamps;
    uint32_t *tokens;
    uint8_t *frame;
    size_t frame_capacity;
    uint64_t adds, aborts, frames, made, bad;
    Rank ranks[RANKS_MAX];
} Engine;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* -------------------------------------------------------------- msgpack, as much as an ADD needs */

typedef struct { const uint8_t *at, *end; } Reader;

static uint64_t big_endian(const uint8_t *at, int size) {
    uint64_t value = 0;
    while (size--) value = value << 8 | *at++;
    return value;
}

/* Reads a head: 'a'rray, 'm'ap, 's'tring or 'b'inary with a count, 'i'nteger with a value, 'n'il, 'o'ther with the
   bytes to skip, 0 = broken. */
static char head(Reader *r, uint64_t *count) {
    if (r->at >= r->end) return 0;
    uint8_t b = *r->at++;
    int size = 0;
    char kind = 0;
    if (b < 0x80) { *count = b; return 'i'; }
    if (b < 0x90) { *count = b & 15; return 'm'; }
    if (b < 0xa0) { *count = b & 15; return 'a'; }
    if (b < 0xc0) { *count = b & 31; kind = 's'; }
    else if (b >= 0xe0) { *count = (uint64_t)(int8_t)b; return 'i'; }
    else switch (b) {
        case 0xc0: return 'n';
        case 0xc2: case 0xc3: *count = 0; return 'o';
        case 0xc4: case 0xc5: case 0xc6: kind = 'b'; size = 1 << (b - 0xc4); break;
        case 0xca: *count = 4; kind = 'o'; break;
        case 0xcb: *count = 8; kind = 'o'; break;
        case 0xcc: case 0xcd: case 0xce: case 0xcf: kind = 'i'; size = 1 << (b - 0xcc); break;
        case 0xd0: case 0xd1: case 0xd2: case 0xd3: kind = 'i'; size = 1 << (b - 0xd0); break;
        case 0xd9: case 0xda: case 0xdb: kind = 's'; size = 1 << (b - 0xd9); break;
        case 0xdc: case 0xdd: kind = 'a'; size = 2 << (b - 0xdc); break;
        case 0xde: case 0xdf: kind = 'm'; size = 2 << (b - 0xde); break;
        default: return 0;
    }
    if (r->end - r->at < size) return 0;
    if (size) *count = big_endian(r->at, size), r->at += size;
    if ((kind == 's' || kind == 'b' || kind == 'o') && (uint64_t)(r->end - r->at) < *count) return 0;
    return kind;
}

static int skip(Reader *r) {
    uint64_t left = 1, count;
    while (left--) {
        char kind = head(r, &count);
        if (!kind) return 0;
        if (kind == 's' || kind == 'b' || kind == 'o') r->at += count;
        if (kind == 'a') left += count;
        if (kind == 'm') left += 2 * count;
    }
    return 1;
}

static uint8_t *put_array(uint8_t *p, uint32_t count) {
    if (count < 16) { *p++ = 0x90 | count; return p; }
    *p++ = 0xdc; *p++ = count >> 8; *p++ = count;
    return p;
}

static uint8_t *put_uint(uint8_t *p, uint32_t value) {
    if (value < 0x80) *p++ = value;
    else if (value < 0x100) { *p++ = 0xcc; *p++ = value; }
    else if (value < 0x10000) { *p++ = 0xcd; *p++ = value >> 8; *p++ = value; }
    else { *p++ = 0xce; *p++ = value >> 24; *p++ = value >> 16; *p++ = value >> 8; *p++ = value; }
    return p;
}

static uint8_t *put_text(uint8_t *p, const char *text, uint32_t size) {
    if (size < 32) *p++ = 0xa0 | size;
    else { *p++ = 0xd9; *p++ = size; }
    memcpy(p, text, size);
    return p + size;
}

/* -------------------------------------------------------------- requests */

static int admit(Engine *e, Rank *rank, const char *id, size_t size, uint32_t prompt, uint32_t limit, int64_t row) {
    if (size > ID_MAX || rank->running == 0xFFFF || limit == 0) return 0;
    if (rank->running == rank->capacity) {
        uint32_t capacity = rank->capacity ? 2 * rank->capacity : 256;
        void *grown = realloc(rank->requests, capacity * sizeof(Request));
        if (!grown) return 0;
        rank->requests = grown;
        rank->capacity = capacity;
    }
    int64_t now = now_ns();
    if (!rank->running) rank->due = now + e->step;
    Request *q = &rank->requests[rank->running++];
    memcpy(q->id, id, size);
    q->id_size = size;
    q->prompt = prompt;
    q->limit = limit;
    q->made = 0;
    q->row = row >= 0 && row < e->rows ? row : NO_ROW;
    if (q->row != NO_ROW) e->stamps[(size_t)q->row * e->columns] = now;
    e->adds++;
    return 1;
}

/* [tag, rid, nil, nil, input_ids, [max_new_tokens, ... seed at 23 ...], ...] */
static int on_add(Engine *e, Rank *rank, const uint8_t *data, size_t size) {
    Reader r = {data, data + size};
    uint64_t fields, id_size, prompt, params, limit = 1, row = ~0ULL, value;
    if (head(&r, &fields) != 'a' || fields < 6 || !skip(&r)) return 0;
    if (head(&r, &id_size) != 's') return 0;
    const char *id = (const char *)r.at;
    r.at += id_size;
    if (!skip(&r) || !skip(&r)) return 0;
    Reader ids = r;
    if (head(&ids, &prompt) != 'a' || !skip(&r)) return 0;
    if (head(&r, &params) != 'a') return 0;
    for (uint64_t i = 0; i < params && i < 24; i++) {
        Reader item = r;
        if (!skip(&r)) return 0;
        if ((i == 0 || i == 23) && head(&item, &value) == 'i') *(i ? &row : &limit) = value;
    }
    return admit(e, rank, id, id_size, prompt, limit > 0xFFFFFFF ? 0xFFFFFFF : limit, row > INT32_MAX ? -1 : (int64_t)row);
}

/* [rid, input_ids, mm_features, {"max_tokens": ..., "seed": ...}, ...] */
static int on_core_add(Engine *e, Rank *rank, const uint8_t *data, size_t size) {
    Reader r = {data, data + size};
    uint64_t fields, id_size, prompt, params, limit = 16, row = ~0ULL, name_size, value;
    if (head(&r, &fields) != 'a' || fields < 4 || head(&r, &id_size) != 's') return 0;
    const char *id = (const char *)r.at;
    r.at += id_size;
    Reader ids = r;
    if (head(&ids, &prompt) != 'a' || !skip(&r) || !skip(&r)) return 0;
    if (head(&r, &params) != 'm') return 0;
    while (params--) {
        if (head(&r, &name_size) != 's') return 0;
        const char *name = (const char *)r.at;
        r.at += name_size;
        Reader item = r;
        if (!skip(&r)) return 0;
        if (head(&item, &value) != 'i') continue;
        if (name_size == 10 && !memcmp(name, "max_tokens", 10)) limit = value;
        if (name_size == 4 && !memcmp(name, "seed", 4)) row = value;
    }
    return admit(e, rank, id, id_size, prompt, limit > 0xFFFFFFF ? 0xFFFFFFF : limit, row > INT32_MAX ? -1 : (int64_t)row);
}

static int on_abort(Engine *e, Rank *rank, const uint8_t *data, size_t size) {
    Reader r = {data, data + size};
    uint64_t count, id_size;
    if (head(&r, &count) != 'a') return 0;
    while (count--) {
        if (head(&r, &id_size) != 's') return 0;
        for (uint32_t i = 0; i < rank->running; i++)
            if (rank->requests[i].id_size == id_size && !memcmp(rank->requests[i].id, r.at, id_size)) {
                rank->requests[i] = rank->requests[--rank->running];
                break;
            }
        r.at += id_size;
        e->aborts++;
    }
    return 1;
}

static void read_input(Engine *e, Rank *rank) {
    zmq_msg_t message;
    for (;;) {
        zmq.msg_init(&message);
        if (zmq.msg_recv(&message, rank->input, DONTWAIT) < 0) { zmq.msg_close(&message); return; }
        int type = zmq.msg_size(&message) == 1 ? *(uint8_t *)zmq.msg_data(&message) : -1;
        for (int part = 0; zmq.msg_more(&message); part++) {
            zmq.msg_close(&message);
            zmq.msg_init(&message);
            if (zmq.msg_recv(&message, rank->input, 0) < 0) break;
            if (part) continue;
            const uint8_t *data = zmq.msg_data(&message);
            size_t size = zmq.msg_size(&message);
            int (*add)(Engine *, Rank *, const uint8_t *, size_t) = e->wire == VLLM ? on_core_add : on_add;
            if (!(type == 0 ? add(e, rank, data, size) : type == 1 ? on_abort(e, rank, data, size) : 0)) e->bad++;
        }
        zmq.msg_close(&message);
    }
}

/* -------------------------------------------------------------- steps */

static uint32_t token_of(const Engine *e, const Request *q) {
    return e->tokens[((uint32_t)q->row * 7 + q->made * 13) % e->token_kinds];
}

static uint8_t *put_nils(uint8_t *p, int count) {
    memset(p, 0xc0, count);
    return p + count;
}

static uint8_t *put_double(uint8_t *p, double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    *p++ = 0xcb;
    for (int shift = 56; shift >= 0; shift -= 8) *p++ = bits >> shift;
    return p;
}

static uint8_t *put_pair(uint8_t *p, const char *name, uint32_t value) {
    return put_uint(put_text(p, name, strlen(name)), value);
}

/* A value that has no more than its first byte: nil, false, an empty map or array, or the head of a map to come. */
static uint8_t *put_byte(uint8_t *p, const char *name, uint8_t byte) {
    p = put_text(p, name, strlen(name));
    *p++ = byte;
    return p;
}

static uint8_t *put_map(uint8_t *p, uint32_t count) {
    *p++ = 0xde;
    *p++ = count >> 8;
    *p++ = count;
    return p;
}

/* EngineCoreOutputs of vLLM 0.32: an array per request, then statistics and the ids that end with this step. */
static uint8_t *put_core(Engine *e, uint32_t index, uint8_t *p) {
    const Rank *rank = &e->ranks[index];
    const Request *q = rank->requests;
    uint32_t n = rank->running, i, ended = 0;
    p = put_array(p, 9);
    p = put_uint(p, index);
    p = put_array(p, n);
    for (i = 0; i < n; i++) {
        int last = q[i].made + 1 >= q[i].limit;
        ended += last;
        p = put_array(p, 18);
        p = put_text(p, q[i].id, q[i].id_size);
        *p++ = 0x91;
        p = put_uint(p, token_of(e, &q[i]));
        p = put_nils(p, 3);
        *p++ = last ? 1 : 0xc0;   /* "length" */
        p = put_nils(p, 7);
        *p++ = 0;                 /* num_nans_in_logits */
        p = put_nils(p, 4);
    }
    p = put_map(p, 18);           /* SchedulerStats */
    p = put_pair(p, "num_running_reqs", n);
    p = put_pair(p, "num_waiting_reqs", 0);
    p = put_pair(p, "num_skipped_waiting_reqs", 0);
    p = put_byte(p, "num_kv_fetch_reqs_by_stage", 0x80);
    p = put_pair(p, "step_counter", 0);
    p = put_pair(p, "current_wave", 0);
    p = put_double(put_text(p, "kv_cache_usage", 14), 0.5);
    p = put_byte(p, "iteration_details", 0xc0);
    p = put_byte(p, "prefix_cache_stats", 0x88);
    p = put_byte(p, "reset", 0xc2);
    p = put_pair(p, "requests", 0);
    p = put_pair(p, "queries", 0);
    p = put_pair(p, "hits", 0);
    p = put_pair(p, "preempted_requests", 0);
    p = put_pair(p, "preempted_queries", 0);
    p = put_pair(p, "preempted_hits", 0);
    p = put_byte(p, "hits_by_source", 0x80);
    p = put_byte(p, "connector_prefix_cache_stats", 0xc0);
    p = put_byte(p, "kv_cache_eviction_events", 0x90);
    p = put_byte(p, "spec_decoding_stats", 0xc0);
    p = put_byte(p, "kv_connector_stats", 0xc0);
    p = put_byte(p, "ec_connector_stats", 0xc0);
    p = put_byte(p, "waiting_lora_adapters", 0x80);
    p = put_byte(p, "running_lora_adapters", 0x80);
    p = put_byte(p, "cudagraph_stats", 0xc0);
    p = put_byte(p, "perf_stats", 0xc0);
    p = put_double(p, now_ns() * 1e-9);
    *p++ = 0xc0;                  /* utility_output */
    if (ended) {
        p = put_array(p, ended);
        for (i = 0; i < n; i++) if (q[i].made + 1 >= q[i].limit) p = put_text(p, q[i].id, q[i].id_size);
    } else *p++ = 0xc0;
    p = put_nils(p, 2);
    return put_text(p, "default", 7);
}

static size_t build(Engine *e, uint32_t index) {
    Rank *rank = &e->ranks[index];
    uint32_t n = rank->running, i;
    size_t need = 1024 + (size_t)n * (2 * ID_MAX + 64);
    if (need > e->frame_capacity) {
        free(e->frame);
        e->frame = malloc(e->frame_capacity = 2 * need);
    }
    uint8_t *p = e->frame;
    const Request *q = rank->requests;
    if (e->wire == VLLM) return put_core(e, index, p) - e->frame;
    p = put_array(p, e->elements);
    p = put_text(p, "BatchTokenIDOutSlim", 19);
    p = put_array(p, n);
    for (i = 0; i < n; i++) p = put_text(p, q[i].id, q[i].id_size);
    p = put_array(p, n);
    for (i = 0; i < n; i++) { *p++ = 0x91; p = put_uint(p, token_of(e, &q[i])); }
    p = put_array(p, n);
    for (i = 0; i < n; i++) p = q[i].made + 1 < q[i].limit ? put_text(p, "", 0) : put_text(p, "length", 6);
    p = put_array(p, n);
    for (i = 0; i < n; i++) p = put_uint(p, q[i].prompt);
    p = put_array(p, n);
    for (i = 0; i < n; i++) p = put_uint(p, q[i].made + 1);
    p = put_array(p, n);
    memset(p, 0, n), p += n;
    p = put_array(p, n);
    memset(p, 0x90, n), p += n;
    p = put_array(p, n);
    memset(p, 0x90, n), p += n;
    if (e->elements > 9) p = put_uint(p, index);
    if (e->elements > 10) {
        p = put_uint(p, n);
        p = put_uint(p, 0);
        p = put_uint(p, n * PROMPT_PAGES);
        p = put_uint(p, 1 << 20);
    }
    return p - e->frame;
}

static int step(Engine *e, uint32_t index) {
    Rank *rank = &e->ranks[index];
    zmq_msg_t message;
    size_t size = build(e, index);
    if (zmq.msg_init_size(&message, size)) return 0;
    memcpy(zmq.msg_data(&message), e->frame, size);
    int64_t now = now_ns();
    for (uint32_t i = 0; i < rank->running; i++) {
        Request *q = &rank->requests[i];
        if (q->row != NO_ROW && q->made + 1 < e->columns) e->stamps[(size_t)q->row * e->columns + 1 + q->made] = now;
        q->made++;
    }
    while (zmq.msg_send(&message, rank->output, 0) < 0)
        if (errno != EINTR) { zmq.msg_close(&message); return 0; }
    e->frames++;
    e->made += rank->running;
    for (uint32_t i = 0; i < rank->running;)
        if (rank->requests[i].made >= rank->requests[i].limit) rank->requests[i] = rank->requests[--rank->running];
        else i++;
    rank->due = rank->due + e->step > now ? rank->due + e->step : now + e->step;
    return 1;
}

/* Until `stop_fd` is readable. Steps begin once `start_at` requests run, and begin anew after all have ended. */
int engine_run(Engine *e, int stop_fd) {
    struct pollfd polled[RANKS_MAX + 1];
    uint32_t i;
    for (i = 0; i < e->rank_count; i++) polled[i] = (struct pollfd){e->ranks[i].input_fd, POLLIN, 0};
    polled[i] = (struct pollfd){stop_fd, POLLIN, 0};
    for (uint32_t turn = 0;; turn++) {
        int64_t next = INT64_MAX, now;
        uint32_t running = 0;
        for (i = 0; i < e->rank_count; i++) {
            if (e->ranks[i].input) read_input(e, &e->ranks[i]);
            running += e->ranks[i].running;
        }
        if (!running) e->started = 0;
        else if (!e->started && running >= e->start_at) {
            e->started = 1;
            now = now_ns();
            for (i = 0; i < e->rank_count; i++) e->ranks[i].due = now + e->step;
        }
        if (e->started) {
            for (i = 0; i < e->rank_count; i++) {
                if (!e->ranks[i].running) continue;
                if (e->step && e->ranks[i].due > now_ns()) {}
                else if (!step(e, i)) return -1;
                if (e->ranks[i].running && e->ranks[i].due < next) next = e->ranks[i].due;
            }
        }
        if (!e->step && e->started && turn % 16) continue;
        int64_t wait = next == INT64_MAX ? 1000000000 : next - now_ns();
        if (!e->step && e->started) wait = 0;
        if (wait < 0) wait = 0;
        struct timespec timeout = {wait / 1000000000, wait % 1000000000};
        ppoll(polled, e->rank_count + 1, &timeout, NULL);
        if (polled[e->rank_count].revents) return 0;
    }
}

/* -------------------------------------------------------------- for simulator.py */

int engine_libzmq(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!library) return -1;
    zmq.msg_init = dlsym(library, "zmq_msg_init");
    zmq.msg_init_size = dlsym(library, "zmq_msg_init_size");
    zmq.msg_close = dlsym(library, "zmq_msg_close");
    zmq.msg_recv = dlsym(library, "zmq_msg_recv");
    zmq.msg_send = dlsym(library, "zmq_msg_send");
    zmq.msg_data = dlsym(library, "zmq_msg_data");
    zmq.msg_size = dlsym(library, "zmq_msg_size");
    zmq.msg_more = dlsym(library, "zmq_msg_more");
    return zmq.msg_init && zmq.msg_more ? 0 : -1;
}

Engine *engine_new(uint32_t ranks, int64_t step_ns, uint32_t elements, uint32_t start_at, const uint32_t *tokens,
                   uint32_t token_kinds, uint64_t *stamps, uint32_t rows, uint32_t columns) {
    Engine *e = calloc(1, sizeof(Engine));
    if (!e || ranks > RANKS_MAX || !(e->tokens = malloc(token_kinds * sizeof(uint32_t)))) return NULL;
    memcpy(e->tokens, tokens, token_kinds * sizeof(uint32_t));
    e->token_kinds = token_kinds;
    e->rank_count = ranks;
    e->step = step_ns;
    e->elements = elements;
    e->start_at = start_at;
    e->stamps = stamps;
    e->rows = rows;
    e->columns = columns;
    for (uint32_t i = 0; i < ranks; i++) e->ranks[i].input_fd = -1;
    return e;
}

/* `input` is NULL for a rank that gets its requests by engine_add. */
void engine_rank(Engine *e, uint32_t index, void *input, int input_fd, void *output) {
    e->ranks[index].input = input;
    e->ranks[index].input_fd = input_fd;
    e->ranks[index].output = output;
}

int engine_add(Engine *e, uint32_t rank, const char *id, uint32_t prompt, uint32_t limit, int64_t row) {
    return admit(e, &e->ranks[rank], id, strlen(id), prompt, limit, row);
}

void engine_wire(Engine *e, uint32_t wire) {
    e->wire = wire;
}

void engine_pace(Engine *e, int64_t step_ns, uint32_t start_at) {
    e->step = step_ns;
    e->start_at = start_at;
}

size_t engine_frame(Engine *e, uint32_t rank, const uint8_t **frame) {
    size_t size = build(e, rank);
    *frame = e->frame;
    return size;
}

void engine_totals(const Engine *e, uint64_t *totals) {
    totals[0] = e->adds;
    totals[1] = e->aborts;
    totals[2] = e->frames;
    totals[3] = e->made;
    totals[4] = e->bad;
}
