"""Lossless packing of what nodes send, undone only up to a size that is known beforehand."""

import io
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
"""Bytes that are unpacked at a time."""


def packed(data: bytes) -> bytes:
    """Pack with LZMA2, without a header; equal data give equal bytes."""
    return lzma.compress(data, lzma.FORMAT_RAW, filters=_FILTERS)


def max_packed_size(size: int) -> int:
    """Most bytes that `size` bytes take when they are packed."""
    return size + size // 2**10 + 64


def unpacked(data: bytes, most: int) -> bytes:
    """Undo `packed`; raise VirtualDataError if `data` is malformed or exceeds `most` bytes."""
    content = io.BytesIO()
    for part in unpacked_parts(data, most):
        content.write(part)
    return content.getvalue()


def unpacked_parts(data: bytes, most: int) -> Iterator[bytes]:
    """Undo `packed`, at most 1 MiB at a time, in a few MB of memory; see `unpacked`."""
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_FILTERS)
    rest, size = memoryview(data), 0
    while not decompressor.eof:
        piece = rest[:_PART] if decompressor.needs_input else b""
        require(bool(piece) or not decompressor.needs_input, "ends too early")
        rest = rest[len(piece) :]
        try:
            part = decompressor.decompress(piece, _PART)
        except lzma.LZMAError as error:
            raise VirtualDataError(
                f"not packed by LZMA2 ({error})", where="virtual data"
            ) from error
        size += len(part)
        require(size <= most, f"exceeds {most} bytes when unpacked")
        if part:
            yield part
    require(not rest and not decompressor.unused_data, "ends too late")
