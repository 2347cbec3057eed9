"""Augmentations: fixed once drawn, the same for every image, differentiable."""

import math

import numpy as np
import pytest
import torch
from scipy.ndimage import map_coordinates

from flwr_distill.distill.augmentation import draw_augmentation
from tests.distill.builders import normal, seeded

SEEDS = range(40)


def images(n, seed=0):
    return normal(n, 3, 9, 7, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_draw_treats_every_image_alike_and_keeps_the_shape(seed):
    augment = draw_augmentation(9, 7, seeded(seed))
    batch = images(4)
    together = augment(batch)
    assert together.shape == batch.shape
    for image, expected in zip(batch, together, strict=True):
        torch.testing.assert_close(augment(image[None])[0], expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradient_reaches_the_pixels(seed):
    augment = draw_augmentation(9, 7, seeded(seed))
    leaf = images(2).double().requires_grad_()
    direction = images(2, seed=1).double()
    (gradient,) = torch.autograd.grad(augment(leaf).square().sum(), leaf)
    with torch.no_grad():
        slope = augment(leaf + 1e-5 * direction).square().sum()
        slope = (slope - augment(leaf - 1e-5 * direction).square().sum()) / 2e-5
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=1e-4)


@pytest.mark.parametrize(("place", "kind"), [(0.7, "scale"), (0.9, "rotation")])
def test_scale_and_rotation_interpolate_about_the_centre(place, kind, monkeypatch):
    """Against SciPy's interpolation, with corner pixels at 1."""
    numbers = iter([place, 0.2, 0.6])
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(next(numbers)))
    augment = draw_augmentation(9, 7, torch.Generator())
    monkeypatch.undo()
    low, high, angle = 1 / 1.2, 1.2, math.radians(15) * (2 * 0.2 - 1)
    matrix = {
        "scale": np.diag([low + (high - low) * 0.2, low + (high - low) * 0.6]),
        "rotation": np.array(
            [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        ),
    }[kind]
    down, across = np.meshgrid(np.linspace(-1, 1, 9), np.linspace(-1, 1, 7), indexing="ij")
    x, y = np.tensordot(matrix, np.stack([across, down]), 1)
    places = np.stack([(y + 1) * 4, (x + 1) * 3])
    image = images(1)[0, 0]
    expected = map_coordinates(image.numpy(), places, order=1, mode="grid-constant")
    np.testing.assert_allclose(augment(image[None, None])[0, 0], expected, atol=1e-5)


def test_draws_come_from_the_generator_and_differ():
    batch = images(1)

    def draws():
        generator = seeded(3)
        return [draw_augmentation(9, 7, generator)(batch) for _ in SEEDS]

    first, second = draws(), draws()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    distinct = {tuple(x.flatten().tolist()) for x in first}
    assert len(distinct) > 30
