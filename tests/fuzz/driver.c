/* Compiled without sanitizers and without coverage: only the target is watched. */
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Coverage. The compiler calls this from every basic block of the target (-fsanitize-coverage=trace-pc). */

enum { PLACES = 1 << 17 };

static uint8_t hits[PLACES];       /* of this execution */
static uint8_t classes[PLACES];    /* bits of the hit count classes seen in any execution */
static uint32_t touched[PLACES];   /* places with a hit in this execution */
static uint32_t touched_count;

__attribute__((visibility("hidden"))) void __sanitizer_cov_trace_pc(void)
{
    uint32_t place = (uint32_t)((uintptr_t)__builtin_return_address(0) >> 1) % PLACES;
    if (hits[place] == 0)
        touched[touched_count++] = place;
    if (hits[place] < 255)
        hits[place]++;
}

static uint8_t class_of(uint8_t count)
{
    return count < 4 ? 1u << (count - 1) : count < 8 ? 8 : count < 16 ? 16 : count < 64 ? 32 : count < 255 ? 64 : 128;
}

/* Clears the hits and returns how many of their classes are new. */
static uint32_t news(void)
{
    uint32_t found = 0;
    for (uint32_t i = 0; i < touched_count; i++) {
        uint32_t place = touched[i];
        uint8_t class = class_of(hits[place]);
        if (!(classes[place] & class)) {
            classes[place] |= class;
            found++;
        }
        hits[place] = 0;
    }
    touched_count = 0;
    return found;
}

/* Crashes */

static const char *crash_path;
static const uint8_t *running;
static size_t running_size;

void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static void write_crash(void)
{
    FILE *file = crash_path && running ? fopen(crash_path, "wb") : NULL;
    if (file) {
        fwrite(running, 1, running_size, file);
        fclose(file);
    }
    running = NULL;
}

void fuzz_keep_crash(const char *path)
{
    crash_path = path;
    if (__sanitizer_set_death_callback)
        __sanitizer_set_death_callback(write_crash);
}

void fuzz_fail(const char *what)
{
    fprintf(stderr, "fuzz target: %s\n", what);
    write_crash();
    abort();
}

/* Mutations */

static uint64_t state;

static uint32_t any(uint32_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)((state >> 32) * below >> 32);
}

/* Lead bytes of every msgpack type, and the edges of the ranges between them. */
static const uint8_t LEADS[] = {
    0x00, 0x01, 0x7f, 0x80, 0x81, 0x8f, 0x90, 0x91, 0x92, 0x9f, 0xa0, 0xa1, 0xb8, 0xbf, 0xc0, 0xc1, 0xc2, 0xc3,
    0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9, 0xca, 0xcb, 0xcc, 0xcd, 0xce, 0xcf, 0xd0, 0xd1, 0xd2, 0xd3, 0xd4, 0xd8,
    0xd9, 0xda, 0xdb, 0xdc, 0xdd, 0xde, 0xdf, 0xe0, 0xff,
};

static const uint64_t NUMBERS[] = {
    0, 1, 0x7f, 0x80, 0xff, 0x100, 0x7fff, 0x8000, 0xffff, 0x10000, 0x7fffffff, 0x80000000, 0xffffffff,
    0x100000000, 0x7fffffffffffffff, 0x8000000000000000, 0xffffffffffffffff,
};

/* A header or a number of 1, 2, 4 or 8 bytes with a value that is at an edge or near the input's size. */
static size_t hostile(uint8_t *at, size_t size)
{
    static const uint8_t WIDE[] = {0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9, 0xcc, 0xcd, 0xce, 0xcf, 0xd0, 0xd1, 0xd2,
                                   0xd3, 0xd9, 0xda, 0xdb, 0xdc, 0xdd, 0xde, 0xdf};
    static const uint8_t WIDTH[] = {1, 2, 4, 1, 2, 4, 1, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 2, 4, 2, 4};
    uint32_t which = any(sizeof WIDE);
    uint64_t value = any(2) ? NUMBERS[any(sizeof NUMBERS / sizeof *NUMBERS)] : size + any(5) - 2;
    uint32_t width = WIDTH[which];
    at[0] = WIDE[which];
    for (uint32_t i = 0; i < width; i++)
        at[1 + i] = (uint8_t)(value >> 8 * (width - 1 - i));
    return 1 + width;
}

/* Puts `count` bytes in place of `gone` ones at `at`. Leaves the input alone when it would grow too long. */
static size_t splice(uint8_t *data, size_t size, size_t at, size_t gone, const uint8_t *bytes, size_t count)
{
    if (gone > size - at)
        gone = size - at;
    if (size - gone + count > FUZZ_LONGEST)
        return size;
    memmove(data + at + count, data + at + gone, size - at - gone);
    memcpy(data + at, bytes, count);
    return size - gone + count;
}

static size_t mutate_once(const struct fuzz_run *run, uint8_t *data, size_t size)
{
    uint8_t bytes[64];
    size_t at = any((uint32_t)size + 1);
    size_t count, from;
    const struct fuzz_input *other;
    switch (any(12)) {
    case 0:
        bytes[0] = (uint8_t)any(256);
        return splice(data, size, at, 1, bytes, 1);
    case 1:
        bytes[0] = LEADS[any(sizeof LEADS)];
        return splice(data, size, at, 1, bytes, 1);
    case 2:
        if (at < size)
            data[at] ^= (uint8_t)(1u << any(8));
        return size;
    case 3:
        if (at < size)
            data[at] += any(2) ? 1 : -1;
        return size;
    case 4:
        bytes[0] = LEADS[any(sizeof LEADS)];
        return splice(data, size, at, 0, bytes, 1);
    case 5:
        return splice(data, size, at, 1 + any(any(4) ? 4 : 64), bytes, 0);
    case 6:
    case 7:
        count = hostile(bytes, size);
        return splice(data, size, at, any(2) ? 0 : 1 + any(9), bytes, count);
    case 8: /* part of the same input again */
        count = 1 + any(any(4) ? 16 : sizeof bytes);
        from = any((uint32_t)size + 1);
        count = count > size - from ? size - from : count;
        memcpy(bytes, data + from, count);
        return splice(data, size, at, any(2) ? 0 : count, bytes, count);
    case 9: /* part of another */
        other = &run->corpus[any((uint32_t)run->count)];
        from = any((uint32_t)other->size + 1);
        count = 1 + any(sizeof bytes);
        count = count > other->size - from ? other->size - from : count;
        return splice(data, size, at, any(2) ? 0 : count, other->data + from, count);
    case 10: /* the rest of another */
        other = &run->corpus[any((uint32_t)run->count)];
        from = any((uint32_t)other->size + 1);
        return splice(data, size, at, size, other->data + from, other->size - from);
    default:
        return any(8) ? size : at; /* cut */
    }
}

/* The run */

int fuzz_add(struct fuzz_run *run, const uint8_t *data, size_t size)
{
    struct fuzz_input *grown = realloc(run->corpus, (run->count + 1) * sizeof *grown);
    if (!grown)
        return -1;
    run->corpus = grown;
    grown[run->count].data = malloc(size ? size : 1);
    if (!grown[run->count].data)
        return -1;
    memcpy(grown[run->count].data, data, size);
    grown[run->count].size = size;
    run->count++;
    return 0;
}

void fuzz_free(struct fuzz_run *run)
{
    for (size_t i = 0; i < run->count; i++)
        free(run->corpus[i].data);
    free(run->corpus);
    memset(run, 0, sizeof *run);
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* One execution. Returns how much of what it reached is new. */
static uint32_t execute(struct fuzz_run *run, fuzz_target target, const uint8_t *data, size_t size)
{
    uint32_t found;
    running = data, running_size = size;
    target(data, size);
    running = NULL;
    run->executions++;
    found = news();
    run->places += found;
    return found;
}

void fuzz_mutate(struct fuzz_run *run, fuzz_target target, uint64_t executions, double seconds, uint64_t seed)
{
    static uint8_t data[FUZZ_LONGEST];
    const struct fuzz_input *input;
    size_t first = run->count, size;
    uint32_t changes;
    double until = seconds_now() + seconds;
    state = 0x9e3779b97f4a7c15ull * (seed + 1);
    memset(classes, 0, sizeof classes);
    for (size_t i = 0; i < first; i++)
        execute(run, target, run->corpus[i].data, run->corpus[i].size);
    while (run->count && run->executions < executions && (run->executions % 1024 || seconds_now() < until)) {
        /* half of the time one that was found lately: what is new has been mutated least */
        size_t lately = run->count > 64 ? 64 : run->count;
        input = &run->corpus[any(2) ? run->count - 1 - any((uint32_t)lately) : any((uint32_t)run->count)];
        size = input->size > FUZZ_LONGEST ? FUZZ_LONGEST : input->size;
        memcpy(data, input->data, size);
        changes = any(2) ? 1 : 1 + any(6);
        for (uint32_t i = 0; i < changes; i++)
            size = mutate_once(run, data, size);
        if (execute(run, target, data, size) && fuzz_add(run, data, size) < 0)
            return;
    }
}
