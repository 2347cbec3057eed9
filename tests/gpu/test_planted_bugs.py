"""Bugs that only a GPU shows, planted in this project: the checks of this folder find each."""

import copy
from types import SimpleNamespace

import pytest
import torch
from flwr.app import Array, ArrayRecord

import flwr_distill.client.local_round
import flwr_distill.client.session
import flwr_distill.client.training
import flwr_distill.server.evaluation
import flwr_distill.strategies.feddyn.client
import flwr_distill.strategies.moon.client
import flwr_distill.strategies.scaffold.client
from flwr_distill.client.terms import Proximal
from flwr_distill.distill import distiller
from flwr_distill.distill.augmentation import Augmentation
from tests.gpu.work import GPU, generator, samples


@pytest.fixture
def plant(monkeypatch):
    return monkeypatch.setattr


def distilled():
    data = samples(20)
    asked = {"num_classes": 10, "per_class": 1, "steps": 2, "generator": generator()}
    return distiller("dm")(data.inputs, data.labels, device=GPU, **asked)


def found(said):
    return pytest.raises((RuntimeError, TypeError), match=said)


def test_without_a_bug_all_of_this_passes(gpus, federation, training_step):
    distilled()
    used = training_step(lambda model: Proximal(model, 0.1))
    assert used.waits == used.copies == 0
    for strategy in ("fedprox", "scaffold", "moon"):
        federation(GPU, strategy=strategy, num_rounds=1)


def test_a_mask_left_on_the_cpu(gpus, plant):
    plant(Augmentation, "to", lambda self, device: self)
    with found("same device"):
        distilled()


def test_a_second_model_left_on_the_cpu(gpus, federation, plant):
    on_cpu = SimpleNamespace(deepcopy=lambda model: copy.deepcopy(model).cpu())
    plant(flwr_distill.strategies.moon.client, "copy", on_cpu)
    with found("same device"):
        federation(GPU, strategy="moon")


def test_state_made_on_the_cpu(gpus, federation, plant):
    plant(
        flwr_distill.strategies.scaffold.client,
        "zeros",
        lambda like: {k: torch.zeros(v.shape) for k, v in like.items()},
    )
    with found("same device"):
        federation(GPU, strategy="scaffold")


def test_state_made_on_the_first_gpu_instead_of_the_models(gpus, federation, plant):
    def zeros(like):
        return {name: torch.zeros(value.shape, device="cuda") for name, value in like.items()}

    plant(flwr_distill.strategies.feddyn.client, "zeros", zeros)
    with found("cuda:0 and cuda:1"):
        federation(GPU, strategy="feddyn")


def test_a_generator_of_the_gpu_where_one_of_the_cpu_is_needed(gpus, federation, plant):
    make = torch.Generator
    plant(flwr_distill.client.session, "generator_of", lambda *words: make(GPU))
    with found("Expected a 'cpu' device type for generator but found 'cuda'"):
        federation(GPU, strategy="fedavg")


def test_an_array_of_numpy_from_the_gpu(gpus, federation, plant):
    def arrays(self):
        state = self.model.state_dict()
        return ArrayRecord({name: Array(value.numpy()) for name, value in state.items()})

    plant(flwr_distill.client.local_round.LocalRound, "trained_model", arrays)
    with found("can't convert cuda:1 device type tensor to numpy"):
        federation(GPU, strategy="fedavg")


def test_a_result_added_to_a_sum_on_the_cpu(gpus, federation, plant):
    def distance(self, inputs, labels, logits):
        total = torch.zeros(())
        for parameter, start in zip(self._parameters, self._start, strict=True):
            total += (parameter - start).square().sum()
        return total

    plant(Proximal, "__call__", distance)
    with found("same device"):
        federation(GPU, strategy="fedprox", train__proximal_mu=0.1)


def test_a_gpu_beyond_the_last(gpus, federation, plant):
    plant(flwr_distill.client.session, "choose_device", lambda *given: torch.device("cuda:2"))
    with found("invalid device ordinal"):
        federation(GPU, strategy="fedavg")


def test_a_model_moved_in_inference_mode_and_loaded_again(gpus, federation, plant):
    predict = flwr_distill.server.evaluation.predict

    @torch.inference_mode()
    def moving(model, samples, device="cpu"):
        model.to(device)
        return predict(model, samples, device)

    plant(flwr_distill.server.evaluation, "predict", moving)
    with found("Inplace update to inference tensor"):
        federation(GPU, strategy="fedavg", model="resnet8", train__batch_size=64)


def test_a_number_read_in_each_step(training_step, plant):
    value = Proximal.__call__
    plant(Proximal, "__call__", lambda *given: value(*given) * float(value(*given) >= 0))
    used = training_step(lambda model: Proximal(model, 0.1))
    assert used.waits == 1
    assert "test_planted_bugs.py" in used.where["wait"][0][0]


def test_a_boolean_index_in_each_step(training_step, plant):
    plant(flwr_distill.client.training, "hard_labels", lambda labels: labels[labels >= 0])
    assert training_step().waits == 1


def test_minibatches_drawn_on_the_cpu_and_left_there(training_step, plant):
    draw = flwr_distill.client.training.epoch_batches

    def on_cpu(labels, *given, **options):
        return draw(labels.cpu(), *given, **options)

    plant(flwr_distill.client.training, "epoch_batches", on_cpu)
    assert training_step().copies == 2
