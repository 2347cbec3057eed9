"""Training on virtual images in place of samples, with whatever strategy."""

from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from flwr_distill.client.session import Session, held_out, virtual_per_class
from flwr_distill.client.training import train_round
from flwr_distill.client.virtual_data import TRAINED_ON, samples_of
from flwr_distill.distill.distribution_matching import distill_dm
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.protocol.messages import NUM_EXAMPLES, REAL_PER_VIRTUAL
from flwr_distill.strategies.fedlgd.client import virtual_samples
from flwr_distill.strategies.fedlgd.method import VirtualTraining
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import TaskSettings, TrainSettings
from tests.errors import at

FEW = {"virtual.per-class": 2, "virtual.first-steps": 3}
VIRTUAL = {"train.on": "virtual", "train.local-epochs": 1, "partition.classes": 5, **FEW}
SPEC = load_dataset("digits").spec
MODEL = create_model("auto", SPEC, seed=0)


@pytest.fixture
def session_of(tmp_path):
    def session_of(**config):
        node = {"partition-id": 0, "num-partitions": 2, "state-dir": str(tmp_path / "own")}
        return Session.of(Context(1, 5, node, RecordDict(), {**VIRTUAL, **config}))

    return session_of


def test_a_plain_train_message_trains_on_images_distilled_of_the_samples(client_grid, session_of):
    grid = client_grid(2, VIRTUAL)
    real = session_of(**{"train.on": "real"})
    made = distill_dm(
        real.data.train.inputs,
        real.data.train.labels,
        num_classes=10,
        per_class=2,
        steps=3,
        generator=real.generator("virtual"),
    )
    samples = samples_of(VirtualData.from_bytes(made.to_bytes()), real.device)
    for server_round in (1, 2):
        config = ConfigRecord({"lr": 0.1, "server-round": server_round})
        content = RecordDict({"arrays": ArrayRecord(MODEL.state_dict()), "config": config})
        (answer,) = grid.send_and_receive([Message(content, grid.get_node_ids()[0], "train")])
        reply = answer.content
        expected = create_model("auto", SPEC, seed=0)
        settings = TrainSettings(lr=0.1, local_epochs=1)
        train_round(expected, samples, settings, real.generator("train", server_round))
        assert reply["metrics"][NUM_EXAMPLES] == len(samples) == 10
        for name, weight in expected.state_dict().items():
            found = torch.tensor(reply["arrays"][name].numpy())
            torch.testing.assert_close(found, weight, atol=1e-6, rtol=0)


def test_samples_are_for_evaluation_and_are_what_a_node_describes(session_of):
    virtual, real = session_of(), session_of(**{"train.on": "real"})
    assert virtual.store.read(TRAINED_ON) is None  # a session alone distils nothing
    assert torch.equal(held_out(virtual).inputs, real.data.holdout.inputs)
    assert len(virtual.own.train) == len(real.data.train)
    assert virtual.store.read(TRAINED_ON) is None
    assert len(virtual.data.train) == 2 * 5
    assert torch.equal(virtual.data.holdout.inputs, real.data.holdout.inputs)
    assert torch.equal(session_of().data.train.inputs, virtual.data.train.inputs)


def test_they_are_those_that_fedlgd_starts_from(session_of):
    request = VirtualTraining(per_class=2, first_steps=3)
    of_fedlgd = virtual_samples(session_of(**{"train.on": "real"}), MODEL, request, 1)
    assert torch.equal(session_of().data.train.inputs, of_fedlgd.inputs)


def test_a_policy_counts_the_samples_behind_virtual_images(session_of):
    session = session_of(**{"virtual.per-class": 60})
    real = int(session.own.train.labels.bincount()[:5].min())
    bounded = replace(session, node_config={**session.node_config, REAL_PER_VIRTUAL: real})
    assert virtual_per_class(bounded, 60) == 1


def test_noise_in_training_would_protect_images_and_not_samples():
    with pytest.raises(SettingsError, check=at("train.dp-noise", value=1.0)):
        TaskSettings.from_run_config({"train.on": "virtual", "train.dp-noise": 1.0})
