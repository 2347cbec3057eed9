"""Accuracy and loss of a classifier, however many samples there are."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from flwr_distill.client.training import soft_labels
from flwr_distill.distill.ensemble import distil_ensemble
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.strategies.hfldd.client import knows
from flwr_distill.task.datasets import Samples
from flwr_distill.task.evaluation import BATCH, evaluate_model, outputs, predict
from flwr_distill_baselines.fedmd.client import logits_on
from flwr_distill_baselines.fedproto.client import nearest_prototype


@pytest.mark.parametrize("n", [1, BATCH, BATCH + 1, 2 * BATCH + 7])
def test_every_sample_counts_once_and_in_evaluation_mode(n):
    generator = torch.Generator().manual_seed(n)
    samples = Samples(
        torch.randn(n, 1, 2, 2, generator=generator), torch.randint(0, 3, (n,), generator=generator)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    model[1].running_mean.fill_(0.3)
    with torch.no_grad():
        logits = model.eval()(samples.inputs)
    model.train()
    accuracy, loss = evaluate_model(model, samples)
    assert not model.training
    assert accuracy == int((logits.argmax(1) == samples.labels).sum()) / n
    assert loss == pytest.approx(float(functional.cross_entropy(logits, samples.labels)), rel=1e-4)
    assert torch.equal(predict(model.train(), samples)[0], logits.argmax(1))


class Recorder(nn.Module):
    """A classifier of 3 classes that notes how many samples pass through it together."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 3)
        self.most = 0

    def forward(self, images):
        self.most = max(self.most, len(images))
        return self.dense(images.flatten(1))


def soft_labels_of(model, images):
    own = Samples(images[:6], torch.arange(6) % 3)
    generator = torch.Generator().manual_seed(0)
    soft_labels(model, own, images, steps=2, lr=0.1, batch_size=3, generator=generator)


def votes_on(model, images):
    labels = torch.arange(len(images)) % 3
    knows(model, [0, 1, 2], VirtualData(images, labels, "dm", 1, 0, "noise"))


@pytest.mark.parametrize(
    "passed",
    [
        lambda model, images: predict(model, Samples(images, torch.zeros(len(images)).long())),
        soft_labels_of,
        votes_on,
        lambda model, images: logits_on(model, images),
        lambda model, images: nearest_prototype(
            model, images, torch.zeros(3, 3), torch.ones(3).bool()
        ),
        lambda model, images: distil_ensemble(
            model, images, torch.full((len(images), 3), 1 / 3), epochs=1, patience=1, lr=0.1,
            batch_size=10, generator=torch.Generator().manual_seed(0),
        ),
    ],
    ids=["predict", "soft labels", "votes", "logits", "prototypes", "ensemble"],
)  # fmt: skip
def test_many_samples_pass_in_batches_so_that_memory_is_bounded(passed):
    model = Recorder()
    passed(model, torch.rand(1000, 1, 2, 2))
    assert 0 < model.most <= BATCH


def test_batches_change_no_output():
    model, images = Recorder().eval(), torch.rand(2 * BATCH + 3, 1, 2, 2)
    torch.testing.assert_close(outputs(model, images, "cpu"), model(images).detach())
