"""Augmentations: fixed once drawn, the same for every image, differentiable."""

import pytest
import torch

from distill.augmentation import draw_augmentation

SEEDS = range(40)


def images(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 3, 9, 7, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_one_draw_treats_every_image_alike_and_keeps_the_shape(seed: int) -> None:
    augment = draw_augmentation(9, 7, torch.Generator().manual_seed(seed))
    batch = images(4)
    together = augment(batch)
    assert together.shape == batch.shape
    for image, expected in zip(batch, together, strict=True):
        torch.testing.assert_close(augment(image[None])[0], expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradient_reaches_the_pixels(seed: int) -> None:
    augment = draw_augmentation(9, 7, torch.Generator().manual_seed(seed))
    leaf = images(2).double().requires_grad_()
    direction = images(2, seed=1).double()
    (gradient,) = torch.autograd.grad(augment(leaf).square().sum(), leaf)
    with torch.no_grad():
        slope = augment(leaf + 1e-5 * direction).square().sum()
        slope = (slope - augment(leaf - 1e-5 * direction).square().sum()) / 2e-5
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=1e-4)


def test_draws_come_from_the_generator_and_differ() -> None:
    batch = images(1)

    def draws() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        return [draw_augmentation(9, 7, generator)(batch) for _ in SEEDS]

    first, second = draws(), draws()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    distinct = {tuple(x.flatten().tolist()) for x in first}
    assert len(distinct) > 30
