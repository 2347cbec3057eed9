"""What a process asks kernel and C library for; systems other than Linux have none of it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


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


def trim_heap() -> None:
    """Give the system back what this process has freed: glibc keeps it, for each thread."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def name_process(name: str) -> None:
    """Name this process, as ``ps`` and ``top`` show it; at most 15 characters."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode())
