"""How FedNova and FedFA weigh nodes: the free functions alone."""

import numpy as np
import pytest

from flwr_distill.strategies.fedfa.strategy import information_weights
from flwr_distill.strategies.fednova.strategy import normalised_average


def test_fednova_with_equal_steps_is_fedavg():
    rng = np.random.default_rng(0)
    start, *models = ({"w": rng.normal(size=(4, 3))} for _ in range(4))
    found = normalised_average(start, models, [1.0, 2.0, 5.0], [(7.0, 7.0)] * 3, ["w"])
    mean = sum(n * model["w"] for n, model in zip((1, 2, 5), models, strict=True)) / 8
    np.testing.assert_allclose(found["w"], mean)


@pytest.mark.parametrize(
    ("accuracies", "rounds"), [([0.5], [1]), ([0.0, 0.0], [1, 3]), ([1.0, 0.0], [9, 1])]
)
def test_fedfas_weights_are_a_distribution_whatever_accuracies_are(accuracies, rounds):
    weights = information_weights(np.array(accuracies), np.array(rounds), 0.5)
    assert weights.sum() == pytest.approx(1.0)
    assert (weights > 0).all()


def test_less_accurate_and_more_frequent_nodes_weigh_more():
    weights = information_weights(np.array([0.9, 0.5, 0.1]), np.array([2, 2, 2]), 0.5)
    assert (np.diff(weights) > 0).all()
    weights = information_weights(np.array([0.5, 0.5, 0.5]), np.array([1, 2, 3]), 0.5)
    assert (np.diff(weights) > 0).all()
