"""Errors about a run's folder that cannot be written."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from flwr_distill.task.errors import ReportedError

_NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
ELSEWHERE = "set runs-dir to a folder in which the server may write"
_OS_ERROR = re.compile(r"\(os error (\d+)\)|Os { code: (\d+)")  # the second of safetensors 0.5


class ResultsError(ReportedError):
    """Results cannot be written."""


@contextmanager
def results_in(folder: Path, way_to_resume: str) -> Iterator[None]:
    """Turn system errors about a run's folder, or about a full disk, into ResultsError.

    The remedy names the setting by which the run can be resumed, if there is one.
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
        problem = f"results cannot be written: {reason}"
        raise ResultsError(problem, where=folder, remedy=remedy) from error


def check_writable(folder: Path) -> None:
    """Raise ResultsError unless a folder exists or can be made, and takes files."""
    existing = next(place for place in (folder, *folder.parents) if os.path.exists(place))
    if not existing.is_dir():
        raise ResultsError("it is no folder", where=existing, remedy=ELSEWHERE)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ResultsError("it cannot be written to", where=existing, remedy=ELSEWHERE)


def _number(error: OSError | SafetensorError) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    match = _OS_ERROR.search(str(error))
    return int(match[1] or match[2]) if match else None


def _is_about(place: str, folder: Path) -> bool:
    path, folder = Path(place).resolve(), folder.resolve()
    return path.is_relative_to(folder) or folder.is_relative_to(path)
