"""Packs app bundles, and has a SuperLink bound those that it is sent."""

import os
from pathlib import Path

from flwr.cli.build import build_fab_from_files

from node.flower.app_config import app_config


def bound_bundles() -> None:
    """Have this process's SuperLink open no bundle that exceeds a bound (`node.bundle`)."""
    from flwr.superlink.servicer.control import control_servicer  # here: imports a SuperLink

    assert hasattr(control_servicer, "get_fab_config")
    setattr(control_servicer, "get_fab_config", app_config)  # noqa: B010


def app_bundle(app_dir: Path) -> bytes:
    """Pack an app as ``flwr run`` does, but without a look into hidden folders.

    Flower looks at each file of a virtual environment before it leaves them all out.

    Raises
    ------
    ValueError
        If Flower cannot pack it; says why.
    """
    files: dict[str, bytes | Path] = {}
    for folder, folders, names in os.walk(app_dir):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (Path(folder, name) for name in names):
            if not file.is_symlink():
                files[file.relative_to(app_dir).as_posix()] = file
    return build_fab_from_files(files)[0]
