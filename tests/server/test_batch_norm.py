"""Networks with BatchNorm, whose count of batches Flower's strategies make a float."""

import pytest

from flwr_distill.protocol.registry import all_methods
from tests.matrix import strategies
from tests.server.run_folder import rows

QUICK = {"model": "resnet8", "partition.scheme": "iid", "train.batch-size": 64}
ELSEWHERE = {
    *("bulyan", "fedadagrad", "fedavgm", "fedyogi", "krum", "multikrum"),
    *("dp-adaptive-client", "dp-adaptive-server", "dp-fixed-client", "dp-fixed-server"),
    "analytic",
}
"""Flower's rules on parts of a model, which tests/strategies/test_flowers_own.py is about; and one
that learns in the first round alone."""


@pytest.mark.parametrize("strategy", strategies(all_methods().keys() - ELSEWHERE))
def test_honest_nodes_train_in_every_round_and_are_never_set_aside(
    play, little_distillation, strategy
):
    found = rows(play({**QUICK, **little_distillation}, nodes=4, strategy=strategy))
    assert [row["set_aside"] for row in found] == [0, 0, 0]
    losses = {row["loss"] for row in found}
    assert losses == {None} if all_methods()[strategy].outcome == "personal" else len(losses) == 3
