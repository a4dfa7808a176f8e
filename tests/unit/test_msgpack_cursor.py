"""The checked cursor: every value in every encoding, every bound, every type, and nothing past the end."""

from __future__ import annotations

import math
import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg._codec import read_value

OK, TRUNCATED, WRONG_TYPE, NEGATIVE, OVER_RANGE, BAD_TEXT, TOO_DEEP = 0, -1, -2, -3, -4, -5, -6

LEADS = {
    "nil": {0xC0},
    "bool": {0xC2, 0xC3},
    "u32": {*range(0x80), *range(0xCC, 0xD4), *range(0xE0, 0x100)},
    "u64": {*range(0x80), *range(0xCC, 0xD4), *range(0xE0, 0x100)},
    "i64": {*range(0x80), *range(0xCC, 0xD4), *range(0xE0, 0x100)},
    "float": {*range(0x80), *range(0xCA, 0xD4), *range(0xE0, 0x100)},
    "text": {*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB},
    "utf8": {*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB},
    "bin": {0xC4, 0xC5, 0xC6},
    "ext": {0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)},
    "array": {*range(0x90, 0xA0), 0xDC, 0xDD},
    "map": {*range(0x80, 0x90), 0xDE, 0xDF},
    "any": {*range(0x100)} - {0xC1},
}

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=40)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20)),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)


@pytest.mark.parametrize("kind", LEADS)
def test_each_read_takes_its_own_lead_bytes_and_no_others(kind: str) -> None:
    for lead in range(0x100):
        status, _, at = read_value(kind, bytes([lead]) + bytes(300))
        if lead in LEADS[kind]:
            assert status != WRONG_TYPE, f"{lead:#x}"
        else:
            assert (status, at) == (WRONG_TYPE, 0), f"{lead:#x}"


@pytest.mark.parametrize("kind", [kind for kind in LEADS if kind != "nil"])
def test_nothing_can_be_read_from_no_bytes(kind: str) -> None:
    assert read_value(kind, b"") == (TRUNCATED, None, 0)


def encodings(value: int) -> list[bytes]:
    """Every way msgpack has to write an integer."""
    found = []
    if -32 <= value < 128:
        found.append(struct.pack("b", value))
    for lead, code in zip(range(0xCC, 0xD4), "BHIQbhiq", strict=True):
        try:
            found.append(bytes([lead]) + struct.pack(f">{code}", value))
        except struct.error:
            continue
    return found


POWERS = [2**power for power in (0, 5, 7, 8, 15, 16, 31, 32, 63, 64)]
EDGES = sorted({sign * power + step for power in POWERS for sign in (1, -1) for step in (-1, 0, 1)})


@pytest.mark.parametrize("value", [v for v in EDGES if -(2**63) <= v < 2**64])
def test_integers_are_read_in_every_encoding_that_holds_them(value: int) -> None:
    assert encodings(value)
    for packed in encodings(value):
        for kind, low, high in (("u32", 0, 2**32), ("u64", 0, 2**64), ("i64", -(2**63), 2**63)):
            if low <= value < high:
                assert read_value(kind, packed + b"\xff") == (OK, value, len(packed))
            else:
                expected = NEGATIVE if value < low else OVER_RANGE
                assert read_value(kind, packed + b"\xff") == (expected, None, 0)
        assert read_value("float", packed) == (OK, float(value), len(packed))


@given(st.floats())
def test_floats_are_read_bit_by_bit_in_both_widths(value: float) -> None:
    status, read, at = read_value("float", b"\xcb" + struct.pack(">d", value))
    assert (status, at) == (OK, 9)
    assert struct.pack(">d", read) == struct.pack(">d", value)
    narrow = struct.unpack(">f", struct.pack(">f", value))[0] if abs(value) < 1e38 else math.inf
    assert read_value("float", b"\xca" + struct.pack(">f", narrow)) == (OK, narrow, 5) or math.isnan(narrow)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 255, 256, 65535, 65536])
def test_text_and_bytes_are_read_with_headers_of_every_width(size: int) -> None:
    text = ("ab" * size)[:size]
    for packed in (msgpack.packb(text), b"\xdb" + struct.pack(">I", size) + text.encode()):
        assert read_value("text", packed + b"?") == (OK, text.encode(), len(packed))
        assert read_value("utf8", packed + b"?") == (OK, text.encode(), len(packed))
    packed = msgpack.packb(text.encode())
    assert read_value("bin", packed + b"?") == (OK, text.encode(), len(packed))
    packed = msgpack.packb(msgpack.ExtType(5, text.encode()))
    assert read_value("ext", packed + b"?") == (OK, (5, text.encode()), len(packed))
    assert read_value("array", msgpack.packb([0] * size))[:2] == (OK, size)
    assert read_value("map", msgpack.packb(dict.fromkeys(range(size))))[:2] == (OK, size)


@pytest.mark.parametrize(
    ("kind", "header"),
    [
        ("array", b"\xdd\xff\xff\xff\xff"),
        ("array", b"\xdc\xff\xff"),
        ("array", b"\x9f"),
        ("map", b"\xdf\xff\xff\xff\xff"),
        ("map", b"\xde\xff\xff"),
        ("map", b"\x86"),
        ("text", b"\xdb\xff\xff\xff\xff"),
        ("text", b"\xda\xff\xff"),
        ("text", b"\xd9\xff"),
        ("bin", b"\xc6\xff\xff\xff\xff"),
        ("ext", b"\xc9\xff\xff\xff\xff\x01"),
    ],
)
def test_a_length_that_cannot_fit_is_refused_by_its_header(kind: str, header: bytes) -> None:
    assert read_value(kind, header + bytes(11)) == (TRUNCATED, None, 0)
    assert read_value("any", header + bytes(11)) == (TRUNCATED, None, 0)


@given(values, st.binary(max_size=4))
def test_skip_passes_any_value_whole_and_refuses_every_part_of_it(value: object, after: bytes) -> None:
    packed = msgpack.packb(value)
    assert read_value("any", packed + after) == (OK, None, len(packed))
    for end in range(len(packed)):
        assert read_value("any", packed[:end]) == (TRUNCATED, None, 0)


@given(st.binary(max_size=60))
def test_skip_agrees_with_msgpack_about_any_bytes(data: bytes) -> None:
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    try:
        unpacker.skip()
    except (msgpack.OutOfData, ValueError):
        assert read_value("any", data)[0] in (TRUNCATED, WRONG_TYPE)
    else:
        assert read_value("any", data) == (OK, None, unpacker.tell())


def test_skip_follows_64_levels_and_refuses_the_65th_without_recursion() -> None:
    for opening, filling in ((b"\x91", b"\xc0"), (b"\x81\xa1k", b"\xc0"), (b"\xdd\0\0\0\x01", b"\xc2")):
        nested = opening * 64 + filling
        assert read_value("any", nested) == (OK, None, len(nested))
        assert read_value("any", opening * 65 + filling) == (TOO_DEEP, None, 0)
        assert read_value("any", opening * 10_000 + filling) == (TOO_DEEP, None, 0)
    inside = b"\x91" * 64 + b"\x90"  # an empty container is no level
    assert read_value("any", inside) == (OK, None, len(inside))


def test_skip_comes_back_up_and_goes_down_again() -> None:
    deep = b"\x91" * 63 + b"\xc0"
    assert read_value("any", b"\x93" + deep * 3) == (OK, None, 1 + 3 * len(deep))


def is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def utf8_status(data: bytes) -> int:
    return read_value("utf8", b"\xda" + struct.pack(">H", len(data)) + data)[0]


def test_utf8_is_judged_as_python_judges_it_for_every_two_bytes() -> None:
    for pair in range(0x10000):
        data = pair.to_bytes(2, "big")
        assert (utf8_status(data) == OK) is is_utf8(data), data


def test_utf8_is_judged_as_python_judges_it_at_every_limit_of_longer_forms() -> None:
    seconds = (0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xFF)
    for lead in range(0xE0, 0x100):
        for second in seconds:
            for tail in (b"", b"\x80", b"\x80\x80", b"\xbf\xbf", b"\x7f\x80", b"\x80\xc0", b"\x80\x80\x80"):
                for pad in range(9):  # where the eight-byte steps begin and end
                    data = b"x" * pad + bytes([lead, second]) + tail
                    assert (utf8_status(data) == OK) is is_utf8(data), data
                    assert (utf8_status(data + b"y" * 9) == OK) is is_utf8(data + b"y" * 9), data


@given(st.text(max_size=30), st.integers(0, 200), st.integers(0, 255))
def test_utf8_is_judged_as_python_judges_it_with_one_byte_changed(text: str, at: int, byte: int) -> None:
    data = bytearray(text.encode())
    assert utf8_status(bytes(data)) == OK
    if data:
        data[at % len(data)] = byte
        assert utf8_status(bytes(data)) == (OK if is_utf8(bytes(data)) else BAD_TEXT)
