"""Names of auxiliary sets in settings; checked without PyTorch, which takes seconds to import."""

import difflib

from task.errors import DatasetError

NOISE = "noise"
NAMED = ("fashion-mnist", "tiny-imagenet")


def check_auxiliary(name: str) -> str:
    """Return the name of an auxiliary set, or the path of one, which need not exist here.

    Raises
    ------
    DatasetError
        If it is neither.
    """
    known = (NOISE, *NAMED)
    if name in known or "/" in name or name.endswith(".npz"):
        return name
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise DatasetError(
        f"choose {', '.join(known)}, or the path of a folder of images or .npz file, with a slash "
        f"in it{hint}"
    )
