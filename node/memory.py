"""What the C library does with memory that was freed."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Names of glibc's, for `mallopt`."""
KEPT, LARGE = 1 << 30, 64 << 20
"""Bytes: the most that is kept, and the least of a block that is never kept."""


def keep_freed() -> None:
    """Have freed memory kept for what is allocated next, where the C library is glibc.

    It gives blocks of tensors back to the system and asks for new ones, minibatch after minibatch,
    which all have to be filled with zeros first: on a CPU a fifth to nearly half of the time of
    training convolutions (``benchmarks.freed_memory``).
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(TRIM_THRESHOLD, KEPT)
        mallopt(MMAP_THRESHOLD, LARGE)


def give_freed_back() -> None:
    """Give back to the system what was kept."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
