"""Local training of a frozen network's head: on features, computed once, as if on images."""

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict

from flwr_distill.client import local_round
from flwr_distill.client.local_round import LocalRound
from flwr_distill.client.session import Session
from flwr_distill.task.backbones.random_features import RandomFourier
from flwr_distill.task.models import model_of

CONFIG = {
    "dataset": "digits",
    "model": "random-features",
    "partition.scheme": "iid",
    "train.lr": 1.0,
}


@pytest.fixture
def weights_after(tmp_path):
    """The model's state after a round of local training with these settings."""

    def weights_after(**changes):
        node = {"partition-id": 0, "num-partitions": 10, "state-dir": str(tmp_path)}
        context = Context(1, 5, {**node, "device": "cpu"}, RecordDict(), {**CONFIG, **changes})
        session = Session.of(context)
        model = model_of(session.task, session.data.spec, seed=0)
        told = {"config": ConfigRecord({"server-round": 1})}
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), **told})
        local = LocalRound.of(session, content)
        local.train(session.data.train)
        return local.model.state_dict()

    return weights_after


@pytest.fixture
def shown(monkeypatch):
    """Numbers of images that the network was shown at a time."""
    numbers, forward = [], RandomFourier.forward

    def noting(network, images):
        numbers.append(len(images))
        return forward(network, images)

    monkeypatch.setattr(RandomFourier, "forward", noting)
    return numbers


def test_a_head_learns_from_kept_features_what_it_learns_from_images(weights_after, monkeypatch):
    quick = weights_after()
    monkeypatch.setattr(local_round, "as_seen", lambda session, inputs: inputs)
    slow = weights_after()
    assert (slow["head.weight"] - quick["head.weight"]).abs().max() < 1e-3
    assert (slow["head.weight"]).abs().max() > 0.1
    assert slow.keys() == quick.keys() == {"head.weight", "head.bias"}  # no more is sent


def test_the_network_sees_a_nodes_images_once_in_all_rounds_and_runs(weights_after, shown):
    weights_after()
    before = len(shown)
    weights_after()
    assert set(shown[before:]) <= {1, 2}  # zeros, to check what the model returns


@pytest.mark.parametrize("change", [{"backbone.trains": "all"}, {"train.augment": "shift"}])
def test_where_features_change_the_network_sees_the_images_of_each_epoch(
    weights_after, shown, change
):
    weights_after(**change)
    assert sum(shown) > 2 * 100  # two epochs of more than a hundred images
