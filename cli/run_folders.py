"""Finds runs by the names given on the command line."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.errors import fail

if TYPE_CHECKING:
    from server.page import RunFiles

RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Folder that the runs' folders are in.")]
DEFAULT_RUNS_DIR = Path("runs")


def read_runs(names: list[str], runs_dir: Path) -> "list[RunFiles]":
    """Read runs by id, folder or ``latest``; ends the command if one does not exist."""
    from server.page import RunFilesError, read_run

    try:
        return [read_run(_folder(name, runs_dir)) for name in names]
    except RunFilesError as error:
        fail(error)


def run_folders(runs_dir: Path) -> list[Path]:
    """Folders of runs, the latest last."""
    folders = [file.parent for file in runs_dir.glob("*/settings.json")]
    return sorted(folders, key=lambda folder: (folder / "settings.json").stat().st_mtime)


def _folder(name: str, runs_dir: Path) -> Path:
    if name == "latest" and (folders := run_folders(runs_dir)):
        return folders[-1]
    return Path(name) if (Path(name) / "settings.json").exists() else runs_dir / name
