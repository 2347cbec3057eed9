"""Whether the room `flower`, which stands above this one, serves the installed Flower's line."""

from importlib import import_module


def has_folder() -> bool:
    """Whether our node's processes run with the installed Flower."""
    return bool(import_module("flwr_distill.flower.lines").folder_for("node"))
