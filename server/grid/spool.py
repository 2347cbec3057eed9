"""Stores many nodes' models on disk until they are averaged."""

import math
import tempfile
import weakref
from functools import cached_property
from typing import IO

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from flwr_distill.protocol.arrays import DecodedArray, as_arrays, decode
from flwr_distill.task.errors import ReportedError

IN_MEMORY = 64 * 2**20
"""Bytes of a phase's arrays that stay in memory."""


class SpoolError(ReportedError):
    """The temporary folder has no room for a round's models."""


class Spool:
    """Keeps the arrays of a phase's replies in memory up to a size, then in a file.

    The file is temporary and unnamed, and goes with the last of its arrays or with the process.
    """

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._memory_left = in_memory

    def keep(self, content: RecordDict) -> None:
        """Decode a reply's arrays; those stored in the file become `StoredArray`.

        Raises ValueError if bytes are no array of numbers, and SpoolError if the disk is full.
        """
        for record in content.array_records.values():
            decode(record)
            self._memory_left -= sum(array.nbytes for array in as_arrays(record).values())
            if self._memory_left < 0:
                for name, array in as_arrays(record).items():
                    record[name] = StoredArray(array, self)

    def write(self, data: bytes) -> int:
        """Append data to the file; return their offset."""
        offset = self._file.seek(0, 2)
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise SpoolError(
                f"no room for the models that nodes sent: {error}",
                where=tempfile.gettempdir(),
                remedy="set TMPDIR to a folder with room for all models of a round",
            ) from error
        return offset

    def read(self, offset: int, size: int) -> bytes:
        """Data of the file."""
        self._file.seek(offset)
        return self._file.read(size)

    @cached_property
    def _file(self) -> IO[bytes]:
        file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by the finalizer)
        weakref.finalize(self, file.close)
        return file


class StoredArray(DecodedArray):
    """A decoded array whose values are read from the spool's file each time."""

    def __init__(self, values: NDArray[np.generic], spool: Spool) -> None:
        super().__init__(values)
        del self._values
        self._spool = spool
        self._type = values.dtype
        self._offset = spool.write(values.tobytes())

    @property
    def values(self) -> NDArray[np.generic]:
        """The values, read-only."""
        size = self._type.itemsize * math.prod(self.shape)
        return np.frombuffer(self._spool.read(self._offset, size), self._type).reshape(self.shape)


StoredArray.__qualname__ = DecodedArray.__qualname__  # Flower writes it into messages
