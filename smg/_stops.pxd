# Stop strings as an Aho-Corasick automaton: one table step per byte of text, however many there are.
#
# A state is the longest beginning of a stop that the text ends with. It is `text[start : start + depth]`, so
# that nobody has to keep it. `match` is the longest stop that the text ends with.

from libc.stddef cimport size_t
from libc.stdint cimport int16_t, uint8_t, uint16_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset


cdef struct Automaton:
    uint8_t classes[256]         # byte -> column; 0 = in no stop string
    uint32_t width               # columns
    uint16_t *next               # [state * width + column] -> state; 0 is the root
    uint16_t *depth              # [state] -> bytes of text that are a beginning of a stop
    uint32_t *start              # [state] -> offset in `text` of those bytes
    int16_t *match               # [state] -> number of the stop that ends here, -1 = none
    uint32_t *sizes              # [stop] -> bytes
    uint8_t *text                # all stops, one after the other


cdef inline void automaton_free(Automaton *a) noexcept nogil:
    free(a.next)
    free(a.depth)
    free(a.start)
    free(a.match)
    free(a.sizes)
    free(a.text)
    memset(a, 0, sizeof(Automaton))


cdef inline int automaton_compile(
    Automaton *a, const uint8_t *text, const uint32_t *sizes, size_t count
) noexcept nogil:
    """Fill the zeroed `a` with `count` non-empty stops of UTF-8, 32,766 bytes in all at most, which lie one
    after the other in `text`. -1: no memory; `a` is to be freed either way."""
    cdef size_t i, column, offset, size = 0, states = 1, head = 0, tail = 0
    cdef uint16_t state, child, back
    cdef uint16_t *queue
    cdef uint16_t *suffix
    for i in range(count):
        size += sizes[i]
    for offset in range(size):
        if a.classes[text[offset]] == 0:  # UTF-8 uses 243 byte values, so that columns fit
            a.width += 1
            a.classes[text[offset]] = <uint8_t>a.width
    a.width += 1
    a.next = <uint16_t *>calloc((size + 1) * a.width, sizeof(uint16_t))
    a.depth = <uint16_t *>calloc(size + 1, sizeof(uint16_t))
    a.start = <uint32_t *>calloc(size + 1, sizeof(uint32_t))
    a.match = <int16_t *>malloc((size + 1) * sizeof(int16_t))
    a.sizes = <uint32_t *>malloc(count * sizeof(uint32_t))
    a.text = <uint8_t *>malloc(size)
    queue = <uint16_t *>calloc(2 * (size + 1), sizeof(uint16_t))
    if (
        a.next == NULL or a.depth == NULL or a.start == NULL or a.match == NULL or a.sizes == NULL
        or a.text == NULL or queue == NULL
    ):
        free(queue)
        return -1
    memcpy(a.sizes, sizes, count * sizeof(uint32_t))
    memcpy(a.text, text, size)
    memset(a.match, 0xFF, (size + 1) * sizeof(int16_t))

    # The trie.
    size = 0
    for i in range(count):
        state = 0
        for offset in range(size, size + sizes[i]):
            column = state * a.width + a.classes[text[offset]]
            child = a.next[column]
            if child == 0:
                child = a.next[column] = <uint16_t>states
                states += 1
                a.depth[child] = a.depth[state] + 1
                a.start[child] = <uint32_t>size
            state = child
        if a.match[state] < 0:
            a.match[state] = <int16_t>i
        size += sizes[i]

    # A missing edge leads where the state's longest proper suffix, as far as that is a state, leads. Breadth
    # first, so that every state in `queue` finds its suffix's edges complete.
    suffix = queue + size + 1
    for column in range(a.width):
        if a.next[column]:
            queue[tail] = a.next[column]
            tail += 1
    while head < tail:
        state = queue[head]
        head += 1
        back = suffix[state]
        if a.match[state] < 0:
            a.match[state] = a.match[back]
        for column in range(a.width):
            child = a.next[state * a.width + column]
            if child:
                suffix[child] = a.next[back * a.width + column]
                queue[tail] = child
                tail += 1
            else:
                a.next[state * a.width + column] = a.next[back * a.width + column]
    free(queue)
    return 0
