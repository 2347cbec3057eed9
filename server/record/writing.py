"""Says in one line where results cannot be written, with the remedy."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

_NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
ELSEWHERE = "set runs-dir to a folder in which the server may write"
_OS_ERROR = re.compile(r"\(os error (\d+)\)|Os { code: (\d+)")  # the second of safetensors 0.5


class ResultsError(RuntimeError):
    """Results cannot be written; the message names the run's folder and the remedy."""


@contextmanager
def results_in(folder: Path, way_to_resume: str) -> Iterator[None]:
    """Turn errors of the system about a run's folder, or about a full disk, into ResultsError.

    Their remedy names the setting by which the run can be resumed, if there is one.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number, place = _number(error), getattr(error, "filename", None)
        reason = os.strerror(number) if number else ""
        if number in _NO_ROOM and (place is None or _is_about(place, folder)):
            how = f"continue the run with {way_to_resume}" if way_to_resume else "start a new run"
            remedy = f"make room there, then {how}"
        elif place is not None and _is_about(place, folder):
            remedy = ELSEWHERE
        else:
            raise
        raise ResultsError(f"{folder}: cannot be written: {reason} ({remedy})") from error


def check_writable(folder: Path) -> None:
    """Check that a folder is there or can be made, and that files can be written to it.

    Raises ResultsError if not; names what is in the way.
    """
    there = next(place for place in (folder, *folder.parents) if os.path.exists(place))
    if not there.is_dir():
        raise ResultsError(f"{there} is no folder ({ELSEWHERE})")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ResultsError(f"{there} cannot be written to ({ELSEWHERE})")


def _number(error: OSError | SafetensorError) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = _OS_ERROR.search(str(error))
    return int(found[1] or found[2]) if found else None


def _is_about(place: str, folder: Path) -> bool:
    path, folder = Path(place).resolve(), folder.resolve()
    return path.is_relative_to(folder) or folder.is_relative_to(path)
