"""Models of many nodes, which wait on disk for the moment when they are averaged."""

import tempfile
import weakref
from functools import cached_property
from typing import IO

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from protocol.arrays import DecodedArray, decode

IN_MEMORY = 64 * 2**20
"""Bytes of a phase's arrays that stay in memory."""


class Spool:
    """Keeps the arrays of a phase's replies: in memory, and from some size on in a file.

    The file is temporary and nameless: it goes with the last of its arrays, or with the process.

    Parameters
    ----------
    in_memory : int (default: 64 MiB)
        Bytes of arrays above which further replies go to the file.
    """

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._left = in_memory

    def keep(self, content: RecordDict) -> None:
        """Decode a reply's arrays; those that go to the file become `StoredArray`.

        Raises
        ------
        ValueError
            If the bytes of an array are not those of an array of numbers.
        OSError
            If the disk is full.
        """
        for record in content.array_records.values():
            decode(record)
            self._left -= sum(array.numpy().nbytes for array in record.values())
            if self._left < 0:
                for name, array in list(record.items()):
                    record[name] = StoredArray(array.numpy(), self)

    def write(self, data: bytes) -> int:
        """Append data to the file, and return where they begin.

        Raises
        ------
        OSError
            If the disk is full.
        """
        begin = self._file.seek(0, 2)
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise OSError(
                f"no room for the models that nodes sent, in {tempfile.gettempdir()}: {error} "
                "(have TMPDIR name a folder with room for all of a round)"
            ) from error
        return begin

    def read(self, begin: int, size: int) -> bytes:
        """Data of the file."""
        self._file.seek(begin)
        return self._file.read(size)

    @cached_property
    def _file(self) -> IO[bytes]:
        file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the spool)
        weakref.finalize(self, file.close)
        return file


class StoredArray(DecodedArray):
    """A decoded array whose values lie in a file; they are read each time they are asked for.

    Parameters
    ----------
    values : ndarray
        What to store.
    spool : Spool
        Where.
    """

    def __init__(self, values: NDArray[np.generic], spool: Spool) -> None:
        super().__init__(values)
        del self._values
        self._spool = spool
        self._type = values.dtype
        self._begin = spool.write(values.tobytes())

    def numpy(self) -> NDArray[np.generic]:
        """The values, read-only."""
        size = self._type.itemsize * int(np.prod(self.shape, dtype=np.int64))
        return np.frombuffer(self._spool.read(self._begin, size), self._type).reshape(self.shape)


StoredArray.__qualname__ = DecodedArray.__qualname__
