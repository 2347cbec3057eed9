"""Bugs that only a GPU shows, planted in this project: the checks of this folder find each."""

import pytest
import torch

import flwr_distill.client.training
import flwr_distill.server.task
import flwr_distill.strategies.feddyn.client
import flwr_distill.strategies.moon.client
import flwr_distill.strategies.scaffold.client
from flwr_distill.client.terms import Proximal
from flwr_distill.distill import distiller
from flwr_distill.distill.augmentation import Augmentation
from flwr_distill.task.errors import ReportedError
from tests.gpu.work import GPU, generator, samples


@pytest.fixture
def plant(monkeypatch):
    return monkeypatch.setattr


def distilled():
    data = samples(20)
    asked = {"num_classes": 10, "per_class": 1, "steps": 2, "generator": generator()}
    return distiller("dm")(data.inputs, data.labels, device=GPU, **asked)


def fails_with(text):
    return pytest.raises((ReportedError, RuntimeError, TypeError), match=text)


def test_without_a_bug_all_of_this_passes(gpus, federation, training_step):
    distilled()
    used = training_step(lambda model: Proximal(model, 0.1))
    assert used.waits == used.copies == 0
    federation(GPU, strategy="feddyn", num_rounds=1)
    federation(GPU, strategy="fedavg", model="resnet8", train__batch_size=64)


def test_a_mask_left_on_the_cpu(gpus, plant):
    plant(Augmentation, "to", lambda self, device: self)
    with fails_with("same device"):
        distilled()


def test_state_made_on_the_first_gpu_instead_of_the_models(gpus, federation, plant):
    def zeros(like):
        return {name: torch.zeros(value.shape, device="cuda") for name, value in like.items()}

    plant(flwr_distill.strategies.feddyn.client, "zeros", zeros)
    with fails_with("cuda:0 and cuda:1"):
        federation(GPU, strategy="feddyn")


def test_a_model_moved_in_inference_mode_and_loaded_again(gpus, federation, plant):
    count = flwr_distill.server.task.count

    @torch.inference_mode()
    def moving(model, samples, device="cpu"):
        model.to(device)
        return count(model, samples, device)

    plant(flwr_distill.server.task, "count", moving)
    with fails_with("Inplace update to inference tensor"):
        federation(GPU, strategy="fedavg", model="resnet8", train__batch_size=64)


def test_a_number_read_in_each_step(training_step, plant):
    value = Proximal.__call__
    plant(Proximal, "__call__", lambda *given: value(*given) * float(value(*given) >= 0))
    used = training_step(lambda model: Proximal(model, 0.1))
    assert used.waits == 1
    assert "test_planted_bugs.py" in used.where["wait"][0][0]


def test_minibatches_drawn_on_the_cpu_and_left_there(training_step, plant):
    draw = flwr_distill.client.training.epoch_batches

    def on_cpu(labels, *given, **options):
        return draw(labels.cpu(), *given, **options)

    plant(flwr_distill.client.training, "epoch_batches", on_cpu)
    assert training_step().copies == 2
