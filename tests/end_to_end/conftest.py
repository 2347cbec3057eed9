"""Whole runs of our ServerApp with our ClientApp in this process; only the wire is in memory."""

import pytest
from flwr.app import Context, RecordDict

from flwr_distill.server.app import main

from .runs import with_dots

QUICK = {
    "num-rounds": 2,
    "train.local-epochs": 1,
    "hfldd.distill-steps": 3,
    "fedhead.distill-epochs": 2,
    "fedhead.server-epochs": 2,
    "fedhead.reference-size": 20,
    "fedlgd.first-steps": 3,
    "fedlgd.refine-steps": 2,
    "fedlgd.global-steps": 3,
}


@pytest.fixture
def run(client_grid, tmp_path):
    """Run the ServerApp; `spoil` may change its grid of nodes. Gives the run's folder."""

    def start(num_nodes=4, run_id=7, spoil=lambda grid: None, grid=(), **settings):
        shared = {
            "min-nodes": num_nodes,
            "runs-dir": str(tmp_path / "runs"),
            "phase-timeout": 120.0,
        }
        config = {**QUICK, **shared, **with_dots(settings)}
        nodes = client_grid(num_nodes, config, **dict(grid))
        spoil(nodes)
        main(nodes, Context(run_id, 1, {}, RecordDict(), config))
        return tmp_path / "runs" / str(run_id)

    return start
