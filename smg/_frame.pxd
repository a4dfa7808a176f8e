# What every compiled decoder fills: one Batch per output frame, one Row per request in it.
#
# A Batch belongs to one thread and is reused from frame to frame. Spans are offsets into the frame, which
# must outlive the Batch's use of them. Nothing here is applied to anything: a decoder either fills the whole
# Batch and returns 0, or fills `fault`, returns -1, and the caller drops the frame.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef enum Finish:
    FINISH_NONE = 0      # still running
    FINISH_STOP = 1
    FINISH_LENGTH = 2
    FINISH_ABORT = 3
    FINISH_ERROR = 4
    FINISH_REPETITION = 5
    FINISH_OTHER = 6     # a reason this code does not know; its text is in `finish_text`

cdef struct Span:
    uint32_t start       # offset in the frame
    uint32_t size        # bytes; 0 = absent

cdef struct Row:
    uint32_t epoch       # of the wire id; meaningful when `ours`
    uint32_t slot
    uint32_t generation
    uint8_t ours         # the id has the router's shape
    uint8_t finish       # Finish
    uint32_t first_token # range in Batch.tokens
    uint32_t token_count
    uint32_t prompt_tokens
    uint32_t completion_tokens   # cumulative
    uint32_t cached_tokens
    Span rid             # UTF-8 bytes of the id
    Span finish_text     # UTF-8 bytes of the reason
    Span logprob_values  # msgpack array of floats, one per new token; absent when empty
    Span logprob_ids     # msgpack array of token ids, parallel to logprob_values

cdef struct Fault:
    const char *column   # static name of the column or part
    const char *what     # static text: what was expected, and what was found instead
    int64_t row          # row or element number, -1 when it is not about one
    uint64_t found       # a length, count or type byte, as `what` says
    uint64_t expected
    uint32_t offset      # byte offset in the frame

cdef struct Batch:
    Row *rows
    uint32_t row_count
    uint32_t row_capacity
    uint32_t *tokens     # new token ids of all rows, one after the other
    uint32_t token_count
    uint32_t token_capacity
    uint8_t has_engine_index
    uint8_t has_load     # the frame brought a load report
    uint64_t engine_index
    uint64_t running     # requests
    uint64_t waiting     # requests
    double kv_usage      # 0..1
    Fault fault          # set when decoding failed
