"""The benchmark compares like with like: reference steps compute what ours do."""

import pytest
import torch
from torch import nn

from benchmarks import distill_reference
from flwr_distill.distill.augmentation import draw_augmentation
from flwr_distill.distill.distribution_matching import Probe, real_means
from flwr_distill.distill.features import RandomConvNet
from flwr_distill.distill.gradient_matching import match_gradient
from flwr_distill.distill.kip import kip_gradient
from tests.distill.builders import seeded


def test_kip_reference_is_the_same_step():
    generator = seeded()
    shapes = [(20, 30), (20, 4), (25, 30), (25, 4)]
    virtual, y_s, real, y_t = (
        torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes
    )
    loss, gradient = kip_gradient(virtual, y_s, real, y_t)
    reference_loss, reference = distill_reference.kip_gradient(virtual, y_s, real, y_t, depth=3)
    torch.testing.assert_close(loss, reference_loss, rtol=1e-4, atol=0)
    torch.testing.assert_close(gradient, reference, rtol=1e-3, atol=1e-6)


def test_dm_reference_is_the_same_step():
    generator = seeded()
    real = [torch.randn(n, 3, 16, 16, generator=generator) for n in (5, 3)]
    virtual = torch.randn(2, 4, 3, 16, 16, generator=generator)
    augment = draw_augmentation(16, 16, generator)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        reference = distill_reference.dm_step(real, list(virtual), augment, width=8)
        torch.manual_seed(1)
        modules = distill_reference.convnet(3, 8)
    filters = tuple(m.weight for m in modules if isinstance(m, torch.nn.Conv2d))
    network = RandomConvNet(filters)
    means = real_means(network, augment, torch.cat(real), [len(x) for x in real])
    _, gradient = Probe(network, augment, means).loss_and_gradient(virtual)
    torch.testing.assert_close(gradient, torch.stack(reference), rtol=1e-4, atol=1e-5)


def test_gradient_matching_reference_is_the_same_step():
    generator = seeded()
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(4, 4), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 36, 3),
    )  # fmt: skip
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    images, labels = torch.randn(6, 1, 6, 6, generator=generator), torch.arange(6) % 3
    target = {
        name: torch.randn(weight.shape, generator=generator)
        for name, weight in model.named_parameters()
    }
    distances = []
    ours = match_gradient(
        images, labels, target, model, steps=3, learning_rate=0.01,
        progress=lambda step, steps, distance: distances.append(distance),
    )  # fmt: skip

    optimizer = torch.optim.Adam([images], lr=0.01)
    published = []
    for _ in range(3):
        distance, images.grad = distill_reference.gradient_step(
            images, labels, list(target.values()), model
        )
        published.append(float(distance))
        optimizer.step()
    assert distances == pytest.approx(published, rel=1e-5)
    torch.testing.assert_close(ours, images, rtol=1e-4, atol=1e-4)
