"""What differs between Flowers stands in a folder for each line, as in `flower_1_32`."""

from importlib import import_module
from importlib.metadata import version
from types import ModuleType

FOLDERS = {"1.32": "flower_1_32", "1.41": "flower_1_41", "1.42": "flower_1_41"}
"""Of each line; what is used of 1.42 is as it was in 1.41."""


def has_folder() -> bool:
    """Whether there is a folder for the installed Flower's line."""
    return _line() in FOLDERS


def module_of_line(name: str) -> ModuleType:
    """Import a module from the folder for the installed Flower's line."""
    return import_module(f"flwr_distill.node.{FOLDERS[_line()]}.{name}")


def _line() -> str:
    return ".".join(version("flwr").split(".")[:2])
