"""Ends a command with one line on standard error and exit status 1."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer


def fail(error: Exception | str, command: str = "") -> NoReturn:
    """Print an error, in red on a terminal, and exit with 1."""
    typer.secho(f"{f'flwr-distill {command}'.strip()}: {error}", err=True, fg="red")
    raise typer.Exit(1)


@contextmanager
def exit_on(*errors: type[Exception], command: str = "") -> Iterator[None]:
    """Turn these errors into one line and exit status 1."""
    try:
        yield
    except errors as error:
        fail(error, command)
