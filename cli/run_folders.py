"""Finds runs by the names given on the command line."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.errors import fail
from server.record.run_ids import RunIdError, full_id

if TYPE_CHECKING:
    from server.page import RunFiles

RUN_HELP = "Run id or its first digits, its folder, or latest."
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Folder that the runs' folders are in.")]
DEFAULT_RUNS_DIR = Path("runs")


def read_runs(names: list[str], runs_dir: Path) -> "list[RunFiles]":
    """Read runs by id, its first digits, folder or ``latest``; ends the command on a wrong one."""
    from server.page import RunFilesError, read_run

    try:
        return [read_run(_folder(name, runs_dir)) for name in names]
    except RunFilesError as error:
        fail(error)


def run_folders(runs_dir: Path) -> list[Path]:
    """Folders of runs, the latest last."""
    folders = [file.parent for file in runs_dir.glob("*/settings.json")]
    return sorted(folders, key=lambda folder: (folder / "settings.json").stat().st_mtime)


def shortest(name: str, names: list[str], least: int = 6) -> str:
    """The first characters of a run's name that no other run's begins with."""
    for length in range(least, len(name)):
        if sum(other.startswith(name[:length]) for other in names) == 1:
            return name[:length]
    return name


def _folder(name: str, runs_dir: Path) -> Path:
    if (Path(name) / "settings.json").exists():
        return Path(name)
    try:
        return runs_dir / full_id(name, [folder.name for folder in run_folders(runs_dir)])
    except RunIdError as error:
        fail(f"{error} in {runs_dir} (flwr-distill runs list shows them)")
