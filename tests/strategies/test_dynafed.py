"""DynaFed: FedAvg up to the distillation, then tuned averages; its state is resumed too."""

import copy

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord, RecordDict
from torch.nn import functional

import flwr_distill_baselines.dynafed.strategy
from flwr_distill.distill.augmentation import draw_augmentation
from flwr_distill.distill.errors import DistillError
from flwr_distill.protocol.arrays import as_record, as_tensors
from flwr_distill.strategies.common.checked import CheckedFedAvg
from flwr_distill.strategies.common.draws import round_generator
from flwr_distill_baselines.dynafed.method import DynaFedSettings
from flwr_distill_baselines.dynafed.strategy import DynaFed

from .rounds import MODEL, SPEC, play, start

LITTLE = {"trajectory": 2, "per_class": 1, "distill_steps": 2, "follow_steps": 2, "tune_steps": 3}


def strategy_of(**settings):
    return DynaFed(model=MODEL, spec=SPEC, fraction_evaluate=0.0, **{**LITTLE, **settings})


def node(seed):
    """A node whose model moves a little, and not the same way in each round."""

    def answer(message):
        server_round = message.content["config"]["server-round"]
        rng = np.random.default_rng([seed, server_round])
        sent = {
            name: array.numpy() + 0.01 * rng.normal(size=array.shape).astype(np.float32)
            for name, array in message.content["arrays"].items()
        }
        metrics = MetricRecord({"num-examples": 10 * seed, "train-loss": 1.0})
        return RecordDict({"arrays": as_record(sent), "metrics": metrics})

    return answer


@pytest.fixture
def grid(memory_grid):
    return memory_grid({seed: node(seed) for seed in (1, 2)})


def assert_equal(found, expected):
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name].numpy(), array.numpy(), err_msg=name)


def test_it_is_fedavg_until_it_has_its_trajectory(grid):
    strategy, plain = strategy_of(), CheckedFedAvg(fraction_evaluate=0.0)
    assert_equal(play(strategy, grid, 1, start()), play(plain, grid, 1, start()))
    assert strategy.virtual is None
    assert strategy.artifacts() == {}


def test_it_distils_the_models_of_so_many_rounds_once(grid, monkeypatch):
    given = []
    real = flwr_distill_baselines.dynafed.strategy.match_trajectory

    def match(trajectory, *arguments, **settings):
        given.append(trajectory)
        return real(trajectory, *arguments, **settings)

    monkeypatch.setattr(flwr_distill_baselines.dynafed.strategy, "match_trajectory", match)
    strategy, plain = strategy_of(), CheckedFedAvg(fraction_evaluate=0.0)
    first = play(strategy, grid, 1, start())
    average = play(plain, grid, 2, first)
    arrays = play(strategy, grid, 2, first)
    for found, expected in zip(given[0], [start(), first, average], strict=True):
        assert found.keys() == dict(MODEL.named_parameters()).keys()
        assert all(np.array_equal(found[name].numpy(), expected[name].numpy()) for name in found)
    play(strategy, grid, 3, arrays)
    assert len(given) == 1
    assert strategy.trajectory == {}
    assert set(strategy.artifacts()) == {"virtual.safetensors", "virtual.png"}


def test_from_then_on_each_average_is_tuned_by_adam_on_the_virtual_data(grid):
    strategy, plain = strategy_of(), CheckedFedAvg(fraction_evaluate=0.0)
    arrays = start()
    for server_round in (1, 2):
        arrays = play(strategy, grid, server_round, arrays)
    average, found = (play(s, grid, 3, arrays) for s in (plain, strategy))
    model = copy.deepcopy(MODEL)
    model.load_state_dict(as_tensors({n: a.numpy() for n, a in average.items()}))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    draws = round_generator(strategy._seed, 3)
    for _ in range(3):
        rows = torch.randperm(10, generator=draws)
        images = draw_augmentation(8, 8, draws)(strategy.virtual.images)
        losses = -(strategy.virtual.soft_labels * model(images).log_softmax(1)).sum(1)
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        assert len(rows) == 10
    moved = 0.0
    for name, weight in model.state_dict().items():
        np.testing.assert_allclose(found[name].numpy(), weight.numpy(), atol=2e-6)
        moved = max(moved, float(np.abs(found[name].numpy() - average[name].numpy()).max()))
    assert 1e-4 < moved < 4e-4  # three steps of Adam


@pytest.mark.parametrize("stopped_after", [1, 2, 3])
def test_it_goes_on_from_its_state_as_if_it_had_not_stopped(grid, stopped_after):
    strategy, arrays = strategy_of(), start()
    for server_round in range(1, stopped_after + 1):
        arrays = play(strategy, grid, server_round, arrays)
    again = strategy_of()
    again.load_state_dict(strategy.state_dict())
    for server_round in range(stopped_after + 1, 5):
        whole = play(strategy, grid, server_round, arrays)
        assert_equal(play(again, grid, server_round, arrays), whole)
        arrays = whole


def test_a_distillation_that_fails_is_said_and_leaves_fedavg(grid, monkeypatch, flower_log):
    def fails(*given, **settings):
        raise DistillError("images must be finite")

    monkeypatch.setattr(flwr_distill_baselines.dynafed.strategy, "match_trajectory", fails)
    strategy, plain, arrays = strategy_of(), CheckedFedAvg(fraction_evaluate=0.0), start()
    for server_round in (1, 2, 3):
        expected = play(plain, grid, server_round, arrays)
        arrays = play(strategy, grid, server_round, arrays)
        assert_equal(arrays, expected)
    assert "starts a new trajectory: images must be finite" in flower_log.text
    assert list(strategy.trajectory) == [0, 1]


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        (20, "dynafed.trajectory = 25: this run has 20 rounds"),
        (25, "set dynafed.trajectory to 12, or num-rounds above 25"),
        (26, ""),
        (0, ""),
    ],
)
def test_a_run_that_is_too_short_says_so_before_it_begins(a_run, rounds, said, flower_log):
    strategy = DynaFed.from_run(DynaFedSettings(), a_run(num_rounds=rounds))
    assert strategy.settings == DynaFedSettings()
    assert said in flower_log.text
    assert bool(flower_log.text) == bool(said)


def test_soft_labels_are_learned_as_probabilities(grid):
    strategy, arrays = strategy_of(), start()
    for server_round in (1, 2):
        arrays = play(strategy, grid, server_round, arrays)
    soft = strategy.virtual.soft_labels
    assert functional.softmax(soft.log(), dim=1).allclose(soft, atol=1e-5)
    assert not torch.allclose(soft, torch.full_like(soft, 0.1), atol=1e-4)
