"""`flwr-distill data check`: check a node's own data before a run uses them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flwr_distill.cli.errors import exit_on, fail
from flwr_distill.cli.options import run_config_option

if TYPE_CHECKING:
    from flwr_distill.task.settings import PrivateSettings, RunConfigValue

data = typer.Typer(help="Check a node's own data before a run uses them.")


@data.callback()
def _group() -> None:
    """Without a callback, typer would make the only subcommand the command itself."""


@data.command()
def check(
    path: Annotated[
        Path, typer.Argument(help="Images by class (see docs/data.md), .npz, .csv or .parquet.")
    ],
    run_config: Annotated[
        list[str] | None,
        run_config_option(
            'Settings of a run for tables, as in \'private.columns="age,sex:f|m" '
            'private.label="ill" private.classes="no,yes"\'; or its TOML file. Can be repeated.'
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 on any finding.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/data-check"),
) -> None:
    """Show a node's data, and what a run would skip or refuse.

    Counts images of each class, with their sizes and modes. Finds unreadable files, strays (other
    files, or images in the wrong place), duplicates, and conflicts: the same image in two classes.
    A run skips unreadable files and strays with a warning. Links are followed, hidden files
    ignored.

    With -c, a table (.csv or .parquet) is read as by a node with --data PATH. Each column of the
    run is shown with its values, missing and wrong ones, categories and range. Without -c, a CSV
    file is read as train.csv of a data set: numbers, and a column label. A run refuses a table with
    unusable rows, values too large to standardise, or another unit than in its settings. Columns
    with a single value are reported.

    Images are read as in a run: EXIF orientation applied, transparency put on white, more than 8
    bits scaled to 0 to 1, DICOM shown by its window. The check counts these, and shows the range of
    all pixels. It writes the first images of each class (classes.png) and all findings
    (findings.csv) to OUTPUT. Exits with 1 if a run would refuse the data.
    """
    # Here, because every subcommand imports this file, and the node command must not import torch.
    from flwr_distill.cli.data_check import check_data, refusal
    from flwr_distill.fleet.run_config import RunConfigError
    from flwr_distill.task.errors import DatasetError, SettingsError

    errors = (DatasetError, OSError, RunConfigError, SettingsError)
    with exit_on(*errors, command="data check"):
        private = _private_settings(run_config) if run_config else None
        data_survey = check_data(path, output, Console(), private)
    if reason := refusal(data_survey, strict=strict):
        fail(f"{path}: {reason}", "data check")


def _private_settings(texts: list[str]) -> "PrivateSettings":
    from flwr_distill.fleet.run_config import read_run_config
    from flwr_distill.task.errors import SettingsError
    from flwr_distill.task.settings import TaskSettings
    from flwr_distill.task.survey import STATE_COLUMNS

    overrides: dict[str, RunConfigValue] = {}
    for text in texts:
        overrides |= read_run_config(text)
    private = TaskSettings.from_run_config(overrides).private
    if private.table is None:
        problem = f"is not set: {STATE_COLUMNS}"
        raise SettingsError(problem, where="private.columns", source="run config")
    return private
