/* A mutation driver that is guided by coverage, for a target in the same process. */
#ifndef SMG_FUZZ_DRIVER_H
#define SMG_FUZZ_DRIVER_H

#include <stddef.h>
#include <stdint.h>

/* Runs the code under test on one input; what is wrong it reports through `fuzz_fail`. */
typedef void (*fuzz_target)(const uint8_t *input, size_t size);

struct fuzz_input {
    uint8_t *data;
    size_t size;
};

struct fuzz_run {
    struct fuzz_input *corpus; /* the first inputs, then those that reached something new; owned by the run */
    size_t count;
    uint64_t executions;
    uint64_t places;           /* (code address, hit count class) pairs seen */
};

enum { FUZZ_LONGEST = 1024 };  /* bytes of an input that a mutation may leave */

/* Adds a copy of an input. Returns 0, or -1 when memory is out. */
int fuzz_add(struct fuzz_run *run, const uint8_t *data, size_t size);

/* Runs every input once, then mutations until the executions or the seconds are used up. */
void fuzz_mutate(struct fuzz_run *run, fuzz_target target, uint64_t executions, double seconds, uint64_t seed);

/* The input that is running, once the process is about to die of it, goes to this file. */
void fuzz_keep_crash(const char *path);

/* Ends the process: the target did something wrong that no sanitizer sees. */
void fuzz_fail(const char *what);

void fuzz_free(struct fuzz_run *run);

#endif
