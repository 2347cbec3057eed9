"""Packs app bundles."""

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from flwr.cli.build import build_fab_from_files

import flwr_distill
from flwr_distill import ROOMS
from flwr_distill.flower.own_app import APP_DIR
from flwr_distill.server.settings_catalogue import with_plugins
from flwr_distill.task.settings import RunConfigValue

_SETTINGS = "pyproject.toml"
_SERVER_APP = "flwr_distill.server.app:app"


def app_bundle(app_dir: Path, run_config: Mapping[str, RunConfigValue] | None = None) -> bytes:
    """Pack an app as ``flwr run`` does, but without hidden folders, and our own with its code.

    Flower matches each file of a virtual environment before it excludes them all. Our own app's
    folder has settings only: its code is our packages, wherever they are installed. Flower accepts
    only settings that an app declares: ours declares those of installed packages that a run names
    in `run_config`, by dotted key.

    Raises
    ------
    ValueError
        If Flower cannot pack it.
    """
    files: dict[str, bytes | Path] = {
        file.relative_to(app_dir).as_posix(): file for file in _files(app_dir)
    }
    if run_config and (text := _own_settings(app_dir)):
        files[_SETTINGS] = with_plugins(text, run_config).encode()
    if app_dir == APP_DIR:
        package = Path(flwr_distill.__file__).parent
        rooms = [Path(folder, room) for folder in flwr_distill.__path__[1:] for room in ROOMS]
        for folder in (package, *rooms):
            modules = (file for file in _files(folder) if file.suffix == ".py")
            files |= {file.relative_to(package.parent).as_posix(): file for file in modules}
    return build_fab_from_files(files)[0]


def _own_settings(app_dir: Path) -> str:
    """Text of the app's ``pyproject.toml``, if its ServerApp is ours; else empty."""
    text = (app_dir / _SETTINGS).read_text(encoding="utf-8")
    table = tomllib.loads(text)
    for name in ("tool", "flwr", "app", "components"):
        table = table.get(name, {})
    return text if table.get("serverapp") == _SERVER_APP else ""


def _files(top: Path) -> Iterator[Path]:
    """Files of a folder, without links and hidden folders."""
    for folder, folders, names in os.walk(top):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (file for name in names if not (file := Path(folder, name)).is_symlink())
