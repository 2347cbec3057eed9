"""`flwr-distill data check` and `partition`: the data of nodes before a run uses them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flwr_distill.cli.errors import exit_on, fail
from flwr_distill.cli.options import DataRoot, Seed, run_config_option

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from flwr_distill.task.settings import PrivateSettings, RunConfigValue

MAX_COLUMNS = 20
"""With more classes, the table of a partition shows only their number on a node."""

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


def _private_settings(texts: list[str]) -> PrivateSettings:
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


def partition(
    scheme: Annotated[str, typer.Argument()] = "pathological",
    dataset: Annotated[
        str, typer.Option(help="Data set by name, or package.module:function.")
    ] = "digits",
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 10,
    classes: Annotated[
        int,
        typer.Option(
            min=0,
            help="Classes (or shards) of a node; 0: as few as cover all, but at least 2.",
        ),
    ] = 0,
    alpha: Annotated[
        float, typer.Option(help="Concentration of dirichlet, exponent of pareto.")
    ] = 0.5,
    clusters: Annotated[
        str,
        typer.Option(
            help="Ratio of the clusters' numbers of nodes; class-pairs: percentages.",
            show_default="12:5:3, or 6:1:1:1:1 for cluster-bc and cluster-uc",
        ),
    ] = "",
    samples: Annotated[
        str,
        typer.Option(
            help="Mean samples of a node of class-pairs, or of each cluster, as in 104:5000."
        ),
    ] = "",
    spread: Annotated[
        float, typer.Option(help="Standard deviation of class-pairs, as a share of that mean.")
    ] = 0.0,
    index_file: Annotated[
        Path | None, typer.Option(help="JSON file: client id -> list of sample indices.")
    ] = None,
    max_of_a_class: Annotated[
        int, typer.Option(min=0, help="Samples of each class that are split at most; 0: all.")
    ] = 0,
    reserved: Annotated[int, typer.Option(min=0, help="Samples that no node gets.")] = 0,
    seed: Seed = 0,
    data_root: DataRoot = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot a dot for each class on each node (PNG, PDF ...).")
    ] = None,
) -> None:
    """Show how many samples of each class every node of a run would have.

    SCHEME is pathological, dirichlet, shards, iid, pareto, cluster-mc, cluster-bc, cluster-uc,
    class-pairs, pareto-draws or index-file. Options are those of the run config's `partition.*`. A
    run with the same data set, number of nodes and seed gets the same partition.
    """
    # Here, because every subcommand imports this file, and the node command must not import torch.
    import numpy as np

    from flwr_distill.task.partition.picture import partition_picture
    from flwr_distill.task.settings import TaskSettings
    from flwr_distill.task.source import data_spec, partition_samples

    with exit_on(ValueError, OSError, command="partition"):
        settings = TaskSettings.from_run_config(
            {
                "dataset": dataset,
                "data-root": str(data_root or ""),
                "seed": seed,
                "partition.scheme": scheme,
                "partition.classes": classes,
                "partition.alpha": alpha,
                "partition.clusters": clusters,
                "partition.samples": samples,
                "partition.spread": spread,
                "partition.index-file": str(index_file or ""),
                "partition.max-of-a-class": max_of_a_class,
                "partition.reserved": reserved,
            }
        )
        names = data_spec(settings).class_names
        parts = (partition_samples(settings, node, nodes).labels for node in range(nodes))
        counts = np.array([np.bincount(labels, minlength=len(names)) for labels in parts])
        Console().print(_table(counts, names))
        if plot is not None:
            title = f"{dataset}, {scheme}: {counts.sum():,} samples on {nodes} nodes"
            partition_picture(counts, title).savefig(plot, dpi=120)
            typer.echo(f"Written to {plot}")


def _table(counts: NDArray[np.int64], names: Sequence[str]) -> Table:
    by_class = len(names) <= MAX_COLUMNS
    table = Table(title="Samples of each class on each node")
    classes = map(escape, names) if by_class else ["classes"]
    table.add_column("node")
    for name in (*classes, "samples"):
        table.add_column(name, justify="right", overflow="fold")

    def add(name: str, row: NDArray[np.int64]) -> None:
        cells = [str(count or "") for count in row] if by_class else [str((row > 0).sum())]
        table.add_row(name, *cells, str(row.sum()))

    for node, row in enumerate(counts):
        add(str(node), row)
    table.add_section()
    add("all", counts.sum(axis=0))
    return table
