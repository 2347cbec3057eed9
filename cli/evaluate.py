"""`flwr-distill evaluate`: a model's accuracy on every node, without training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from flwr_distill.cli.connection import SuperLinkOptions, Timeout, with_superlink
from flwr_distill.cli.errors import exit_on
from flwr_distill.cli.options import run_config_option
from flwr_distill.cli.run import are_here, run_to_its_end
from flwr_distill.cli.run_folders import DEFAULT_RUNS_DIR, RunsDir, read_runs, run_folders
from flwr_distill.cli.run_log import print_table
from flwr_distill.fleet.run_config import RunConfigError
from flwr_distill.fleet.run_settings import checked, read_settings
from flwr_distill.server.record.run_ids import LATEST
from flwr_distill.task.errors import ReportedError
from flwr_distill.task.settings import RunConfigValue

MAX_SHOWN = 20
"""Nodes in the terminal, the worst ones; the page has all."""


@with_superlink
def evaluate(
    *,
    model: Annotated[
        str,
        typer.Argument(
            help="Model file (.safetensors, .onnx, .pt), or a run: its id or first digits, its "
            "folder, or latest.",
            show_default=False,
        ),
    ],
    run_config: Annotated[
        list[str] | None,
        run_config_option(
            "Settings of the run, as for flwr-distill run: what MODEL does not say itself, such as "
            "'dataset=\"private\"'. Can be repeated: the last one counts."
        ),
    ] = None,
    options: SuperLinkOptions,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
    timeout: Timeout = 60.0,
) -> None:
    """Evaluate MODEL on every node's held-out samples: a table, the worst node first, and a page.

    It is a run without training, so nodes' policies decide as of any run. The server reads MODEL
    at the same path. With a run, data, model and held-out samples are those of its training, as
    long as nodes and their data are. A .pt file is a program: use only files that you trust.
    """
    # Here, because every subcommand imports this file, and the node command must not import torch.
    from flwr_distill.server.export.evaluated import read_evaluated

    with exit_on(RunConfigError, ReportedError, command="evaluate"):
        path = Path(model)
        if not path.is_file():
            path = read_runs([_latest(runs_dir) if model == LATEST else model], runs_dir)[0].folder
        overrides: dict[str, RunConfigValue] = {
            **read_evaluated(path.resolve()).settings(),
            "strategy": "fedavg",
            "num-rounds": 0,
            "fraction-evaluate": 1.0,
            "evaluate.counts": True,
            **read_settings(None, run_config or ()),
            "evaluate.model": str(path.resolve()),
        }
        checked(overrides)
    link = options.find("evaluate")
    folder = run_to_its_end(link, overrides, timeout, "evaluate")
    if folder:
        _show(folder if folder.exists() else runs_dir / folder.name, folder)


def _latest(runs_dir: Path) -> str:
    """The latest run that is no evaluation."""
    from flwr_distill.server.page.run_files import read_run

    names = (path.name for path in reversed(run_folders(runs_dir)) if not read_run(path).evaluated)
    return next(names, LATEST)


def _show(here: Path, on_server: Path) -> None:
    """Print the table of nodes, or where it is."""
    from flwr_distill.server.page.by_node import by_node
    from flwr_distill.server.page.run_files import REPORT, read_run

    if not are_here(here / REPORT, on_server):
        return
    if section := by_node(read_run(here)):
        (table,) = section.tables
        shown = replace(table, rows=table.rows[:MAX_SHOWN])
        title = f"{section.title}, the worst {MAX_SHOWN}" if table != shown else section.title
        console = Console()
        print_table(console, title, shown)
        console.print(Text(section.text[0]))
    typer.echo(f"Report: {here / REPORT}")
