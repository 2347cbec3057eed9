"""What virtual data say of themselves, read without the images."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from flwr_distill.distill.errors import VirtualDataError, require
from flwr_distill.distill.packing import unpacked_parts
from flwr_distill.distill.virtual_header import (
    LARGEST,
    LARGEST_HEADER,
    MAX_LABEL,
    Making,
    read_about,
    read_header,
    require_formation,
    spans,
)

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
    def of(cls, data: bytes, most: int = LARGEST) -> Self:
        """Read the output of `VirtualData.to_bytes` in a few MB of memory, however large it is.

        All of `data` is checked but the soft labels' numbers, which any reader checks: nothing that
        has no place in virtual data passes. Raises `VirtualDataError` if it is malformed, or larger
        than `most` bytes unpacked.
        """
        content = _Stream(unpacked_parts(data, most))
        size = content.read(8)
        text = content.read(min(int.from_bytes(size, "little"), LARGEST_HEADER))
        try:
            header = read_header(size + text)
            about = read_about(header)
            tensors = spans(header)
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise VirtualDataError(f"not virtual data ({len(data)} bytes): {error!r}") from error
        written = json.dumps(header, separators=(",", ":")).encode()
        plain = text == written.ljust(-(-len(written) // 8) * 8)
        require(plain, "the header is not as safetensors writes it")
        made = Making.of(header, about)
        require_formation(made.formation, header["pixels"]["shape"][1:])
        counts = np.zeros(MAX_LABEL + 1, np.int64)
        for name, num_bytes in tensors:
            for part in content.parts(num_bytes):
                if name == "labels":
                    labels = np.frombuffer(part, "<i2")
                    require(labels.min() >= 0, f"labels must lie in [0, {MAX_LABEL}]")
                    counts += np.bincount(labels, minlength=len(counts))
        content.end()
        shown = counts.nonzero()[0]
        images = counts[shown] * made.formation**2
        return cls(made.method, made.init, tuple(shown.tolist()), tuple(images.tolist()))


class _Stream:
    """Reads parts of any size as bytes of the sizes that are asked for."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._rest = b""

    def read(self, size: int) -> bytes:
        """Exactly so many bytes."""
        found = [self._rest]
        missing = size - len(self._rest)
        while missing > 0:
            part = next(self._parts, b"")
            require(bool(part), "virtual data that end too early")
            found.append(part)
            missing -= len(part)
        content = b"".join(found)
        self._rest = content[size:]
        return content[:size]

    def parts(self, size: int) -> Iterator[bytes]:
        """So many bytes in parts of an even size."""
        for begin in range(0, size, _CHUNK):
            yield self.read(min(_CHUNK, size - begin))

    def end(self) -> None:
        """Check that all was read, to the last part."""
        require(not self._rest and not any(self._parts), "virtual data that end too late")
