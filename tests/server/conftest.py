"""Runs of our ServerApp in this process, with nodes or a SuperLink in it."""

from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from flwr_distill.node.stock import is_another
from flwr_distill.server.app import main


@pytest.fixture
def superlink(monkeypatch):
    """Build a SuperLink with these nodes."""
    if is_another():
        pytest.skip("is about the SuperLink of Flower 1.32")
    from .superlink import SuperLink

    return lambda *nodes, together=False: SuperLink(monkeypatch, nodes, together)


@pytest.fixture
def play(client_grid, tmp_path):
    """Run our ServerApp, by default FedAvg on three nodes, and give the run's folder.

    The grid is in ``play.grid``; keywords are settings: ``train__lr`` for ``train.lr``.
    """

    def play(
        config=(),
        *,
        nodes=3,
        run_id=1,
        broken=lambda node, message: False,
        node_config=None,
        grid=None,
        **settings,
    ):
        named = {key.replace("__", ".").replace("_", "-"): v for key, v in settings.items()}
        config = {
            "strategy": "fedavg",
            "num-rounds": 2,
            "min-nodes": nodes,
            "train.local-epochs": 1,
            "runs-dir": str(tmp_path),
            **dict(config),
            **named,
        }
        play.grid = grid or client_grid(nodes, config, broken, node_config)
        main(play.grid, Context(run_id, 1, {}, RecordDict(), config))
        return Path(config["runs-dir"]) / str(run_id)

    return play
