"""Files through which a node's executor and its worker hand each other what is large.

Both have a file open from the start; a note says when there is something in it. The worker's end
may belong to a hostile app: what it wrote is bounded and copied before anything reads it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable

MAX_BYTES = 1 << 32
"""Of all parts that one end hands to the other."""
MAX_PARTS = (1 << 17) + 2
"""A message has 131,072 objects at most."""
MAX_SIZES = 1 << 21
"""Bytes of the list of their sizes."""

_LENGTH = 8


class PayloadError(ValueError):
    """What the other end wrote are not parts."""


class PayloadFile:
    """A file without a name, in memory where the system has such; parts are taken once."""

    def __init__(self, number: int) -> None:
        self._number = number

    @classmethod
    def create(cls) -> PayloadFile:
        """Make one; a child that is to use it needs its file descriptor."""
        if hasattr(os, "memfd_create"):  # containers bound /dev/shm, but not this
            return cls(os.memfd_create("payload"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def fileno(self) -> int:
        """File descriptor."""
        return self._number

    def close(self) -> None:
        """Close this end; a closed one stays closed."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def put(self, parts: Iterable[bytes]) -> None:
        """Replace what is in the file, by one part after the other; OSError if there is no room."""
        os.ftruncate(self._number, 0)
        sizes, place = list[int](), 0
        for part in parts:
            place = _write(self._number, part, place)
            sizes.append(len(part))
        end = json.dumps(sizes).encode()
        _write(self._number, end + len(end).to_bytes(_LENGTH, "big"), place)

    def take(self) -> list[bytes]:
        """Take what is in the file, and empty it; PayloadError if these are not parts."""
        try:
            return self._parts()
        finally:
            os.ftruncate(self._number, 0)

    def _parts(self) -> list[bytes]:
        if (size := os.fstat(self._number).st_size) > MAX_BYTES:
            raise PayloadError(f"{size:,} bytes, over {MAX_BYTES:,}")
        if (end := size - _LENGTH) < 0:
            raise PayloadError("it ends early")
        length = int.from_bytes(_read(self._number, _LENGTH, end), "big")
        if length > (most := min(MAX_SIZES, end)):
            raise PayloadError(f"a list of sizes of {length:,} bytes, over {most:,}")
        try:
            sizes = json.loads(_read(self._number, length, end - length))
        except (ValueError, RecursionError):
            raise PayloadError("a list of sizes that is not JSON") from None
        if not isinstance(sizes, list) or not all(type(n) is int and n >= 0 for n in sizes):
            raise PayloadError("sizes that are no numbers")
        if len(sizes) > MAX_PARTS:
            raise PayloadError(f"{len(sizes):,} parts, over {MAX_PARTS:,}")
        if sum(sizes) != end - length:
            raise PayloadError(f"{end - length:,} bytes, but parts of {sum(sizes):,}")
        parts, place = [], 0
        for part in sizes:
            parts.append(_read(self._number, part, place))
            place += part
        return parts


def _write(number: int, content: bytes, place: int) -> int:
    """Write at a place; return the place behind. The offset of the file is shared, so not used."""
    left = memoryview(content)
    while left:
        written = os.pwrite(number, left, place)
        left, place = left[written:], place + written
    return place


def _read(number: int, size: int, place: int) -> bytes:
    content = os.pread(number, size, place)
    while len(content) < size:  # one call reads at most 2 GiB
        if not (more := os.pread(number, size - len(content), place + len(content))):
            raise PayloadError("it ends early")
        content += more
    return content
