"""Runs whose numbers are approved."""

from flwr.app import Context, RecordDict

from flwr_distill.server.app import main
from tests.server.run_folder import rows


def rows_of(strategy, client_grid, settings, folder):
    """The rounds of a strategy on three nodes, from a seed."""
    config = {
        "strategy": strategy,
        "num-rounds": 2,
        "min-nodes": 3,
        "partition.scheme": "dirichlet",
        "most-samples": 0.0,  # all that the three nodes claim counts, as in the papers
        "train.local-epochs": 1,
        "train.batch-size": 64,
        "fraction-evaluate": 1.0,
        "fedlgd.every": 2,
        **settings,
        "runs-dir": str(folder),
    }
    main(client_grid(3, config), Context(1, 1, {}, RecordDict(), config))
    return rows(folder / "1")
