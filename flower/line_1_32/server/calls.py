"""A run's calls to its SuperLink, made together where it takes them so."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from flwr.superlink.grid import GrpcGrid

from flwr_distill.flower.line_1_32.together import Together


class Calls:
    """Makes calls over the connection of Flower's grid, as its ServerApp."""

    def __init__(self, grid: GrpcGrid) -> None:
        self.grid = grid

    @cached_property
    def _together(self) -> Together:
        stub = self.grid._stub  # connects
        invoke = self.grid._retry_invoker.invoke
        return Together(stub, self.grid._channel, "ServerAppIo", invoke)

    def are_taken_together(self) -> bool:
        """Whether the SuperLink takes calls together."""
        return self._together.taken(self.grid.node, self.grid.run.run_id)

    def make(self, requests: Sequence[Any]) -> list[Any]:
        """Make calls; return the answers to the first of them: one at least; see `Together`."""
        return self._together.make(self.grid.node, self.grid.run.run_id, requests)

    def make_all(self, requests: Sequence[Any]) -> list[Any]:
        """Make calls, in as few as possible; return all answers."""
        return self._together.make_all(self.grid.node, self.grid.run.run_id, requests)
