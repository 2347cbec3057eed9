"""Our top-level packages: other folders on Python's path may have modules of the same names.

Every Flower project has a `task.py`. Where its folder is on ``PYTHONPATH``, ours come first; its
other modules, such as plug-ins, are found as before.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

PACKAGES = (
    *("cli", "fleet", "node", "client", "server", "strategies", "links", "protocol", "distill"),
    *("task", "flwr_distill"),
)
ROOT = os.path.realpath(Path(__file__).parents[1])
"""The folder with these packages: a checkout, or site-packages."""


def own_first(folders: Sequence[str]) -> list[str]:
    """Folders to import from, with ours before the first that has a module of one of our names."""
    for place, folder in enumerate(folders):
        if os.path.realpath(folder) == ROOT:
            break
        if any(_holds(folder, name) for name in PACKAGES):
            return [*folders[:place], ROOT, *folders[place:]]
    return list(folders)


def own_first_in(python_path: str) -> str:
    """The variable ``PYTHONPATH`` with our folder likewise, for processes started anywhere."""
    folders = [os.path.abspath(folder) for folder in python_path.split(os.pathsep)]
    return os.pathsep.join(own_first(folders))


def namesakes() -> dict[str, list[str]]:
    """Names of ours that other folders on Python's path have a module of, by folder."""
    found = {
        folder: [name for name in PACKAGES if _holds(folder, name)]
        for folder in sys.path
        if os.path.realpath(folder) != ROOT
    }
    return {folder: names for folder, names in found.items() if names}


def _holds(folder: str, name: str) -> bool:
    """Whether a folder has a module, and not only a folder that could be part of one."""
    spec = PathFinder.find_spec(name, [folder])
    return spec is not None and spec.origin is not None
