"""What a step costs on a GPU: kernel launches, and how often the host waits for it."""

from functools import partial

import pytest
import torch
from torch import nn

from flwr_distill.client.dp_sgd import PrivacyAccount, PrivateTraining
from flwr_distill.client.terms import Proximal
from flwr_distill.client.training import train_round
from flwr_distill.distill.distribution_matching import distill_dm
from flwr_distill.distill.ensemble import distil_ensemble
from flwr_distill.distill.gradient_matching import match_gradient
from flwr_distill.distill.kip import distill_kip
from flwr_distill.storage.store import NodeStore
from flwr_distill.strategies.cadis.client import Relational
from flwr_distill.strategies.fedlgd.client import Regulariser
from flwr_distill.task.datasets import Samples
from flwr_distill.task.datasets.text import text_spec
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import CHANGES, TrainSettings
from tests.gpu.work import GPU, SPEC, generator, samples


@pytest.mark.parametrize(
    ("asked", "copies", "launches"),
    [
        pytest.param({}, 0, 50, id="plain"),
        pytest.param({"place_of_data": "cpu"}, 2, 60, id="minibatches from main memory"),
        pytest.param({"changes": CHANGES}, 1, 150, id="random changes send their numbers"),
        pytest.param({"term": lambda model: Proximal(model, 0.1)}, 0, 250, id="fedprox"),
        pytest.param({"term": lambda model: Relational(model, 0.1)}, 0, 250, id="cadis"),
        pytest.param({"term": lambda model: Regulariser(model, 0.1)}, 0, 250, id="fedlgd"),
    ],
)
def test_a_training_step_waits_for_nothing(training_step, asked, copies, launches):
    used = training_step(**asked)
    assert (used.waits, used.copies) == (0, copies), used.where
    assert used.launches <= launches, used.where


def test_a_training_step_on_texts_waits_for_nothing(step):
    spec = text_spec("some-texts", 4)
    words = torch.randint(1, 100, (64, 1, 1, 20), generator=generator()).float()
    texts = Samples(words, torch.arange(64) % 4).to(GPU)

    def job(steps):
        model = create_model("bilstm", spec, seed=0).to(GPU)
        settings = TrainSettings.checked({"local-epochs": 1, "batch-size": 16}, "test")
        train_round(model, texts.subset(range(16 * steps)), settings, generator())

    used = step(job, fewer=1, more=2)
    assert used.waits == 0, used.where
    assert used.copies == 0, used.where


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


DM = partial(distill_dm, width=64, bank=2, per_class=4)
KIP = partial(distill_kip, per_class=10)


@pytest.fixture
def distilling_step(step):
    """Measure a step of a distiller on images of ten classes."""

    def measure(distil, data, seed=0, **asked):
        def job(steps):
            asked.update(steps=steps, generator=generator(seed), num_classes=10, device=GPU)
            distil(data.inputs, data.labels, **asked)

        return step(job, fewer=2, more=4)

    return measure


@pytest.mark.parametrize(
    ("distil", "n", "side", "launches"),
    [
        pytest.param(DM, 40, 32, 100, id="dm"),
        pytest.param(partial(DM, formation=2), 40, 32, 110, id="dm of tiles"),
        pytest.param(KIP, 300, 8, 400, id="kip"),
        pytest.param(partial(KIP, formation=2), 300, 8, 430, id="kip of tiles"),
    ],
)
def test_a_step_of_distilling_waits_for_nothing_and_launches_little(
    distilling_step, distil, n, side, launches
):
    used = distilling_step(distil, samples(n, side))
    assert used.waits == 0, used.where
    assert used.launches <= launches, used.where


def test_a_step_of_distribution_matching_sends_nothing_whatever_the_augmentation(distilling_step):
    distil = partial(distill_dm, width=8, bank=2, per_class=1)
    assert [distilling_step(distil, samples(20), seed).copies for seed in range(5)] == [0] * 5


@pytest.mark.parametrize("distil", [DM, KIP])
def test_progress_makes_a_step_wait_once(distilling_step, distil):
    used = distilling_step(distil, samples(300), progress=lambda step, steps, loss: None)
    assert used.waits == 1, used.where


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
