"""A command's errors: one line on standard error and exit status 1."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from flwr_distill.task.errors import ReportedError

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room there"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "let this user write or read there"),
}


def fail(error: Exception | str, command: str = "", **fields: object) -> NoReturn:
    """Print an error, in red on a terminal, and exit with 1.

    `fields` are those of a `ReportedError`, of which `error` is then the problem.
    """
    if fields:
        error = ReportedError(str(error), **fields)  # type: ignore[arg-type]
    text = _about_file(error) if isinstance(error, OSError) and error.strerror else error
    typer.secho(f"{f'flwr-distill {command}'.strip()}: {text}", err=True, fg="red")
    raise typer.Exit(1)


@contextmanager
def exit_on(*errors: type[Exception], command: str = "") -> Iterator[None]:
    """Turn these errors into one line and exit status 1."""
    try:
        yield
    except errors as error:
        fail(error, command)


class FileErrors(TyperGroup):
    """A command that ends with one line where a file cannot be read or written."""

    def invoke(self, context: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(context)
        except OSError as error:
            if error.filename is None and error.errno not in _REMEDIES:
                raise  # of a connection, or a closed pipe
            fail(error)


def _about_file(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    remedy = _REMEDIES.get(error.errno or 0, "check the path")
    return f"{place}{error.strerror} ({remedy}, or name another place)"
