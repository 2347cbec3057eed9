"""The benchmark of attacks: hostile nodes do what an attack says, and cells come out whole."""

import json
import sys

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from benchmarks import attacks
from benchmarks.hostile import DEVIATIONS, OVERSIZED_IMAGES, Attack, Ring, with_trigger
from benchmarks.remembering import remembered
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.protocol.arrays import as_arrays
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.models import create_model

CONFIG = {"train.local-epochs": 1, "train.batch-size": 64}


@pytest.fixture
def trained(client_grid):
    """What the first node sends after training, honest or attacking."""
    start = create_model("auto", load_dataset("digits").spec, seed=0).state_dict()

    def reply(attack):
        (node,) = client_grid(1, CONFIG).nodes.values()
        config = ConfigRecord({"server-round": 1, "lr": 0.05})
        message = Message(RecordDict({"arrays": ArrayRecord(start), "config": config}), 5, "train")
        message.metadata.__dict__["_message_id"] = "1"
        return Ring(attack, 0.2).hostile(node)(message)

    reply.start = {name: value.numpy() for name, value in start.items()}
    return reply


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        (Attack.NAN, lambda start, own: own * np.nan),
        (Attack.LONG, lambda start, own: start + 1000 * (own - start)),
        (Attack.REVERSED, lambda start, own: 2 * start - own),
        (Attack.FREE_RIDER, lambda start, own: start),
    ],
)
def test_a_hostile_node_sends_what_the_attack_makes_of_what_it_trained(trained, attack, expected):
    honest, sent = as_arrays(trained(Attack.NONE)["arrays"]), as_arrays(trained(attack)["arrays"])
    for name, start in trained.start.items():
        wanted = expected(start, honest[name])
        np.testing.assert_allclose(sent[name], wanted, rtol=1e-3, atol=1e-3, err_msg=name)


def test_a_claim_goes_with_a_reversed_update(trained):
    honest, sent = trained(Attack.NONE), trained(Attack.REVERSED_AND_INFLATED)
    assert sent["metrics"]["num-examples"] == 992 * honest["metrics"]["num-examples"]


def test_flipped_labels_train_another_model(trained):
    honest, sent = trained(Attack.NONE), trained(Attack.FLIPPED_LABELS)
    name = next(iter(trained.start))
    assert not np.allclose(honest["arrays"][name].numpy(), sent["arrays"][name].numpy(), atol=1e-4)


def test_a_little_is_enough_is_the_mean_and_some_deviations():
    known = [torch.tensor([float(i)]) for i in range(5)]
    sent = Ring(Attack.A_LITTLE, 0.2).spoil(torch.zeros(1), known)
    assert float(sent) == pytest.approx(2 + DEVIATIONS * np.std(range(5)))


def test_model_replacement_makes_the_mean_the_rings_model():
    start, own = torch.tensor([1.0]), torch.tensor([3.0])
    sent = Ring(Attack.BACKDOOR, 0.2).spoil(start, [own])
    assert float(0.8 * start + 0.2 * sent) == pytest.approx(3.0)


def test_the_trigger_is_in_a_corner_alone():
    images = torch.rand(2, 1, 8, 8)
    changed = (with_trigger(images) != images).nonzero()[:, 2:]
    assert changed.min() >= 6


@pytest.mark.parametrize(("changed", "calls"), [({}, 1), ({"labels": 1}, 2), ({"network": 1}, 3)])
def test_the_same_samples_are_distilled_once(changed, calls):
    """But not those of other labels, nor with features of a model."""
    seen = []

    def distil(images, *, labels, generator, network=None):
        seen.append(labels)
        return object()

    def ask(labels=0, **more):
        images, label = torch.zeros(2, 1, 8, 8), torch.full((2,), labels)
        generator = torch.Generator().manual_seed(0)
        return remembering(images, labels=label, generator=generator, **more)

    remembering = remembered(distil)
    first = ask()
    assert ask() is first
    ask(**changed)
    ask(**changed)
    assert len(seen) == calls


def test_an_oversized_parcel_is_well_formed(client_grid, monkeypatch):
    import benchmarks.hostile

    class Known:
        data = type("Data", (), {"spec": load_dataset("digits").spec})
        generator = staticmethod(lambda purpose: torch.Generator().manual_seed(0))

    monkeypatch.setattr(benchmarks.hostile.Session, "of", lambda context: Known)
    virtual = VirtualData.from_bytes(benchmarks.hostile._oversized_virtual_data(None, None).payload)
    virtual.validate((1, 8, 8), 10)
    assert len(virtual) == OVERSIZED_IMAGES


def test_a_cell_compares_a_run_with_the_same_run_without_the_hostile_nodes(tmp_path, monkeypatch):
    file = tmp_path / "cells.json"
    result = "--strategies fedavg --attacks NaN --seeds 0 --rounds 1 --defence off --jobs 1 --json"
    monkeypatch.setattr(sys, "argv", ["attacks", *result.split(), str(file)])
    attacks.main()
    (cell,) = json.loads(file.read_text())["cells"]
    assert (cell["strategy"], cell["attack"], cell["hostile"]) == ("fedavg", "NaN", 2)
    assert cell["accuracy"] == cell["absent_accuracy"]
    assert cell["set_aside"] == 2
