"""Networks with BatchNorm, whose count of batches Flower's strategies make a float."""

import json

import pytest
from flwr.app import Context, RecordDict

from flwr_distill.protocol.registry import all_methods
from flwr_distill.server.app import main
from tests.matrix import strategies

pytestmark = pytest.mark.usefixtures("without_pictures")

NODES = 4
QUICK = {
    "model": "resnet8",
    "num-rounds": 2,
    "min-nodes": NODES,
    "partition.scheme": "iid",
    "train.local-epochs": 1,
    "train.batch-size": 64,
}
ELSEWHERE = {
    *("bulyan", "fedadagrad", "fedavgm", "fedyogi", "krum", "multikrum"),
    *("dp-adaptive-client", "dp-adaptive-server", "dp-fixed-client", "dp-fixed-server"),
    "analytic",
}
"""Flower's rules on parts of a model, which tests/strategies/test_flowers_own.py is about; and one
that learns in the first round alone."""


@pytest.mark.parametrize("strategy", strategies(all_methods().keys() - ELSEWHERE))
def test_honest_nodes_train_in_every_round_and_are_never_set_aside(
    client_grid, little_distillation, tmp_path, strategy
):
    config = {"strategy": strategy, "runs-dir": str(tmp_path)}
    run_config = {**QUICK, **little_distillation, **config}
    main(client_grid(NODES, run_config), Context(1, 1, {}, RecordDict(), run_config))
    rows = [json.loads(line) for line in (tmp_path / "1" / "metrics.jsonl").open()]
    assert [row["set_aside"] for row in rows] == [0, 0, 0]
    if all_methods()[strategy].outcome == "personal":
        assert {row["loss"] for row in rows} == {None}
    else:
        assert len({row["loss"] for row in rows}) == 3
