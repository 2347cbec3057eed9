"""What the room `flower`, which stands above this one, offers for the installed Flower's line."""

from importlib import import_module
from types import ModuleType
from typing import cast


def module_of_line(name: str) -> ModuleType | None:
    """Import a module for servers of the installed line; None if there is none."""
    lines = import_module("flwr_distill.flower.lines")
    return cast(ModuleType | None, lines.module_of_line("server", name))


def pulls() -> ModuleType:
    """What is changed of Flower's own way to pull replies."""
    return import_module("flwr_distill.flower.pulls")
