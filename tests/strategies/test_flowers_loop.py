"""Our strategies in a ServerApp of one's own: Flower's loop, and nothing of our server."""

from itertools import pairwise

import numpy as np
import pytest
from flwr.app import ArrayRecord

from flwr_distill.strategies.cadis import CADIS
from flwr_distill.strategies.fedhead import FedHEAD
from flwr_distill.strategies.fedlgd.strategy import FedLGD
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.models import create_model

NODES, ROUNDS = 4, 3
SPEC = load_dataset("digits").spec


def model():
    return create_model("auto", SPEC, seed=0)


STRATEGIES = {
    "hfldd": lambda: HFLDD(groups=2, distill_steps=3),
    "fedhead": lambda: FedHEAD(distill_epochs=1),
    "cadis": lambda: CADIS(fraction_evaluate=0.0),
    "fedlgd": lambda: FedLGD(
        model=model(), spec=SPEC, first_steps=3, refine_steps=2, global_steps=2, every=2
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_runs_to_the_end_and_moves_the_model_each_round(client_grid, name):
    seen = []

    def evaluate(server_round, arrays):
        seen.append(np.concatenate([a.numpy().ravel() for a in arrays.values()]))

    grid = client_grid(NODES, {"partition.scheme": "dirichlet", "train.local-epochs": 1})
    result = STRATEGIES[name]().start(
        grid=grid,
        initial_arrays=ArrayRecord(model().state_dict()),
        num_rounds=ROUNDS,
        evaluate_fn=evaluate,
    )
    assert len(seen) == ROUNDS + 1
    assert all(np.abs(after - before).max() > 0 for before, after in pairwise(seen))
    assert result.arrays.keys() == model().state_dict().keys()
