"""Runs a federation on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict

from flwr_distill.simulation.grid import SimulationGrid
from flwr_distill.simulation.workers import Config, Workers

FIRST_NODE = 2**64 - 1_000_000
"""As large as Flower's node ids, which fit neither a float nor a signed 64-bit integer."""


def simulate(
    run_config: Config, nodes: Sequence[Config], runs_dir: Path, *, run_id: int = 1, workers: int
) -> None:
    """Run a strategy on virtual nodes.

    Parameters
    ----------
    run_config : Mapping[str, bool | int | float | str]
        Flat, as for ``-c``.
    nodes : Sequence[Mapping[str, bool | int | float | str]]
        Node config of each.
    runs_dir : Path
        For the run's folder and the nodes' state.
    run_id : int (default: 1)
        Name of the run's folder.
    workers : int
        Processes that train.
    """
    config = {"min-nodes": len(nodes), **run_config, "runs-dir": str(runs_dir)}
    state = {"state-dir": str(runs_dir / "nodes")}
    by_id = {
        FIRST_NODE + place: {"partition-id": place, **state, **own}
        for place, own in enumerate(nodes)
    }
    pool = Workers(by_id, run_id, config, workers)
    try:
        from flwr_distill.server.app import main

        main(SimulationGrid(list(by_id), pool), Context(run_id, 1, {}, RecordDict(), config))
    finally:
        pool.close()
