"""What a process asks the kernel about itself; on systems other than Linux nothing happens."""

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
    if os.getppid() != parent:
        sys.exit("the parent process has ended")


def name_process(name: str) -> None:
    """Name this process, as ``ps`` and ``top`` show it; at most 15 characters."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode())
