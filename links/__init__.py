"""Links between nodes: sealed parcels, through the server or from node to node."""

from importlib import import_module
from typing import TYPE_CHECKING

from flwr_distill.links.errors import LinkError

if TYPE_CHECKING:
    from flwr_distill.links.transfer import introduce, receive, send

__all__ = ["LinkError", "introduce", "receive", "send"]


def __getattr__(name: str) -> object:
    # At their first use: with them come Flower and NumPy, which a node's supervisor does without.
    if name in __all__:
        return getattr(import_module("flwr_distill.links.transfer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
