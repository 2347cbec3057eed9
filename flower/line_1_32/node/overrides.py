"""Overrides of Flower 1.32's SuperNode, besides those of all lines."""

from __future__ import annotations

from collections.abc import Callable

from flwr.supercore.object_store import object_store_factory

from flwr_distill.flower.line_1_32.node.connection import patch_connection
from flwr_distill.flower.line_1_32.objects import MemoryObjectStore
from flwr_distill.node.pace import Pace


def override(pace: Pace, refused: Callable[[str], None]) -> None:
    """Override the SuperNode; `refused` gets the SuperLink's reason for not admitting the node."""
    patch_connection(lambda: pace, refused)
    object_store_factory.InMemoryObjectStore = MemoryObjectStore  # type: ignore[attr-defined]
