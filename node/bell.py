"""A bell between two of a node's processes: one rings, and the other need not poll."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Bell:
    """One end of a pipe, by its file descriptor, which this process inherited."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)

    @staticmethod
    @contextmanager
    def ends() -> Iterator[tuple[int, int]]:
        """Make a bell: descriptors to wait at and to ring; processes that start inherit them."""
        ends = os.pipe()
        try:
            yield ends
        finally:
            for end in ends:
                os.close(end)

    def ring(self) -> None:
        """Wake the process that waits, or have its next wait end at once."""
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._descriptor, b"\0")

    def wait(self, seconds: float) -> None:
        """Wait for so long, or until it rings."""
        rings = select.select([self._descriptor], [], [], seconds)[0]
        if rings and not os.read(self._descriptor, select.PIPE_BUF):
            time.sleep(seconds)  # the other process has ended
