"""Remedies for errors whose texts have none, in a node's log and in its replies.

Workers import this: no module of another room.
"""

import errno

KILLED = (
    "was it out of memory? The system's log says so, `dmesg`: give this machine more, or lower "
    "train.batch-size"
)
"""For a process that ended by SIGKILL, which is what the kernel sends when memory is used up."""


def explained(error: Exception) -> str:
    """An error's text, with a remedy where the environment is to blame."""
    remedy = _remedy(error)
    return f"{error} ({remedy})".strip() if remedy else str(error)


def _remedy(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "install it for this node's Python, and restart the node"
    if isinstance(error, MemoryError):
        return "this machine's memory is used up: give it more, or lower train.batch-size"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room on the node's disk"
    return ""
