"""Calls of kernel and C library; without effect where a system has none."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Names of glibc's, for `mallopt`."""
KEPT, LARGE = 1 << 30, 64 << 20
"""Bytes: the most that is kept, and the least of a block that is never kept."""


def die_with(parent: int) -> None:
    """Get SIGTERM when the parent dies; exit if that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    else:
        print(
            f"flwr-distill: {sys.platform} does not end a process with its parent: after kill -9 "
            f"of process {parent}, end process {os.getpid()} by hand",
            file=sys.stderr,
            flush=True,
        )
    if os.getppid() != parent:
        sys.exit("the parent process has ended")


def keep_freed() -> None:
    """Have glibc keep freed memory for what is allocated next.

    Blocks of tensors would go back to the system and return, zeroed, with each minibatch: up to
    half of the time of training convolutions on a CPU (``benchmarks.freed_memory``).
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(TRIM_THRESHOLD, KEPT)
        mallopt(MMAP_THRESHOLD, LARGE)


def trim_heap() -> None:
    """Give the system back what this process has freed: glibc keeps it, for each thread."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def name_process(name: str) -> None:
    """Name this process, as ``ps`` and ``top`` show it; at most 15 characters."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode())
