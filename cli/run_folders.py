"""Runs by their names on the command line."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flwr_distill.cli.errors import fail
from flwr_distill.server.record.run_ids import LATEST, SETTINGS, RunIdError, by_start, full_id

if TYPE_CHECKING:
    from flwr_distill.server.page.run_files import RunFiles

RUN_HELP = "Run id or its first digits, its folder, or latest."
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Folder that the runs' folders are in.")]
DEFAULT_RUNS_DIR = Path("runs")
MIN_DIGITS = 6
_REMEDY = "flwr-distill runs list shows the others"


def read_runs(names: list[str], runs_dir: Path) -> "list[RunFiles]":
    """Read runs by id, its first digits, folder or ``latest``; ends the command on a wrong name.

    Standard error names the latest run.
    """
    from flwr_distill.server.page.run_files import RunFilesError, read_run

    try:
        runs = [read_run(_folder(name, runs_dir)) for name in names]
    except RunFilesError as error:
        fail(error)
    for name, run in zip(names, runs, strict=True):
        if name == LATEST:
            which = f"{run.folder.name}, {run.title}, started {started(run)}, {run.state}"
            typer.echo(f"latest is run {which}", err=True)
    return runs


def started(run: "RunFiles") -> str:
    """When a run started, on this machine's clock as in the queue; ``-`` if it does not say."""
    try:
        start = datetime.fromisoformat(run.about["started"])
    except (KeyError, TypeError, ValueError):
        return "-"
    return start.astimezone().strftime("%Y-%m-%d %H:%M")


def run_folders(runs_dir: Path) -> list[Path]:
    """Folders of runs that have met their nodes, by their start."""
    return [folder for folder in by_start(runs_dir) if (folder / SETTINGS).exists()]


def shortest(name: str, names: list[str]) -> str:
    """The first characters of a run's name that no other run has."""
    for length in range(MIN_DIGITS, len(name)):
        if sum(other.startswith(name[:length]) for other in names) == 1:
            return name[:length]
    return name


def _folder(name: str, runs_dir: Path) -> Path:
    ids = [folder.name for folder in by_start(runs_dir)]
    if name not in (*ids, LATEST) and (Path(name) / SETTINGS).exists():
        return Path(name)
    try:
        folder = runs_dir / full_id(name, ids)
    except RunIdError as error:
        fail(f"{error} in {runs_dir} ({_REMEDY})")
    if not (folder / SETTINGS).exists():
        fail(f"run {folder.name} has not met its nodes, so it has no results yet ({_REMEDY})")
    return folder
