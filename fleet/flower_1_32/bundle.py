"""Packs app bundles."""

import os
from pathlib import Path

from flwr.cli.build import build_fab_from_files


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
