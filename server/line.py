"""What uses a Flower's private modules stands in a folder for its line, as in `flower_1_32`."""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType


def module_of_line(name: str) -> ModuleType | None:
    """Import a module from the folder for the installed Flower's line; None if there is none."""
    folder = "flwr_distill.server.flower_" + "_".join(version("flwr").split(".")[:2])
    return import_module(f"{folder}.{name}") if find_spec(folder) else None
