"""What differs between Flowers stands in a folder for each line, as in `flower_1_32`."""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType


def has_folder() -> bool:
    """Whether there is a folder for the installed Flower's line."""
    return find_spec(_folder()) is not None


def module_of_line(name: str) -> ModuleType:
    """Import a module from the folder for the installed Flower's line."""
    return import_module(f"{_folder()}.{name}")


def _folder() -> str:
    return "node.flower_" + "_".join(version("flwr").split(".")[:2])
