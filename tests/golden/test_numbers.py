"""Numbers of models, data sets, distillers and strategies, from a seed to their results."""

import math
from dataclasses import asdict

import pytest
import torch

from flwr_distill.distill.augmentation import draw_augmentation
from flwr_distill.distill.kip import VARIANTS
from flwr_distill.distill.private_matching import distill_dm_privately
from flwr_distill.distill.registry import distiller
from flwr_distill.protocol.registry import built_in_methods
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.datasets.registry import _ENTRIES
from flwr_distill.task.models import create_model, model_names
from tests.golden.seeded import rows_of

SLOW = {"efficientnet-lite0", "efficientnet-lite0-grid", "resnet18"}


def spec(*shape, kind="image", vocabulary=0):
    return DataSpec("some-set", shape, 4, (0.5,), (0.5,), kind=kind, vocabulary=vocabulary)


SPECS = {
    "8x8": spec(1, 8, 8),
    "28x28": spec(1, 28, 28),
    "32x32": spec(3, 32, 32),
    "text": spec(1, 1, 12, kind="text", vocabulary=50),
    "table": spec(1, 1, 5, kind="table"),
}


def summary(values):
    """Mean, deviation and first values."""
    values = values.detach().double()
    return [float(values.mean()), float(values.std()), *values.flatten()[:3].tolist()]


@pytest.mark.parametrize("name", sorted({*model_names()} - SLOW))
def test_a_seeded_model_gives_the_approved_outputs(name, same_numbers):
    *_, size = (size for size, spec in SPECS.items() if name in model_names(spec))
    shape = SPECS[size].shape
    model = create_model(name, SPECS[size], seed=1)
    inputs = torch.linspace(-1, 1, 2 * torch.Size(shape).numel()).reshape(2, *shape)
    if SPECS[size].kind == "text":
        inputs = (inputs.abs() * 49).round()
    outputs = [summary(model.eval()(inputs))]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        outputs.append(summary(model.train()(inputs)))
    same_numbers("models", name, [size, *outputs, sum(p.numel() for p in model.parameters())])


@pytest.mark.parametrize("name", sorted(_ENTRIES))
def test_a_data_set_has_the_approved_shape_and_scale(name, same_numbers):
    same_numbers("data_sets", name, asdict(_ENTRIES[name].spec))


def images():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(18, 1, 8, 8, generator=generator), torch.arange(18) % 3


@pytest.mark.parametrize("init", ["class-stats", "pixel-stats"])
@pytest.mark.parametrize("name", [*VARIANTS, "dm"])
def test_a_seeded_distiller_gives_the_approved_images(name, init, same_numbers):
    generator = torch.Generator().manual_seed(5)
    made = distiller(name)(
        *images(), num_classes=4, per_class=1, steps=12, init=init, generator=generator
    )
    soft = [] if made.soft_labels is None else summary(made.soft_labels)
    card = asdict(made.with_card(images()[0], images()[0][:5]).card)
    same_numbers("distillers", f"{name} {init}", [summary(made.images), soft, card])


def test_seeded_private_matching_gives_the_approved_images(same_numbers):
    made = distill_dm_privately(
        *images(),
        num_classes=4,
        per_class=1,
        pixels=(torch.full((1, 1, 1), -1.0), torch.full((1, 1, 1), 1.0)),
        steps=4,
        generator=torch.Generator().manual_seed(5),
        noise_generator=torch.Generator().manual_seed(6),
        epsilon=5.0,
        delta=1e-3,
    )
    same_numbers("distillers", "private", summary(made.images))


def test_seeded_augmentations_are_the_approved_ones(same_numbers):
    generator = torch.Generator().manual_seed(8)
    wide = images()[0][:6].reshape(4, 1, 8, 12)
    found = [summary(draw_augmentation(8, 12, generator)(wide)) for _ in range(40)]
    same_numbers("distillers", "augmentation", found)


ELSEWHERE = {
    *("bulyan", "fedadagrad", "fedyogi", "qfedavg"),
    *("dp-adaptive-client", "dp-adaptive-server", "dp-fixed-client", "dp-fixed-server"),
}
"""Flower's, whose numbers tests/strategies/test_flowers_own.py compares with Flower's classes."""


PACKED = {"fedaf", "feddm", "fedlgd", "hfldd"}
"""Send virtual data, whose packed size depends on the processor's rounding: to a percent.

A sample may get another class by it, too: accuracies are to a tenth, and the losses tell the rest.
"""


@pytest.mark.parametrize("strategy", sorted(built_in_methods().keys() - ELSEWHERE))
def test_a_seeded_run_gives_the_approved_scores_and_bytes(
    strategy, client_grid, little_distillation, tmp_path, same_numbers
):
    rows = rows_of(strategy, client_grid, little_distillation, tmp_path)
    for row in rows if strategy in PACKED else ():
        row |= {key: math.log10(1 + row[key]) for key in ("server_bytes", "link_bytes")}
        row["accuracy"] = round(row["accuracy"], 1)
    keys = ("accuracy", "loss", "node_accuracy", "server_bytes", "link_bytes", "set_aside")
    same_numbers("strategies", strategy, [[row[key] for key in keys] for row in rows])
