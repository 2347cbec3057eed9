"""Names of auxiliary sets in settings; checked without PyTorch, which takes seconds to import."""

import difflib
import re

from flwr_distill.task.errors import DatasetError

NOISE = "noise"
NAMED = ("cifar100", "fashion-mnist", "tiny-imagenet")
OWN_FILE = re.compile(r"@[\w.-]{1,64}")
"""How a run names a file or folder that each node's owner has given the name (``files``)."""


def check_auxiliary(name: str) -> str:
    """Return the name of an auxiliary set, or the path or ``@NAME`` of one on the nodes."""
    known = (NOISE, *NAMED)
    if name in known or "/" in name or name.endswith(".npz") or OWN_FILE.fullmatch(name):
        return name
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise DatasetError(
        f"choose {', '.join(known)}, the path of a folder of images or .npz file, with a slash in "
        f"it, or @NAME for the file that nodes' owners call so{hint}"
    )
