# What every compiled decoder fills: one Batch per output message, one Row per request in it.
#
# A Batch belongs to one thread and one decoder, and is reused from message to message. Spans are offsets into
# the message's first part, the frame; all parts must outlive the Batch's use of them. Nothing here is applied
# to anything: a decoder either fills the whole Batch and returns 0, or fills `fault`, returns -1, and the
# caller drops the message. A field of Row that a decoder never writes is zero.

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

cdef struct Part:        # one part of a message
    const uint8_t *data
    size_t size          # bytes

cdef enum StopKind:
    STOP_NONE = 0
    STOP_ID = 1          # a token id, in `stop_id`
    STOP_TEXT = 2        # the engine's word, in `stop_text`

cdef enum ColdKind:
    COLD_LOGPROBS = 0        # of the new tokens
    COLD_PROMPT_LOGPROBS = 1 # once per request
    COLD_KV_TRANSFER = 2     # a map for the engine that takes the request over

cdef struct Cold:        # something of a row that is decoded on demand; see `write_cold` in _batch.pxd
    uint8_t kind         # ColdKind
    uint8_t aux_count
    Span value           # one msgpack value
    uint32_t[3] aux      # parts that hold the arrays which `value` only numbers, in their order

cdef struct Extra:       # what few rows have; kept apart so that rows stay small
    uint32_t row         # index in Batch.rows
    uint8_t stop_kind    # StopKind: what was matched
    int64_t stop_id
    Span stop_text       # UTF-8 bytes
    uint32_t first_cold  # range in Batch.colds
    uint32_t cold_count

cdef enum Wave:
    WAVE_NONE = 0
    WAVE_COMPLETE = 1    # every rank has parked after this wave
    WAVE_START = 2       # a rank needs this wave started

cdef struct Row:
    uint32_t epoch       # of the wire id; meaningful when `ours`
    uint32_t slot
    uint32_t generation
    uint8_t ours         # the id has the router's shape
    uint8_t finish       # Finish
    uint8_t counts_absent    # prompt_tokens and cached_tokens are not said here
    uint32_t first_token # range in Batch.tokens
    uint32_t token_count
    uint32_t prompt_tokens
    uint32_t completion_tokens   # cumulative; not said when Batch.deltas
    uint32_t cached_tokens
    Span rid             # UTF-8 bytes of the id

cdef struct Aside:       # what few rows have, where a wire has columns for it
    Span finish_text     # UTF-8 bytes of the reason, when Row.finish
    Span logprob_values  # msgpack array of floats, one per new token, when Batch.has_logprobs; absent when empty
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
    Aside *asides        # one for each row; NULL when the wire has no such columns
    uint32_t aside_capacity
    uint32_t *tokens     # new token ids of all rows, one after the other
    uint32_t token_count
    uint32_t token_capacity
    Extra *extras        # in the order of their rows, one of each at most
    uint32_t extra_count
    uint32_t extra_capacity
    Cold *colds
    uint32_t cold_count
    uint32_t cold_capacity
    Span finished        # msgpack array of the ids that the engine is done with, whether or not a row says so too
    uint8_t has_logprobs # asides say of each row which it has
    uint8_t deltas       # rows have no completion_tokens: their new tokens add up to them
    uint8_t wave         # Wave
    uint64_t wave_number
    int64_t utility_call # whose reply `utility` is
    Span utility         # the reply to a utility call, one msgpack value
    Span weight_version  # UTF-8 bytes
    uint8_t has_engine_index
    uint8_t has_load     # the frame brought a load report
    uint64_t engine_index
    uint64_t running     # requests
    uint64_t waiting     # requests
    double kv_usage      # 0..1
    Fault fault          # set when decoding failed

# A message's parts, one at least, into the batch: 0, or -1 with the fault filled in.
ctypedef int (*Decoder)(const Part *parts, uint32_t part_count, Batch *batch) noexcept nogil
