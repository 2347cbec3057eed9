"""Sectors, leaders and means of FedHEAD, against FedAvg and chance."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from flwr_distill.strategies.common.averages import weighted_mean
from flwr_distill.strategies.fedhead.membership import assign_sectors, draw_leader


def model(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {
        "weight": (scale * rng.standard_normal((3, 4))).astype(np.float32),
        "bias": (scale * rng.standard_normal(3)).astype(np.float32),
    }


federations = st.lists(
    st.lists(st.integers(1, 5000), min_size=1, max_size=5), min_size=1, max_size=5
)


@settings(max_examples=60, deadline=None)
@given(federations, st.integers(0, 1000))
def test_sector_means_and_their_mean_are_fedavg(sectors, seed):
    """Eq. 9-10, with one sector or many."""
    sizes = [size for sector in sectors for size in sector]
    models = [model(seed + i) for i in range(len(sizes))]
    remaining = iter(models)
    sector_models = [
        (sum(sector), weighted_mean([(size, next(remaining)) for size in sector]))
        for sector in sectors
    ]
    found = weighted_mean(sector_models)
    for name, array in found.items():
        expected = np.zeros(array.shape)
        for size, arrays in zip(sizes, models, strict=True):
            expected += size / sum(sizes) * arrays[name].astype(np.float64)
        np.testing.assert_allclose(array, expected, atol=1e-6)


def test_the_mean_keeps_types_and_rounds_counters():
    models = [
        (1.0, {"w": np.float32([1, 2]), "steps": np.array(3)}),
        (3.0, {"w": np.float32([5, 6]), "steps": np.array(4)}),
    ]
    mean = weighted_mean(iter(models))
    assert mean["w"].dtype == np.float32
    assert mean["w"].tolist() == [4, 5]
    assert (mean["steps"].dtype, mean["steps"].shape, mean["steps"]) == (np.int64, (), 4)
    with pytest.raises(ValueError, match="no models"):
        weighted_mean([])


def test_leaders_come_as_often_as_their_share_of_the_samples():
    num_examples = np.array([10, 40, 0, 150, 100])
    generator = np.random.default_rng(0)
    drawn = Counter(draw_leader(num_examples, generator) for _ in range(6000))
    assert drawn[2] == 0
    held = [0, 1, 3, 4]
    expected = 6000 * num_examples[held] / num_examples.sum()
    assert chisquare([drawn[k] for k in held], expected).pvalue > 0.01


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 99))
def test_drawn_sectors_hold_every_node_once_and_differ_by_one_at_most(nodes, sectors, seed):
    sector_of = assign_sectors(dict.fromkeys(range(nodes)), sectors, np.random.default_rng(seed))
    sizes = Counter(sector_of.values())
    assert sector_of.keys() == set(range(nodes))
    assert len(sizes) == min(nodes, sectors)
    assert max(sizes.values()) - min(sizes.values()) <= 1


def test_sectors_are_drawn_from_the_seed():
    def draw(seed):
        return assign_sectors(dict.fromkeys(range(20)), 4, np.random.default_rng(seed))

    assert draw(1) == draw(1) != draw(2)


def test_declared_sectors_stand_and_others_join_the_smallest():
    declared = {1: 7, 2: 7, 3: 5, 4: None, 5: None}
    sector_of = assign_sectors(declared, 9, np.random.default_rng(0))
    assert {node: sector_of[node] for node in (1, 2, 3)} == {1: 7, 2: 7, 3: 5}
    assert sorted([sector_of[4], sector_of[5]]) == [5, 5]


def test_a_late_node_joins_the_smallest_sector_and_moves_nobody():
    known = {1: 0, 2: 0, 3: 1}
    sector_of = assign_sectors(
        {**dict.fromkeys(known), 4: None}, 2, np.random.default_rng(0), known
    )
    assert sector_of == {**known, 4: 1}
