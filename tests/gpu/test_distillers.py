"""Distilling on a GPU gives what it gives on the CPU."""

import json
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from flwr_distill.cli.judge import JUDGES, QUICK
from flwr_distill.cli.main import app
from flwr_distill.distill import VirtualData, distiller
from flwr_distill.distill.augmentation import draw_augmentation
from flwr_distill.distill.ensemble import distil_ensemble, teacher_probabilities
from flwr_distill.distill.gradient_matching import match_gradient
from flwr_distill.distill.kip import distill_kip_many
from flwr_distill.distill.private_matching import distill_dm_privately
from flwr_distill.distill.registry import _DISTILLERS
from flwr_distill.distill.starts import smoothed
from tests.gpu.work import ACCURACY, ADAM, ONE_PASS, SGD, generator

IMAGES = torch.randn(18, 1, 8, 8, generator=generator())
LABELS = torch.arange(18) % 3


@pytest.fixture
def check(gpu):
    """Check that virtual data are on the CPU, and those that the CPU makes."""

    def compare(on_gpu, on_cpu):
        for name in ("images", "soft_labels", "initial_images", "labels"):
            assert type(getattr(on_gpu, name)) is type(getattr(on_cpu, name))
        assert on_gpu.images.device == torch.device("cpu")
        gpu.check(on_gpu.labels, on_cpu.labels, 0)
        gpu.check(on_gpu.soft_labels, on_cpu.soft_labels, ADAM)
        gpu.check(on_gpu.initial_images, on_cpu.initial_images, ONE_PASS)
        gpu.check(on_gpu.images, on_cpu.images, ADAM, start=on_cpu.initial_images)

    return compare


@pytest.mark.parametrize("name", sorted(_DISTILLERS))
def test_every_distiller_gives_what_it_gives_on_the_cpu(gpu, check, name):
    """With images on the CPU, as in `flwr-distill distill`, or on the GPU, as a node's."""

    def run(device, place_of_data):
        asked = {"num_classes": 4, "per_class": 2, "steps": 2, "generator": generator(5)}
        images, labels = IMAGES.to(place_of_data), LABELS.to(place_of_data)
        return distiller(name)(images, labels, device=device, **asked)

    on_cpu = run("cpu", "cpu")
    check(run(gpu.device, "cpu"), on_cpu)
    check(run(gpu.device, gpu.device), on_cpu)
    gpu.check_used()


def test_every_augmentation_maps_images_and_gradients_as_on_the_cpu(gpu):
    images = torch.randn(2000, 1, 28, 28, generator=generator())
    weights = torch.randn(2000, 1, 28, 28, generator=generator(1))

    def run(augment, device):
        leaf = images.to(device).requires_grad_()
        mapped = augment.to(device)(leaf)
        return mapped, torch.autograd.grad((mapped * weights.to(device)).sum(), leaf)[0]

    kinds = set()
    for seed in range(20):
        augment = draw_augmentation(28, 28, generator(seed))
        gpu.check(run(augment, gpu.device), run(augment, "cpu"), ONE_PASS)
        kinds.add(augment.kind if augment.parameters else type(augment.kind))
    assert len(kinds) == 4  # scale and rotation are one


def test_small_images_match_real_ones_step_by_step_as_on_the_cpu(gpu):
    """With a formation, and all augmentations; rounding grows from step to step."""
    images = smoothed(torch.randn(240, 1, 28, 28, generator=generator()))

    def run(device):
        losses, labels = [], torch.arange(240) % 2
        asked = {"num_classes": 2, "per_class": 4, "formation": 2, "steps": 12}
        asked |= {"generator": generator(5), "progress": lambda *step: losses.append(step[-1])}
        real = images + labels[:, None, None, None]
        distiller("dm")(real.to(device), labels.to(device), device=device, **asked)
        return losses

    gpu.check(run(gpu.device), run("cpu"), ADAM)


@pytest.mark.parametrize("init", ["pixel-stats", "noise", "real"])
def test_every_start_can_be_made_of_images_on_a_gpu(gpu, check, init):
    def run(device):
        asked = {"num_classes": 4, "per_class": 2, "steps": 1, "init": init}
        images, labels = IMAGES.to(device), LABELS.to(device)
        return distiller("dm")(images, labels, generator=generator(), device=device, **asked)

    check(run(gpu.device), run("cpu"))


def test_private_matching_gives_what_it_gives_on_the_cpu(gpu, check):
    def run(device):
        asked = {"num_classes": 3, "per_class": 1, "steps": 2, "epsilon": 5.0, "delta": 1e-5}
        asked |= {"generator": generator(1), "noise_generator": generator(2)}
        pixels = torch.full((1, 1, 1), -2.0), torch.full((1, 1, 1), 2.0)
        return distill_dm_privately(IMAGES, LABELS, pixels=pixels, device=device, **asked)

    check(run(gpu.device), run("cpu"))


def test_the_sets_of_several_nodes_together_give_what_they_give_on_the_cpu(gpu, check):
    def run(device):
        sets = [(IMAGES[:15], LABELS[:15]), (IMAGES[15:], LABELS[15:])]
        asked = {"num_classes": 3, "per_class": 1, "steps": 3, "device": device}
        return distill_kip_many(sets, generators=[generator(0), generator(1)], **asked)

    for on_gpu, on_cpu in zip(run(gpu.device), run("cpu"), strict=True):
        check(on_gpu, on_cpu)


def small_model(seed, device):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
        ).to(device)


def test_the_servers_gradient_matching_gives_what_it_gives_on_the_cpu(gpu):
    def run(device):
        model = small_model(0, device)
        target = {name: w.detach().cpu() + 0.1 for name, w in model.named_parameters()}
        return match_gradient(IMAGES.to(device), LABELS.to(device), target, model, steps=3)

    on_gpu = run(gpu.device)
    assert on_gpu.device == torch.device(gpu.device)
    gpu.check(on_gpu, run("cpu"), ADAM, start=IMAGES)


@pytest.mark.parametrize("average", ["probabilities", "logits"])
def test_the_servers_ensemble_distillation_gives_what_it_gives_on_the_cpu(gpu, average):
    def run(device):
        members = [(0.3, small_model(1, device)), (0.7, small_model(2, device))]
        inputs, student = IMAGES.to(device), small_model(0, device)
        teacher = teacher_probabilities(members, inputs, average=average)
        asked = {"epochs": 3, "patience": 2, "batch_size": 8, "generator": generator(3)}
        report = distil_ensemble(student, inputs, teacher, **asked)
        return astuple(report), student.state_dict(), teacher

    on_gpu, weights, teacher = run(gpu.device)
    on_cpu, expected, expected_teacher = run("cpu")
    gpu.check(teacher, expected_teacher, ONE_PASS)
    gpu.check(on_gpu, on_cpu, SGD)
    gpu.check(weights, expected, ADAM, start=small_model(0, "cpu").state_dict())


def test_flwr_distill_distill_writes_what_it_writes_on_the_cpu(gpu, check, tmp_path, monkeypatch):
    monkeypatch.setitem(JUDGES, "quick", (replace(QUICK, steps=5),))
    pixels = np.random.default_rng(0).integers(0, 255, (20, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=pixels, labels=np.arange(20) % 2)

    def files(device):
        output = tmp_path / device.replace(":", "")
        asked = ["--method", "dm", "--per-class", "2", "--steps", "3", "--device", device]
        source = ["distill", str(tmp_path / "a.npz"), "--output", str(output)]
        result = CliRunner().invoke(app, [*source, *asked])
        assert result.exit_code == 0, result.output
        summary = json.loads((output / "summary.json").read_text())
        virtual = VirtualData.from_safetensors((output / "virtual.safetensors").read_bytes())
        return virtual, summary

    (on_gpu, summary), (on_cpu, expected) = files(gpu.device), files("cpu")
    check(on_gpu, on_cpu)
    # A processor may add in another order where memory is aligned otherwise.
    card, expected_card = on_gpu.card.own, on_cpu.card.own
    tolerance = 1e-6 if gpu.virtual else ADAM
    assert card.highest_cosine == pytest.approx(expected_card.highest_cosine, rel=tolerance)
    gpu.check(summary["scores"], expected["scores"], ACCURACY)
    assert summary["device"] == gpu.device
    assert len(on_gpu) == 4
