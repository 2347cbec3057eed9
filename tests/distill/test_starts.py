"""Starts tell of the real images what their names say, and no more."""

import pytest
import torch

from distill import DistillError
from distill.starts import start

LABELS = torch.tensor([4, 1] * 50)
NOISE = torch.randn(100, 2, 6, 5, generator=torch.Generator().manual_seed(0))
IMAGES = 3 * NOISE + LABELS[:, None, None, None]


def test_images_are_sorted_by_class_with_the_number_asked_for() -> None:
    images, labels = start("noise", IMAGES, LABELS, 3, torch.Generator())
    assert images.shape == (6, 2, 6, 5)
    assert labels.tolist() == [1, 1, 1, 4, 4, 4]


def test_class_stats_have_one_mean_and_deviation_a_class() -> None:
    images, labels = start("class-stats", IMAGES, LABELS, 2000, torch.Generator().manual_seed(1))
    for c in (1, 4):
        drawn, real = images[labels == c], IMAGES[LABELS.eq(c)]
        torch.testing.assert_close(drawn.mean(), real.mean(), atol=0.05, rtol=0)
        torch.testing.assert_close(drawn.std(), real.std(), atol=0.05, rtol=0)
        assert float(drawn.mean(0).std()) < 0.1  # nothing of any single pixel


def test_pixel_stats_follow_each_pixel() -> None:
    images, labels = start("pixel-stats", IMAGES, LABELS, 4000, torch.Generator().manual_seed(1))
    drawn, real = images[labels == 1], IMAGES[LABELS.eq(1)]
    torch.testing.assert_close(drawn.mean(0), real.mean(0), atol=0.25, rtol=0)
    torch.testing.assert_close(drawn.std(0), real.std(0, correction=0), atol=0.25, rtol=0)


def test_noise_does_not_depend_on_the_images() -> None:
    one, _ = start("noise", IMAGES, LABELS, 3, torch.Generator().manual_seed(1))
    other, _ = start("noise", IMAGES * 7, LABELS, 3, torch.Generator().manual_seed(1))
    assert torch.equal(one, other)


def test_unknown_start_is_refused_with_the_choices() -> None:
    with pytest.raises(DistillError, match="'real' is unknown; choose one of class-stats"):
        start("real", IMAGES, LABELS, 1, torch.Generator())
