"""The benchmark of simulations has each way train the same clients."""

import logging

import pytest

from benchmarks.simulation import BATCH, CASES, SAMPLES, Case, in_this_process, measure, pfl_cnn
from flwr_distill.task.datasets import DataSpec


@pytest.fixture
def flowers_log():
    """Flower's log as it was, after a benchmark has muted it."""
    logger = logging.getLogger("flwr")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.usefixtures("flowers_log")
def test_the_rates_of_ways_are_of_as_many_rounds_as_asked_without_the_first():
    ways = {"one by one": (in_this_process, "off"), "together": (in_this_process, "on")}
    case = Case("digits", "digits", "digits-cnn", clients=4, a_round=2)
    row = measure(case, ways, "cpu", rounds=1, repeats=2)
    assert {way: len(rates) for way, rates in row.rates.items()} == dict.fromkeys(ways, 2)
    assert row.ratio("one by one") == 1
    assert row.ratio("together") > 0


def test_a_row_has_the_set_up_of_pfl_researchs_benchmark():
    (case,) = (case for case in CASES if case.name == "pfl")
    assert (case.clients, case.a_round, SAMPLES, BATCH) == (1000, 50, 50, 10)
    model = pfl_cnn(DataSpec("cifar", (3, 32, 32), 10, (0.5,) * 3, (0.5,) * 3))
    assert sum(weight.numel() for weight in model.parameters()) == 1_626_442
