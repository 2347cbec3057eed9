"""Packs app bundles, and has a SuperLink bound those that it is sent."""

import os
from collections.abc import Iterator
from pathlib import Path

from flwr.cli.build import build_fab_from_files

import flwr_distill
from flwr_distill import ROOMS
from flwr_distill.flower.app_config import app_config
from flwr_distill.flower.own_app import APP_DIR


def bound_bundles() -> None:
    """Have this process's SuperLink open no bundle that exceeds a bound (`node.bundle`)."""
    from flwr.superlink.servicer.control import control_servicer  # here: imports a SuperLink

    assert hasattr(control_servicer, "get_fab_config")
    setattr(control_servicer, "get_fab_config", app_config)  # noqa: B010


def app_bundle(app_dir: Path) -> bytes:
    """Pack an app as ``flwr run`` does, but without hidden folders, and our own with its code.

    Flower matches each file of a virtual environment before it leaves them all out. Our own app's
    folder has settings alone: its code is our packages, wherever they are installed.

    Raises
    ------
    ValueError
        If Flower cannot pack it; says why.
    """
    files: dict[str, bytes | Path] = {
        file.relative_to(app_dir).as_posix(): file for file in _files(app_dir)
    }
    if app_dir == APP_DIR:
        package = Path(flwr_distill.__file__).parent
        rooms = [Path(folder, room) for folder in flwr_distill.__path__[1:] for room in ROOMS]
        for folder in (package, *rooms):
            modules = (file for file in _files(folder) if file.suffix == ".py")
            files |= {file.relative_to(package.parent).as_posix(): file for file in modules}
    return build_fab_from_files(files)[0]


def _files(top: Path) -> Iterator[Path]:
    """All files of a folder that are no links, and in no hidden folder."""
    for folder, folders, names in os.walk(top):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (file for name in names if not (file := Path(folder, name)).is_symlink())
