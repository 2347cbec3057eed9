"""What virtual data say of themselves, read without the images."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from flwr_distill.distill.errors import require
from flwr_distill.distill.packing import unpacked_parts
from flwr_distill.distill.virtual_header import MAX_BYTES, MAX_HEADER, MAX_LABEL, Header

_CHUNK = 2**20


@dataclass(frozen=True)
class Overview:
    """What virtual data say of themselves: all but the images.

    `labels` are those of the classes shown, in order, `images_of_class` the images of each, small
    ones (`distill.formation`) counted singly.
    """

    method: str
    init: str
    labels: tuple[int, ...]
    images_of_class: tuple[int, ...]

    @classmethod
    def of(cls, data: bytes, most: int = MAX_BYTES) -> Self:
        """Read the output of `VirtualData.to_bytes` in a few MB of memory, however large it is.

        All of `data` is checked but the soft labels' numbers, which any reader checks. Raises
        `VirtualDataError` if it is malformed, or larger than `most` bytes unpacked.
        """
        content = _Stream(unpacked_parts(data, most))
        size = content.read(8)
        text = content.read(min(int.from_bytes(size, "little"), MAX_HEADER))
        header = Header.read(size + text)
        counts = np.zeros(MAX_LABEL + 1, np.int64)
        for name, num_bytes in header.spans:
            for begin in range(0, num_bytes, _CHUNK):
                part = content.read(min(_CHUNK, num_bytes - begin))
                if name == "labels":
                    labels = np.frombuffer(part, "<i2")
                    require(labels.min() >= 0, f"must lie in [0, {MAX_LABEL}]", where="labels")
                    counts += np.bincount(labels, minlength=len(counts))
        content.end()
        shown = counts.nonzero()[0]
        images = counts[shown] * header.formation**2
        return cls(header.method, header.init, tuple(shown.tolist()), tuple(images.tolist()))


class _Stream:
    """Reads parts of any size as bytes of requested sizes."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._rest = b""

    def read(self, size: int) -> bytes:
        """Exactly so many bytes."""
        read = [self._rest]
        missing = size - len(self._rest)
        while missing > 0:
            part = next(self._parts, b"")
            require(bool(part), "ends too early")
            read.append(part)
            missing -= len(part)
        content = b"".join(read)
        self._rest = content[size:]
        return content[:size]

    def end(self) -> None:
        """Check that all was read, to the last part."""
        require(not self._rest and not any(self._parts), "ends too late")
