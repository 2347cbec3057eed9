"""Lossless packing of what nodes send, undone only up to a size that is known beforehand."""

import lzma
from collections.abc import Iterator

from flwr_distill.distill.errors import VirtualDataError, require

_FILTERS = [
    {
        "id": lzma.FILTER_LZMA2,
        "dict_size": 2**20,
        "lc": 4,  # a pixel's code depends on the upper bits of the pixel before it
        "lp": 0,
        "pb": 0,
        "mode": lzma.MODE_NORMAL,
        "mf": lzma.MF_BT4,
        "nice_len": 64,
        "depth": 0,
    }
]

_PART = 2**20
"""Bytes that are packed or unpacked at a time."""


def packed(data: bytes) -> bytes:
    """Pack with LZMA2, without a header of its own; equal data give equal bytes."""
    return lzma.compress(data, lzma.FORMAT_RAW, filters=_FILTERS)


def most_packed(size: int) -> int:
    """Most bytes that `size` bytes take when they are packed."""
    return size + size // 2**10 + 64


def unpacked(data: bytes, most: int) -> bytes:
    """Undo `packed`, in at most `most` bytes of memory and 1 MB; VirtualDataError if malformed."""
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_FILTERS)
    try:
        content = decompressor.decompress(data, most + 1)
    except lzma.LZMAError as error:
        raise VirtualDataError(f"not virtual data ({len(data)} bytes): {error}") from error
    require(len(content) <= most, f"virtual data of more than {most} bytes when unpacked")
    whole = decompressor.eof and not decompressor.unused_data
    require(whole, f"not virtual data ({len(data)} bytes): they end too early or too late")
    return content


def unpacked_parts(data: bytes, most: int) -> Iterator[bytes]:
    """Undo `packed`, at most 1 MiB at a time; takes a few MB, however large the content is."""
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_FILTERS)
    rest, size = memoryview(data), 0
    while not decompressor.eof:
        given = rest[:_PART] if decompressor.needs_input else b""
        ends = decompressor.needs_input and not given
        require(not ends, f"not virtual data ({len(data)} bytes): they end too early")
        rest = rest[len(given) :]
        try:
            part = decompressor.decompress(given, _PART)
        except lzma.LZMAError as error:
            raise VirtualDataError(f"not virtual data ({len(data)} bytes): {error}") from error
        size += len(part)
        require(size <= most, f"virtual data of more than {most} bytes when unpacked")
        if part:
            yield part
    whole = not rest and not decompressor.unused_data
    require(whole, f"not virtual data ({len(data)} bytes): they end too late")
