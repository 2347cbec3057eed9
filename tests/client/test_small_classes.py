"""Classes that a node's owner finds too small are in none of the virtual data that methods make."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import nn

from flwr_distill.client.app import app
from flwr_distill.client.session import Session
from flwr_distill.distill import formation
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.node.parcels import virtual_data_for_server
from flwr_distill.strategies.feddm.method import DISTILL_AROUND
from flwr_distill.strategies.fedlgd.client import virtual_samples
from flwr_distill.strategies.fedlgd.method import VirtualTraining
from flwr_distill.strategies.hfldd.distillation import distilled
from flwr_distill.strategies.hfldd.requests import Distillation
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import create_model
from flwr_distill_baselines.fedaf.method import CLASS_KNOWLEDGE, DISTILL_WITH_PEERS, KNOWLEDGE

FEWEST = 20


@pytest.fixture
def context(tmp_path):
    """A node with enough images of the classes 0 and 2, and one too few of 1."""
    digits = load_dataset("digits").train
    of = [np.flatnonzero(digits.labels == c)[:n] for c, n in enumerate((30, FEWEST - 1, FEWEST))]
    own = np.concatenate(of)
    file = tmp_path / "own.npz"
    np.savez(file, images=digits.images[own, 0], labels=digits.labels[own])
    node = {"data": str(file), "state-dir": str(tmp_path), "fewest-of-a-class": FEWEST}
    return Context(1, 5, node, RecordDict(), {"train.holdout": 0.0})


def sent(context, message_type, content):
    """The virtual data that leave for the server, as the node's guard sees them."""
    reply = app(Message(content, 5, message_type), context).content
    (payload,) = virtual_data_for_server(reply).values()
    return VirtualData.from_bytes(payload.content).labels


def with_model():
    model = create_model("auto", load_dataset("digits").spec, seed=0)
    return RecordDict({"arrays": ArrayRecord(model.state_dict()), "config": ConfigRecord({})})


def by_hfldd(context, epsilon=0.0):
    request = Distillation(distiller="dm", start="noise", distill_steps=1, dp_epsilon=epsilon)
    return VirtualData.from_bytes(distilled(context, request).payload).labels


def by_fedlgd(context, epsilon=0.0):
    request = VirtualTraining(per_class=2, first_steps=1, dp_epsilon=epsilon)
    return virtual_samples(Session.of(context), nn.Identity(), request, 1).labels


def by_feddm(context):
    content = with_model()
    content[DISTILL_AROUND] = ConfigRecord({"per-class": 2, "distill-steps": 1})
    return sent(context, DISTILL_AROUND, content)


def by_fedaf(context):
    content = with_model()
    content[CLASS_KNOWLEDGE] = ConfigRecord({})
    told = app(Message(content, 5, CLASS_KNOWLEDGE), context).content
    assert told.array_records[KNOWLEDGE]["classes"].numpy().tolist() == [0, 2]
    content = RecordDict({KNOWLEDGE: told.array_records[KNOWLEDGE], "config": ConfigRecord({})})
    content[DISTILL_WITH_PEERS] = ConfigRecord({"per-class": 2, "distill-steps": 1})
    return sent(context, DISTILL_WITH_PEERS, content)


@pytest.mark.parametrize(
    "labels_by",
    [
        by_hfldd,
        lambda context: by_hfldd(context, epsilon=5.0),
        by_fedlgd,
        lambda context: by_fedlgd(context, epsilon=5.0),
        by_feddm,
        by_fedaf,
    ],
    ids=["hfldd", "hfldd, private", "fedlgd", "fedlgd, private", "feddm", "fedaf"],
)
def test_a_class_that_is_too_small_is_in_no_virtual_data(labels_by, context):
    assert torch.unique(labels_by(context)).tolist() == [0, 2]


@pytest.mark.parametrize("labels_by", [by_hfldd, by_feddm, by_fedaf])
def test_no_more_virtual_images_are_made_than_the_owner_lets_leave(labels_by, context):
    context.node_config["real-per-virtual"] = FEWEST // 2
    assert labels_by(context).tolist() == [0, 0, 2, 2]
    assert len(by_hfldd(context, epsilon=5.0)) == Distillation().distilled_size


def test_of_features_a_virtual_one_needs_no_more_real_ones_than_it_holds(context, monkeypatch):
    """An image may hold four smaller ones, and a vector of features is one."""
    monkeypatch.setattr(formation, "MIN_SIDE", 8)  # that of digits
    context.node_config["real-per-virtual"] = FEWEST // 2
    with pytest.raises(SettingsError, match=r"40 samples of a class.* 20"):
        by_hfldd(context)
    context.run_config["model"] = "random-features"
    assert by_hfldd(context).tolist() == [0, 0, 2, 2]


def test_auto_takes_no_distiller_that_the_owner_would_not_let_leave(context):
    context.node_config["fewest-of-a-class"] = 30  # of one class, auto takes KIP
    request = Distillation(distiller="auto", start="noise", distill_steps=1)
    assert VirtualData.from_bytes(distilled(context, request).payload).method.startswith("kip")
    context.node_config["real-per-virtual"] = 2
    request = request.model_copy(update={"distill_steps": 2})  # else the first ones count
    assert VirtualData.from_bytes(distilled(context, request).payload).method == "dm"


def test_of_too_few_real_images_there_is_no_virtual_one(context):
    context.node_config["real-per-virtual"] = FEWEST + 1
    with pytest.raises(SettingsError, match=r"21 samples of a class.* 20"):
        by_hfldd(context)
