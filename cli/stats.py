"""`flwr-distill stats`: what nodes hold, and on which a run would fail, without training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flwr_distill.cli.connection import SuperLinkOptions, Timeout, with_superlink
from flwr_distill.cli.errors import exit_on
from flwr_distill.cli.options import run_config_option
from flwr_distill.cli.run import are_here, run_to_its_end
from flwr_distill.cli.run_folders import DEFAULT_RUNS_DIR, RunsDir
from flwr_distill.cli.run_log import print_table
from flwr_distill.fleet.run_config import RunConfigError
from flwr_distill.fleet.run_settings import checked, read_settings
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import RunConfigValue


@with_superlink
def stats(
    *,
    run_config: Annotated[
        list[str] | None,
        run_config_option(
            "Settings of the run, as for flwr-distill run: those of the data, such as "
            '\'dataset="private" private.classes="cat,dog"\'. Can be repeated: the last one '
            "counts."
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write all numbers to this file, too.", metavar="FILE"),
    ] = None,
    options: SuperLinkOptions,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
    timeout: Timeout = 60.0,
) -> None:
    """Show what nodes hold, and on which a run with these settings would fail: a table and a page.

    It is a run without training. Nodes count by class, size, mode and brightness, or by the values
    of each column. Their policies decide if that leaves (statistics), and round it down.
    """
    with exit_on(RunConfigError, SettingsError, command="stats"):
        overrides: dict[str, RunConfigValue] = {
            "strategy": "fedavg",
            "num-rounds": 0,
            **read_settings(None, run_config or ()),
            "statistics": True,
        }
        checked(overrides)
    link = options.find("stats")
    folder = run_to_its_end(link, overrides, timeout, "stats")
    if folder:
        _show(folder if folder.exists() else runs_dir / folder.name, folder, json_file)


def _show(here: Path, on_server: Path, json_file: Path | None) -> None:
    """Print what would fail and the table of nodes, or where they are."""
    from flwr_distill.server.page.run_files import REPORT, read_run
    from flwr_distill.server.page.statistics import faults_of_data, held_by_nodes
    from flwr_distill.server.statistics import FILE

    if not are_here(here / FILE, on_server):
        return
    run = read_run(here)
    if (faults := faults_of_data(run)) and (nodes := held_by_nodes(run)):
        (table,) = nodes.tables
        print_table(Console(), nodes.title, table)
        typer.echo(f"{faults.title}:")
        for line in faults.text:
            typer.echo(f"- {line}")
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(here / FILE, json_file)
    typer.echo(f"Report: {here / REPORT}")
