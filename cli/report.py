"""`flwr-distill report`: the page of a run, or a comparison of several."""

from pathlib import Path
from typing import Annotated

import typer

from flwr_distill.cli.run_folders import DEFAULT_RUNS_DIR, RUN_HELP, RunsDir, read_runs


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

    The page is one file that needs no network. A run writes its report when it ends; this command
    also writes one for a run that is not finished.
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
