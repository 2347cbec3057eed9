"""Rounds of real nodes of which two are hostile, and what ``defence="on"`` takes for the mean."""

import pytest
from flwr.app import ArrayRecord, ConfigRecord

from benchmarks.hostile import Attack, Ring
from flwr_distill.strategies.agreement.strategy import Agreement
from flwr_distill.strategies.cadis import CADIS
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.models import create_model

from .rounds import FIRST

NODES = 10
RUN_CONFIG = {"partition.scheme": "iid", "train.local-epochs": 1, "train.momentum": 0.9}


def agreement():
    return Agreement(fraction_evaluate=0.0)


def cadis():
    return CADIS(rule="agreement", most_say=1.0, fraction_evaluate=0.0)


def set_aside(client_grid, caplog, strategy, attack, run_config=RUN_CONFIG):
    """Places of the nodes whose models do not count in the first two rounds."""
    grid, ring = client_grid(NODES, run_config), Ring(attack, 0.2)
    for node in (FIRST + 8, FIRST + 9):
        grid.nodes[node] = ring.hostile(grid.nodes[node])
    arrays = ArrayRecord(create_model("auto", load_dataset("digits").spec, seed=0).state_dict())
    rounds = []
    for server_round in (1, 2):
        caplog.clear()
        messages = strategy.configure_train(server_round, arrays, ConfigRecord({"lr": 0.05}), grid)
        arrays, _ = strategy.aggregate_train(server_round, grid.send_and_receive(messages))
        rounds.append(
            [i for i in range(NODES) if f"node {FIRST + i} to train rejected" in caplog.text]
        )
    return rounds


@pytest.mark.parametrize(
    ("make", "attack"),
    [
        (agreement, Attack.FLIPPED_LABELS),
        (agreement, Attack.BACKDOOR),
        (agreement, Attack.REVERSED),
        (cadis, Attack.BACKDOOR),
    ],
)
def test_hostile_models_do_not_count_and_honest_ones_do(client_grid, caplog, make, attack):
    assert set_aside(client_grid, caplog, make(), attack) == [[8, 9], [8, 9]]


@pytest.mark.parametrize("make", [agreement, cadis])
def test_all_honest_models_count(client_grid, caplog, make):
    assert set_aside(client_grid, caplog, make(), Attack.NONE) == [[], []]


@pytest.mark.parametrize("make", [agreement, cadis])
def test_no_honest_node_with_skewed_data_is_set_aside(client_grid, caplog, make):
    skewed = {**RUN_CONFIG, "partition.scheme": "dirichlet", "partition.alpha": 0.1}
    assert set_aside(client_grid, caplog, make(), Attack.NONE, skewed) == [[], []]
