"""Finds what a folder of this room offers for the installed Flower's line."""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

FOLDERS = {
    "1.32": "line_1_32",
    **dict.fromkeys(("1.35", "1.36", "1.37"), "line_1_35"),
    "1.38": "line_1_38",
    **dict.fromkeys(("1.39", "1.40", "1.41", "1.42"), "line_1_39"),
}
"""Folder by line; newer ones use some of what older ones have."""


def line() -> str:
    """The installed Flower's line, such as 1.32."""
    return ".".join(version("flwr").split(".")[:2])


def folder_for(room: str) -> str:
    """Package that serves a room on the installed Flower's line; '' if there is none."""
    folder = FOLDERS.get(line())
    package = f"{__package__}.{folder}.{room}"
    return package if folder and find_spec(package) else ""


def module_of_line(room: str, name: str) -> ModuleType | None:
    """Import a module from the package that serves a room; None if it has none."""
    package = folder_for(room)
    module = f"{package}.{name}"
    return import_module(module) if package and find_spec(module) else None


def why_unserved() -> str:
    """Why federations cannot be started here with the installed Flower; '' if they can."""
    if folder_for("node"):
        return ""
    return (
        f"flwr {version('flwr')} is installed, which has no folder here: install flwr==1.32.1, "
        "or use Flower's own commands, such as `flwr run` (docs/flower.md)"
    )
