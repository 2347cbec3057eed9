"""FedHKD with our real ClientApp, against naive loops; only the wire is a grid in memory."""

import copy

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from flwr_distill.client.local_round import LocalRound
from flwr_distill_baselines.fedhkd.client import own_knowledge
from flwr_distill_baselines.fedhkd.method import FedHKDSettings
from flwr_distill_baselines.fedhkd.strategy import FedHKD

from .naive import (
    UNEQUAL,
    assert_by_class,
    by_class,
    mean_over_nodes,
    play,
    sessions,
    start,
    trained,
)
from .rounds import MODEL

NODES = 3
WIDTH = MODEL[-1].in_features
T, LAMBDA, GAMMA = 0.7, 0.4, 0.3


def strategy_of(**settings):
    own = {"prediction_weight": LAMBDA, "feature_weight": GAMMA, "temperature": T, "noise": 0.0}
    return FedHKD(model=MODEL, **{**own, **settings})


def naive_round(nodes, model, features, predictions, server_round):
    """The global model and hyper-knowledge after a round, class by class."""

    def knowledge(model, x, y):
        own, distance, divergence = model[:-1](x), 0.0, 0.0
        for c, mean in features.items():
            distance = distance + (own[y == c] - mean.float()).square().sum()
            q = (model[-1](mean.float()) / T).softmax(0)
            wanted = predictions[c].float()
            divergence = divergence + (wanted * (wanted.log() - q.log())).sum()
        return LAMBDA * divergence / max(len(features), 1) + GAMMA * distance / own.numel()

    models = [trained(session, model, server_round, knowledge) for session in nodes]
    of_features, of_predictions = [], []
    for session, own in zip(nodes, models, strict=True):
        data = session.data.train
        of_features.append(by_class(own[:-1](data.inputs).detach(), data.labels))
        soft = (own(data.inputs) / T).softmax(1).detach()
        of_predictions.append(by_class(soft, data.labels))
    sizes = [len(session.data.train) for session in nodes]
    mean = copy.deepcopy(model)
    mean.load_state_dict(
        {
            name: sum(
                n * own.state_dict()[name].double() for n, own in zip(sizes, models, strict=True)
            ).float()
            / sum(sizes)
            for name in model.state_dict()
        }
    )
    return mean, mean_over_nodes(of_features), mean_over_nodes(of_predictions)


def test_rounds_equal_the_papers_steps_as_plain_loops(client_grid, tmp_path):
    grid, strategy, arrays = client_grid(NODES, UNEQUAL), strategy_of(), start(MODEL)
    nodes = sessions(UNEQUAL, tmp_path, NODES)
    model, features, predictions = MODEL, {}, {}
    for server_round in (1, 2):
        arrays = play(strategy, grid, server_round, arrays)
        model, features, predictions = naive_round(
            nodes, model, features, predictions, server_round
        )
        for name, value in model.state_dict().items():
            found = torch.from_numpy(arrays[name].numpy())
            torch.testing.assert_close(found, value, atol=1e-5, rtol=0)
        assert_by_class(strategy.features, features, atol=1e-4)
        assert_by_class(strategy.predictions, predictions, atol=1e-4)
    assert all(len(s.data.train.labels.unique()) < 10 for s in nodes)  # each misses classes


def test_noise_on_the_features_has_the_deviation_asked_for_and_predictions_have_none(tmp_path):
    (session, *_) = sessions(UNEQUAL, tmp_path, 1)
    content = RecordDict({"arrays": start(MODEL), "config": ConfigRecord({})})
    local = LocalRound.of(session, content)

    def knowledge(noise):
        generator = torch.Generator().manual_seed(1)
        return own_knowledge(local, FedHKDSettings(noise=noise), generator)

    plain, noisy = knowledge(0.0), knowledge(3.0)
    added = noisy["features"] - plain["features"]
    assert added.numel() >= 4 * WIDTH
    assert added.std() == pytest.approx(3.0, rel=0.15)
    assert added.mean() == pytest.approx(0.0, abs=0.6)
    assert torch.equal(noisy["predictions"], plain["predictions"])


def test_the_noise_does_not_follow_from_the_runs_seed(client_grid):
    def features():
        strategy = strategy_of(noise=2.0, min_train_nodes=1, min_available_nodes=1)
        play(strategy, client_grid(1, UNEQUAL), 1, start(MODEL))
        return strategy.features

    one, other = (features() for _ in range(2))
    assert all(not np.allclose(one[c], other[c], atol=0.1) for c in one)
