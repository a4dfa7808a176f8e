# Arrays of numbers inside a frame: [dtype, shape, data], as TokenSpeed's and vLLM's encoders write them.
#
# dtype is numpy's ("<i4") or torch's name ("int32"), shape an array of lengths. data is ext 3 with the bytes,
# or the number of the message part that is the bytes; the frame is part 0. The bytes are checked to be as
# many as dtype and shape say, and the parts referred to, to be no more in all than the message brought: a
# small message cannot ask for much.

from libc.stdint cimport UINT32_MAX, int8_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from smg._batch cimport fail, fail_read
from smg._frame cimport Batch, Part
from smg._msgpack cimport OK, WRONG_TYPE, Cursor, read_array, read_ext, read_text, read_u32, read_u64

cdef enum:
    RAW_BYTES = 3              # the ext code
    DTYPE_LONGEST = 8          # characters

cdef enum Numbers:             # what an array holds
    NUMBERS_UNKNOWN = 0        # some dtype that is not listed here; its size is not checked
    NUMBERS_INTEGER = 1
    NUMBERS_FLOAT = 2
    NUMBERS_OTHER = 3          # booleans and floats that numpy has not

cdef struct Source:            # a message that is being read
    Cursor c                   # in the frame
    const Part *parts          # the frame first
    uint32_t part_count
    size_t aux_left            # bytes of the other parts that nothing has referred to yet
    Batch *batch

cdef struct Tensor:
    uint8_t numbers            # Numbers
    uint8_t width              # bytes per number; 0 = unknown
    uint32_t dimensions
    uint32_t[2] shape          # its first two lengths, 1 where there is none
    uint32_t aux               # the part that holds it; 0 = inline


cdef inline void read_dtype(const uint8_t *p, uint32_t size, Tensor *tensor) noexcept nogil:
    """Numbers and width of a dtype's name."""
    cdef const char **names = [
        b"i1", b"i2", b"i4", b"i8", b"u1", b"u2", b"u4", b"u8", b"f2", b"f4", b"f8", b"b1",
        b"int8", b"int16", b"int32", b"int64", b"uint8", b"uint16", b"uint32", b"uint64",
        b"float16", b"float32", b"float64", b"bfloat16", b"bool"
    ]
    cdef const char *numbers = b"\1\1\1\1\1\1\1\1\2\2\2\3\1\1\1\1\1\1\1\1\2\2\2\3\3"
    cdef const char *widths = b"\1\2\4\10\1\2\4\10\2\4\10\1\1\2\4\10\1\2\4\10\2\4\10\2\1"
    cdef const char *name
    cdef uint32_t i, length
    tensor.numbers, tensor.width = NUMBERS_UNKNOWN, 0
    if size == 3 and (p[0] == c"<" or p[0] == c">" or p[0] == c"=" or p[0] == c"|"):
        p, size = p + 1, 2
    if size > DTYPE_LONGEST:
        return
    for i in range(25):
        name = names[i]
        length = 0
        while name[length]:
            length += 1
        if length == size and memcmp(p, name, size) == 0:
            tensor.numbers, tensor.width = numbers[i], widths[i]
            return


cdef inline int read_tensor(Source *s, const char *column, int64_t row, Tensor *tensor) noexcept nogil:
    """One array. Returns 0, or puts the fault down and returns -1."""
    cdef const uint8_t *frame = s.parts[0].data
    cdef const char *what
    cdef const uint8_t *text = NULL
    cdef uint64_t part = 0
    cdef uint64_t count = 1
    cdef uint64_t found
    cdef uint32_t size = 0
    cdef uint32_t length = 0
    cdef uint32_t i
    cdef int8_t code = 0
    cdef int status = read_array(&s.c, &size)
    if status == OK and size != 3:
        what = b"has an array of {found} parts, not dtype, shape and data"
        return fail(s.batch, column, row, what, size, 0, s.c.at - frame)
    if status != OK:
        what = b"must hold arrays as [dtype, shape, data], found {kind}"
        return fail_read(s.batch, column, row, status, what, &s.c, frame)
    status = read_text(&s.c, &text, &size)
    if status != OK:
        what = b"must name its dtype, found {kind}"
        return fail_read(s.batch, column, row, status, what, &s.c, frame)
    read_dtype(text, size, tensor)
    status = read_array(&s.c, &tensor.dimensions)
    if status != OK:
        what = b"must have a shape, found {kind}"
        return fail_read(s.batch, column, row, status, what, &s.c, frame)
    tensor.shape[0] = tensor.shape[1] = 1
    for i in range(tensor.dimensions):
        status = read_u32(&s.c, &length)
        if status != OK:
            what = b"must have a shape of lengths, found {kind}"
            return fail_read(s.batch, column, row, status, what, &s.c, frame)
        if i < 2:
            tensor.shape[i] = length
        count *= length
        if count > UINT32_MAX:
            what = b"has a shape of more numbers than a message can hold"
            return fail(s.batch, column, row, what, 0, 0, s.c.at - frame)
    tensor.aux = 0
    status = read_ext(&s.c, &code, &text, &size)
    if status == OK:
        if code != RAW_BYTES:
            what = b"has data of extension type {found}, not {expected}"
            return fail(s.batch, column, row, what, <uint8_t>code, RAW_BYTES, s.c.at - frame)
        found = size
    else:
        if status == WRONG_TYPE:
            status = read_u64(&s.c, &part)
        if status != OK:
            what = b"must have data as bytes or as a part's number, found {kind}"
            return fail_read(s.batch, column, row, status, what, &s.c, frame)
        if part < 1 or part >= s.part_count:
            what = b"has its data in part {found} of a message of {expected}"
            return fail(s.batch, column, row, what, part, s.part_count, s.c.at - frame)
        tensor.aux = <uint32_t>part
        found = s.parts[part].size
        if found > s.aux_left:
            what = b"has its data in a part that something else has used"
            return fail(s.batch, column, row, what, 0, 0, s.c.at - frame)
        s.aux_left -= found
    if tensor.width and found != count * tensor.width:
        what = b"has {found} bytes of data, its shape needs {expected}"
        return fail(s.batch, column, row, what, found, count * tensor.width, s.c.at - frame)
    return 0
