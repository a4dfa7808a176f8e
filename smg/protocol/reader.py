"""A message read value by value, each under the name of its column: what reference decoders are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from smg._decoded import MAX_DEPTH
from smg.errors import DecodeError


class Reader:
    """The first part of a message, read in order. Whatever is refused raises `DecodeError` with the column."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self.parts = parts
        self.frame = parts[0]
        self.end = len(self.frame)  # where what is read now has to end
        self.aux_left = sum(map(len, parts[1:]))  # bytes of parts that nothing has referred to yet
        # Text that is not UTF-8 comes with surrogates in it, to be refused where text is meant.
        self.unpacker = msgpack.Unpacker(
            unicode_errors="surrogateescape", strict_map_key=False, max_buffer_size=max(1, len(self.frame))
        )
        self.unpacker.feed(self.frame)

    @property
    def at(self) -> int:
        position: int = self.unpacker.tell()
        return position

    @property
    def left(self) -> int:
        return self.end - self.at

    def value(self, column: str) -> Any:
        return self._read(column, self.unpacker.unpack)

    def array(self, column: str) -> int:
        """The length of an array whose elements come next."""
        return self._header(column, self.unpacker.read_array_header, 1)

    def map(self, column: str) -> int:
        """The length of a map whose keys and values come next in turn."""
        return self._header(column, self.unpacker.read_map_header, 2)

    def nil(self) -> bool:
        """True, and past it, when the next value is nil."""
        if self.lead() != 0xC0:
            return False
        self.unpacker.skip()
        return True

    def next_is_text(self) -> bool:
        lead = self.lead()
        return 0xA0 <= lead <= 0xBF or 0xD9 <= lead <= 0xDB

    def next_is_map(self) -> bool:
        lead = self.lead()
        return 0x80 <= lead <= 0x8F or 0xDE <= lead <= 0xDF

    def next_is_array(self) -> bool:
        lead = self.lead()
        return 0x90 <= lead <= 0x9F or 0xDC <= lead <= 0xDD

    def lead(self) -> int:
        """The next value's first byte; at the end of the frame that of an integer, which reading refuses."""
        return self.frame[self.at] if self.left else 0

    def skip(self, column: str) -> None:
        """Past one well-formed value."""
        pending = [1]  # values still to come at each level
        while pending:
            pending[-1] -= 1
            children = 0
            if self.next_is_array():
                children = self.array(column)
            elif self.next_is_map():
                children = 2 * self.map(column)
            else:
                self._read(column, self.unpacker.skip)
            if children:
                if len(pending) > MAX_DEPTH:
                    raise DecodeError(f"{column} is nested deeper than {MAX_DEPTH} levels", column)
                pending.append(children)
            while pending and pending[-1] == 0:
                pending.pop()

    def _header(self, column: str, how: Callable[[], int], unit: int) -> int:
        count: int = self._read(column, how)
        if count * unit > self.left:
            raise DecodeError(f"{column} has {count} entries in {self.left} bytes", column)
        return count

    def _read(self, column: str, how: Callable[[], Any]) -> Any:
        try:
            value = how()
        except Exception as error:  # msgpack's own kinds, and ValueError and TypeError of Python's
            raise DecodeError(f"{column} is malformed: {str(error) or type(error).__name__}", column) from None
        if self.at > self.end:
            raise DecodeError(f"{column} goes on past byte {self.end}, where it has to end", column)
        return value
