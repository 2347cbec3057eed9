"""A node's side of FedLGD: what it keeps, what it refuses, which gradient it sends."""

import copy
import hashlib
from dataclasses import replace

import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from torch import nn
from torch.nn import functional

from flwr_distill.client.dp_sgd import PrivacyAccount
from flwr_distill.client.session import Session
from flwr_distill.distill.errors import VirtualDataError
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.strategies.fedlgd import client as fedlgd
from flwr_distill.strategies.fedlgd.client import (
    global_samples,
    joined,
    loss_gradient,
    virtual_samples,
)
from flwr_distill.strategies.fedlgd.method import GLOBAL_DATA, VIRTUAL, VirtualTraining
from flwr_distill.task.datasets import Samples
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import create_model
from tests.errors import at

REQUEST = VirtualTraining(per_class=2, first_steps=3)


@pytest.fixture
def session(tmp_path):
    node = {"partition-id": 0, "num-partitions": 2, "state-dir": str(tmp_path)}
    return Session.of(Context(1, 5, node, RecordDict(), {"partition.classes": 5}))


def virtual(images=None, labels=(0, 9)):
    images = torch.randn(2, 1, 8, 8) if images is None else images
    return VirtualData(images, torch.tensor(labels), method="gm", steps=1, seed=0, init="noise")


def record(payload, digest=None, sent=True):
    digest = digest or hashlib.sha256(payload).hexdigest()
    return ConfigRecord({"digest": digest, "payload": payload if sent else b""})


def test_a_node_has_so_many_images_of_each_class_that_it_holds(session):
    made = virtual_samples(session, nn.Identity(), REQUEST, 1)
    held = torch.unique(session.data.train.labels)
    assert made.labels.tolist() == held.repeat_interleave(2).tolist()
    assert len(held) < session.data.spec.num_classes
    assert made.inputs.shape[1:] == session.data.spec.shape


def test_nodes_train_on_each_small_image_enlarged(session):
    request = REQUEST.model_copy(update={"formation": 2, "refine_steps": 1})
    model = create_model("auto", session.data.spec, seed=0)
    made = virtual_samples(session, model, request, 1)
    kept = VirtualData.from_bytes(session.store.at(1).read(fedlgd.OWN))
    assert (kept.formation, len(made)) == (2, 4 * len(kept))
    assert torch.equal(made.inputs, kept.decoded().images)
    of_server = replace(virtual(), formation=2)
    received = global_samples(session, record(of_server.to_bytes()))
    assert received.labels.tolist() == [0] * 4 + [9] * 4


def test_virtual_data_are_made_once_and_equal_after_a_restart(session):
    made = virtual_samples(session, nn.Identity(), REQUEST, 1)
    again = virtual_samples(session, nn.Identity(), REQUEST, 2)
    assert torch.equal(made.inputs, again.inputs)


def test_private_virtual_data_are_released_once_and_never_refined(session):
    private = REQUEST.model_copy(update={"dp_epsilon": 2.0})
    made = virtual_samples(session, nn.Identity(), private, 1)
    spent = PrivacyAccount.of(session, session.task.train).epsilon
    assert 1.9 < spent <= 2.0
    more = private.model_copy(update={"dp_epsilon": 3.0, "per_class": 4})
    assert torch.equal(virtual_samples(session, nn.Identity(), more, 2).inputs, made.inputs)
    assert PrivacyAccount.of(session, session.task.train).epsilon == spent
    with pytest.raises(SettingsError, match=r"fedlgd.dp-epsilon = 2.*: .*refine-steps to 0"):
        virtual_samples(session, nn.Identity(), private.model_copy(update={"refine_steps": 1}), 3)


def test_virtual_data_made_without_privacy_are_not_taken_for_private_ones(session):
    plain = virtual_samples(session, nn.Identity(), REQUEST, 1)
    private = REQUEST.model_copy(update={"dp_epsilon": 2.0})
    assert not torch.equal(virtual_samples(session, nn.Identity(), private, 2).inputs, plain.inputs)
    assert PrivacyAccount.of(session, session.task.train).epsilon > 0


def test_noise_does_not_follow_from_the_runs_seed(tmp_path):
    made = []
    for name in ("one", "other"):
        node = {"partition-id": 0, "num-partitions": 2, "state-dir": str(tmp_path / name)}
        session = Session.of(Context(1, 5, node, RecordDict(), {"partition.classes": 5}))
        private = REQUEST.model_copy(update={"dp_epsilon": 2.0})
        made.append(virtual_samples(session, nn.Identity(), private, 1).inputs)
    assert not torch.equal(*made)


def test_refining_brings_class_means_closer_in_the_models_features(session):
    model = create_model("auto", session.data.spec, seed=0)
    train = session.data.train

    @torch.no_grad()
    def distance(samples):
        own, real = model[:-1](samples.inputs), model[:-1](train.inputs)
        return sum(
            float((own[samples.labels == c].mean(0) - real[train.labels == c].mean(0)).norm())
            for c in torch.unique(train.labels)
        )

    before = virtual_samples(session, model, REQUEST, 1)
    request = REQUEST.model_copy(update={"refine_steps": 60})
    assert distance(virtual_samples(session, model, request, 1)) < 0.6 * distance(before)


def test_global_data_are_kept_and_found_again_by_their_digest(session):
    payload = virtual().to_bytes()
    assert global_samples(session, record(payload, sent=False)) is None
    first = global_samples(session, record(payload))
    again = global_samples(session, record(payload, sent=False))
    assert torch.equal(first.inputs, again.inputs)
    assert global_samples(session, record(virtual().to_bytes(), sent=False)) is None


@pytest.mark.parametrize(
    ("payload", "where", "value"),
    [
        (b"no data", "virtual data", None),
        (virtual(labels=(0, 10)).to_bytes(), "virtual label", 10),
        (virtual(images=torch.randn(2, 1, 9, 9)).to_bytes(), "shape of virtual images", (1, 9, 9)),
    ],
)
def test_global_data_that_do_not_fit_are_refused_and_not_kept(session, payload, where, value):
    with pytest.raises(VirtualDataError, check=at(where, value=value)):
        global_samples(session, record(payload))
    assert global_samples(session, record(payload, sent=False)) is None


def test_global_data_of_another_digest_are_refused(session):
    with pytest.raises(VirtualDataError, match="do not match their digest"):
        global_samples(session, record(virtual().to_bytes(), digest="0" * 64))


def test_the_gradient_is_that_of_the_mean_loss_in_however_many_pieces(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 5), nn.Linear(5, 3))
    samples = Samples(torch.randn(7, 1, 2, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0]))
    plain = copy.deepcopy(model).eval()
    functional.cross_entropy(plain(samples.inputs), samples.labels).backward()
    monkeypatch.setattr(fedlgd, "BATCH", 3)
    names = ["2.weight", "3.weight"]
    gradient = loss_gradient(model, samples, names)
    assert list(gradient) == names
    for name, found in gradient.items():
        torch.testing.assert_close(found, plain.get_parameter(name).grad)
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("name", ["no.weight", "2.weight", "1.running_mean"])
def test_the_gradient_of_what_is_not_trained_is_refused(name):
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model[2].requires_grad_(False)
    samples = Samples(torch.randn(2, 1, 2, 3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=f"trains no weight '{name}'"):
        loss_gradient(model, samples, [name])


def test_both_sets_are_joined_and_one_alone_is_left_as_it_is():
    own = Samples(torch.zeros(2, 1), torch.tensor([0, 1]))
    other = Samples(torch.ones(1, 1), torch.tensor([5]))
    assert joined(own, None) is own
    assert joined(own, other).labels.tolist() == [0, 1, 5]
    assert joined(own, other).inputs.flatten().tolist() == [0, 0, 1]


def test_mmd_draws_class_means_of_a_minibatch_to_those_of_the_servers_images(session):
    payload = virtual(labels=(0, 9)).to_bytes()
    request = {"per-class": 2, "first-steps": 3, "contrast": 0.3, "regulariser": "mmd"}
    content = RecordDict({VIRTUAL: ConfigRecord(request), GLOBAL_DATA: record(payload)})
    model = create_model("auto", session.data.spec, seed=0)
    term = fedlgd.Regulariser.of(session, content, model, session.task.train)
    inputs, labels = torch.randn(4, *session.data.spec.shape), torch.tensor([0, 0, 3, 9])
    found = term(inputs, labels, model(inputs))
    own = model[:-1](inputs)
    others = model[:-1](VirtualData.from_bytes(payload).decoded().images)
    apart = (own[:2].mean(0) - others[0]).square().sum() + (own[3] - others[1]).square().sum()
    torch.testing.assert_close(found, 0.3 * apart)
