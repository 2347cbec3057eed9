"""FedHKD with our real ClientApp, against naive loops; only the wire is a grid in memory."""

import copy
import logging
import re

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from flwr_distill.client.local_round import LocalRound
from flwr_distill.protocol.arrays import as_record
from flwr_distill.server.privacy import check_privacy
from flwr_distill.server.settings import RunSettings
from flwr_distill.strategies.common.registry import find_strategy
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import create_model
from flwr_distill_baselines.fedhkd.client import own_knowledge
from flwr_distill_baselines.fedhkd.method import HYPER_KNOWLEDGE, FedHKDSettings
from flwr_distill_baselines.fedhkd.strategy import FedHKD

from .naive import (
    FIRST,
    UNEQUAL,
    assert_by_class,
    by_class,
    mean_over_nodes,
    play,
    sessions,
    spoil,
    start,
    trained,
)

NODES = 3
MODEL = create_model("auto", load_dataset("digits").spec, seed=0)
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


BAD = {
    "other width": {"features": np.ones((1, WIDTH + 1), np.float32)},
    "no such class": {"classes": np.array([10])},
    "nan": {"features": np.full((1, WIDTH), np.nan, np.float32)},
    "no distribution": {"predictions": np.full((1, 10), 0.2, np.float32)},
    "negative": {"predictions": np.array([[2, -1] + [0] * 8], np.float32)},
    "other classes": {"predictions": np.full((1, 5), 0.2, np.float32)},
}


@pytest.mark.parametrize("how", [*BAD, "nothing"])
def test_a_malformed_reply_is_set_aside_and_the_round_goes_on(
    memory_grid, how, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    honest = {"classes": np.array([3]), "counts": np.array([5])}
    honest["features"] = np.ones((1, WIDTH), np.float32)
    honest["predictions"] = np.full((1, 10), 0.1, np.float32)

    def answer(message):
        metrics = MetricRecord({"num-examples": 10, "train-loss": 1.0})
        records = {"arrays": start(MODEL), "metrics": metrics}
        return RecordDict({**records, HYPER_KNOWLEDGE: as_record(honest)})

    def change(content):
        if how == "nothing":
            del content[HYPER_KNOWLEDGE]
        else:
            content[HYPER_KNOWLEDGE] = as_record({**honest, **BAD[how]})

    grid = memory_grid({FIRST: answer, FIRST + 1: answer})
    spoil(grid, FIRST, change)
    strategy, arrays = strategy_of(), start(MODEL)
    with caplog.at_level(logging.WARNING):
        after = play(strategy, grid, 1, arrays)
    assert re.search(rf"Reply of node {FIRST} to \S+ rejected", caplog.text)
    assert after is not arrays
    assert_by_class(strategy.features, {3: torch.ones(WIDTH)}, 0)


def test_what_the_server_sends_after_a_restart_is_what_it_would_have_sent(client_grid):
    first, again = strategy_of(), strategy_of()
    play(first, client_grid(NODES, UNEQUAL), 1, start(MODEL))
    again.load_state_dict(first.state_dict())
    assert first.records() == again.records()
    assert HYPER_KNOWLEDGE in again.records()


def test_differential_privacy_is_refused_by_server_and_node(client_grid):
    settings = RunSettings.from_run_config({"strategy": "fedhkd", "train.dp-noise": 1.0})
    with pytest.raises(SettingsError, match=r"strategy = 'fedhkd': .*not calibrated"):
        check_privacy(settings, find_strategy("fedhkd")[1])
    grid = client_grid(NODES, {**UNEQUAL, "train.dp-noise": 1.0})
    messages = strategy_of().configure_train(1, start(MODEL), ConfigRecord(), grid)
    for reply in grid.send_and_receive(messages):
        assert "FedHKD's hyper-knowledge has no differential privacy" in reply.error.reason


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"temperature": 0.0}, "temperature = 0.0"), ({"noise": -1.0}, "noise = -1.0")],
)
def test_settings_out_of_range_are_refused_by_name(settings, said):
    with pytest.raises(SettingsError, match=f"fedhkd: {said}"):
        strategy_of(**settings)
