"""`flwr-distill data`: look at a node's own data before a run does."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flwr_distill.cli.errors import exit_on, fail
from flwr_distill.cli.options import run_config_option

if TYPE_CHECKING:
    from flwr_distill.task.settings import PrivateSettings, RunConfigValue

data = typer.Typer(help="Look at a node's own data before a run does.")


@data.callback()
def _group() -> None:
    """Make `check` a subcommand although it is the only one."""


@data.command()
def check(
    path: Annotated[
        Path, typer.Argument(help="Images by class (see docs/data.md), .npz, .csv or .parquet.")
    ],
    run_config: Annotated[
        list[str] | None,
        run_config_option(
            'What a run states of tables, as in \'private.columns="age,sex:f|m" '
            'private.label="ill" private.classes="no,yes"\'; or its TOML file. Can be repeated.'
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 if anything at all is wrong.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/data-check"),
) -> None:
    """Show what a node's data hold, and what a run would skip or refuse.

    Counts images of each class, with their sizes and modes, and finds files that cannot be read,
    strays (files that are no images, or lie in the wrong place), duplicates, and conflicts: the
    same image in two classes. A run skips what cannot be read, and strays, with a warning. Links
    are followed, hidden files are ignored.

    With -c, a table (.csv or .parquet) is read as by a node with --data PATH: the columns that the
    run states, each with its values, missing and wrong ones, categories and range. Without -c, a
    CSV file is read as train.csv of a data set: numbers, and a column label. A run refuses a table
    with unusable rows, values too large to standardise, or another unit than it states. Columns
    with one value are reported.

    Images are read as in a run: EXIF orientation applied, transparency put on white, more than 8
    bits scaled to 0 to 1, DICOM shown by its window. The check counts these, and shows the range of
    all pixels. It writes a picture with the first images of each class as read (classes.png) and
    all that is wrong (findings.csv) to OUTPUT. Exits with 1 if a run would refuse the data.
    """
    # Here, because every subcommand imports this file, and the node command must not import torch.
    from flwr_distill.cli.data_check import look_through, refusal
    from flwr_distill.fleet.run_config import RunConfigError
    from flwr_distill.task.errors import DatasetError, SettingsError

    errors = (DatasetError, OSError, RunConfigError, SettingsError)
    with exit_on(*errors, command="data check"):
        private = _private_settings(run_config) if run_config else None
        found = look_through(path, output, Console(), private)
    if reason := refusal(found, strict=strict):
        fail(f"{path}: {reason}", "data check")


def _private_settings(texts: list[str]) -> "PrivateSettings":
    """What a run states of tables, by its own settings."""
    from flwr_distill.fleet.run_config import read_run_config
    from flwr_distill.task.errors import SettingsError
    from flwr_distill.task.settings import (
        TaskSettings,
    )
    from flwr_distill.task.survey import STATE_COLUMNS

    overrides: dict[str, RunConfigValue] = {}
    for text in texts:
        overrides |= read_run_config(text)
    private = TaskSettings.from_run_config(overrides).private
    if private.table is None:
        raise SettingsError(f"run config: private.columns is not set: {STATE_COLUMNS}")
    return private
