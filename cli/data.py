"""`flwr-distill data`: look at a node's own data before a run does."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cli.errors import exit_on, fail

data = typer.Typer(help="Look at a node's own data before a run does.")


@data.callback()
def _group() -> None:
    """Make `check` a subcommand although it is the only one."""


@data.command()
def check(
    path: Annotated[
        Path, typer.Argument(help="Images by class (see docs/data.md), .npz or .csv file.")
    ],
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 if anything at all is wrong.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/data-check"),
) -> None:
    """Show what a node's data hold, and what a run would skip or refuse.

    Counts images of each class, with their sizes and modes, and finds files that cannot be read,
    strays (files that are no images, or lie in the wrong place), duplicates, and conflicts: the
    same image in two classes. A run skips what cannot be read, and strays, with a warning. Links
    are followed, hidden files are ignored. Of a CSV file, rows and columns are checked; a run
    refuses a table with unusable rows or with values too large to standardise. Columns with one
    value are reported.

    Images are read as in a run: EXIF orientation applied, transparency put on white, more than 8
    bits scaled to 0 to 1, DICOM shown by its window. The check counts these, and shows the range of
    all pixels. It writes a picture with the first images of each class as read (classes.png) and
    all that is wrong (findings.csv) to OUTPUT. Exits with 1 if a run would refuse the data.
    """
    # Here, because every subcommand imports this file, and the node command must not import torch.
    from cli.data_check import look_through, refusal
    from task.errors import DatasetError

    with exit_on(DatasetError, OSError, command="data check"):
        found = look_through(path, output, Console())
    if reason := refusal(found, strict=strict):
        fail(f"{path}: {reason}", "data check")
