"""`flwr-distill runs` and `report`: list, show and compare runs, export models, remove nodes."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from flwr_distill.cli.errors import exit_on, fail
from flwr_distill.cli.run_folders import (
    DEFAULT_RUNS_DIR,
    RUN_HELP,
    RunsDir,
    read_runs,
    run_folders,
    shortest,
    started,
)
from flwr_distill.cli.run_log import print_table

runs = typer.Typer(
    help="List, show and compare runs; export their models, remove nodes from them.",
    no_args_is_help=True,
)
Run = Annotated[str, typer.Argument(help=RUN_HELP)]


@runs.command("list")
def list_runs(runs_dir: RunsDir = DEFAULT_RUNS_DIR) -> None:
    """List the runs of a folder, the latest last, by the first digits of their ids.

    A run is done, failed, stopped, running, or killed: it ended without a word.
    """
    all_runs = read_runs([str(folder) for folder in run_folders(runs_dir)], runs_dir)
    if not all_runs:
        fail(f"no runs in {runs_dir}")

    from flwr_distill.server.page.words import data_size, stated

    names = [run.folder.name for run in all_runs]
    shown = [shortest(name, names) for name in names]
    table = Table(
        Column("run", no_wrap=True, min_width=max(map(len, shown))),
        Column("started", no_wrap=True),
        Column("state", no_wrap=True),
        Column("strategy", overflow="fold"),
        Column("data set", overflow="fold"),
        "rounds",
        "accuracy",
        "server",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for run, name in zip(all_runs, shown, strict=True):
        last = run.rows[-1] if run.rows else {}
        table.add_row(
            name,
            started(run),
            run.state,
            escape(run.settings["strategy"]),
            escape(run.settings["dataset"]),
            f"{last.get('round', 0)}/{run.settings['num-rounds']}",
            stated(last),
            data_size(last.get("server_bytes")),
        )
    Console().print(table)


@runs.command()
def show(run: Run, runs_dir: RunsDir = DEFAULT_RUNS_DIR) -> None:
    """Show a run's results and settings."""
    (files,) = read_runs([run], runs_dir)

    from flwr_distill.server.page.numbers import numbers

    console = Console()
    console.print(
        f"[bold]{escape(files.title)}[/], in {escape(str(files.folder))}", highlight=False
    )
    table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    state = files.state
    if state == "failed":
        state = f"{state}: {files.named(files.journal[-1]['error'])}"
    for name, value in [("state", state), *numbers(files), *files.changed_settings.items()]:
        table.add_row(name, escape(str(value)))
    console.print(table)


@runs.command()
def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help=f"Two or more. {RUN_HELP}")],
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    """Compare runs: results, cost of equal accuracy, and settings that differ."""
    files = read_runs(names, runs_dir)

    from flwr_distill.server.page.comparison_page import comparison_tables

    for title, table in comparison_tables(files):
        print_table(Console(), title, table)


@runs.command()
def export(
    run: Run,
    form: Annotated[
        Literal["safetensors", "torchscript", "onnx"],
        typer.Option("--format", help="Format of the model."),
    ] = "safetensors",
    best: Annotated[
        bool, typer.Option("--best", help="The best round, by best-metric, not the last.")
    ] = False,
    student: Annotated[
        str,
        typer.Option(
            metavar="MODEL", help="Also distil it into this smaller architecture, on --samples."
        ),
    ] = "",
    samples: Annotated[
        str,
        typer.Option(help="Images for --student: noise, a named set, a folder or an .npz file."),
    ] = "noise",
    num_samples: Annotated[int, typer.Option(min=2, help="Number of these images.")] = 2000,
    data_root: Annotated[str, typer.Option(help="Folder of named sets of images.")] = "",
    output: Annotated[
        Path | None, typer.Option(help="Folder to write to.", show_default="RUN/export")
    ] = None,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    """Write a run's model and model card; an unfinished run's last checkpoint."""
    (files,) = read_runs([run], runs_dir)

    from flwr_distill.server.export.card import model_card
    from flwr_distill.server.export.model import ExportError, export_model, run_to_export
    from flwr_distill.server.export.student import Student, export_student
    from flwr_distill.server.record.checkpoint import CheckpointError
    from flwr_distill.task.errors import DatasetError
    from flwr_distill.task.models import ModelError

    folder = output or files.folder / "export"
    with exit_on(ExportError, ModelError, DatasetError, CheckpointError):
        files = run_to_export(files, best)
        file = export_model(files, form, folder)
    card = folder / "model-card.md"
    card.write_text(model_card(files, file.name), encoding="utf-8")
    typer.echo(f"{file}\n{card}")
    if student:
        small = Student(student, samples, num_samples, data_root)
        with exit_on(ExportError, ModelError, DatasetError):
            file, summary = export_student(files, small, form, folder)
        typer.echo(f"{file}\n{summary}")


@runs.command()
def forget(
    run: Run,
    nodes: Annotated[list[str], typer.Argument(metavar="NODE...", help="Names of nodes.")],
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    """Remove nodes from a finished run: its model is then that of the other nodes.

    Only for strategies that keep each node's data separate (analytic). The model and the last
    checkpoint are replaced, older checkpoints removed. Earlier exports stay unchanged.
    """
    (files,) = read_runs([run], runs_dir)

    from flwr_distill.server.forget import ForgetError
    from flwr_distill.server.forget import forget as remove_nodes
    from flwr_distill.server.page.words import percent
    from flwr_distill.server.record.checkpoint import CheckpointError

    with exit_on(ForgetError, CheckpointError, command="runs forget"):
        score = remove_nodes(files.folder, nodes)
    accuracy = f", accuracy {percent(float(str(score['accuracy'])))}" if score else ""
    typer.echo(f"{files.folder} without {', '.join(nodes)}{accuracy}")


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help=f"One or more. {RUN_HELP}")],
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
    output: Annotated[
        Path | None,
        typer.Option(
            help="File to write.",
            show_default="RUN/report.html; for several, comparison.html beside the first",
        ),
    ] = None,
) -> None:
    """Write a run's report from its files; with several runs, compare them.

    The page is one file that needs no network. A run writes its report when it ends. This command
    also writes one for an unfinished run.
    """
    files = read_runs(runs, runs_dir)

    from flwr_distill.server.page.comparison_page import comparison_page
    from flwr_distill.server.page.run_files import REPORT
    from flwr_distill.server.page.run_page import run_page

    if len(files) == 1:
        file, page = output or files[0].folder / REPORT, run_page(files[0])
    else:
        file = output or files[0].folder.parent / "comparison.html"
        page = comparison_page(files, file.parent)
    file.write_text(page, encoding="utf-8")
    typer.echo(file)
