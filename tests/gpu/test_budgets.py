"""What a step costs on a GPU: kernel launches, and how often the host waits for it."""

import pytest
import torch
from torch import nn

from client.cadis import Relational
from client.dp_sgd import PrivacyAccount, PrivateTraining
from client.fedlgd import Contrastive
from client.terms import Proximal
from distill.distribution_matching import distill_dm
from distill.ensemble import distil_ensemble
from distill.gradient_matching import distill_gm, match_gradient
from distill.kip import distill_kip
from links.store import NodeStore
from task.models import create_model
from tests.gpu.work import GPU, SPEC, generator, samples


def test_a_training_step_waits_for_nothing(training_step):
    used = training_step()
    assert used.waits == 0, used.where
    assert used.copies == 0, used.where
    assert used.launches <= 50, used.where


@pytest.mark.parametrize(
    "term",
    [
        lambda model: Proximal(model, 0.1),
        pytest.param(
            lambda model: Relational(model, 0.1),
            id="cadis",
            marks=pytest.mark.xfail(strict=True, reason="part B"),
        ),
        pytest.param(
            lambda model: Contrastive(model, 0.1),
            id="fedlgd",
            marks=pytest.mark.xfail(strict=True, reason="part B"),
        ),
    ],
)
def test_a_training_step_with_a_loss_term_waits_for_nothing(training_step, term):
    used = training_step(term)
    assert used.waits == 0, used.where


def test_a_private_training_step_only_sends_its_sample(step, tmp_path):
    data = samples(64).to(GPU)

    def job(steps):
        model = create_model("digits-cnn", SPEC, seed=0).to(GPU)
        account = PrivacyAccount(NodeStore(tmp_path), 1e-5, budget=0.0)
        privacy = PrivateTraining(1.0, 1.0, account, generator())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        privacy.fit(model, data, optimizer, batch_size=16, steps=steps)

    used = step(job)
    assert used.copies <= 1, used.where
    assert used.waits <= 1, used.where


def heard(step, steps, loss):
    """Progress that wants to know the loss."""


@pytest.mark.parametrize(("progress", "waits"), [(None, 0), (heard, 1)])
@pytest.mark.parametrize(
    ("distil", "asked", "n", "side", "launches"),
    [
        (distill_dm, {"width": 64, "bank": 1, "per_class": 10}, 40, 32, 100),
        (distill_gm, {"width": 32, "per_class": 1}, 40, 16, 900),
        (distill_kip, {"per_class": 10}, 300, 8, 400),
    ],
    ids=["dm", "gm", "kip"],
)
def test_a_step_of_distilling(step, distil, asked, n, side, launches, progress, waits):
    data = samples(n, side)

    def job(steps):
        distil(
            data.inputs,
            data.labels,
            num_classes=10,
            steps=steps,
            generator=generator(),
            device=GPU,
            progress=progress,
            **asked,
        )

    used = step(job)
    assert used.launches <= launches, used.where
    assert used.waits <= waits, used.where


def model_with_norm():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def test_a_step_of_the_servers_gradient_matching_waits_for_nothing(step):
    data = samples(20).to(GPU)
    model = model_with_norm().to(GPU)
    target = {name: w.detach() + 0.1 for name, w in model.named_parameters()}

    used = step(lambda steps: match_gradient(data.inputs, data.labels, target, model, steps=steps))
    assert used.waits == 0, used.where


def test_a_step_of_ensemble_distillation_waits_for_nothing(step):
    def job(steps):
        inputs = samples(9 * steps + steps).inputs.to(GPU)
        teacher = torch.full((len(inputs), 10), 0.1, device=GPU)
        student = model_with_norm().to(GPU)
        distil_ensemble(student, inputs, teacher, epochs=1, batch_size=9, generator=generator())

    used = step(job)
    assert used.waits == 0, used.where
