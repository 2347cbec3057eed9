"""Random ConvNets: pooled as torch pools, of the published width, drawn from the generator."""

import pytest
import torch
from torch.nn import functional

from flwr_distill.distill import DistillError
from flwr_distill.distill.features import RandomConvNet, halve
from tests.distill.builders import seeded
from tests.errors import at


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (2, 3), (32, 6)])
def test_halving_equals_average_pooling_and_its_gradient(size):
    generator = seeded()
    leaf = torch.randn(3, 5, *size, generator=generator).requires_grad_()
    ours, theirs = halve(leaf), functional.avg_pool2d(leaf, 2)
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn(ours.shape, generator=generator)
    (by_ours,) = torch.autograd.grad(ours, leaf, upstream)
    (by_theirs,) = torch.autograd.grad(theirs, leaf, upstream)
    torch.testing.assert_close(by_ours, by_theirs)


@pytest.mark.parametrize(
    ("side", "blocks"),
    [(4, 1), (8, 2), (15, 2), (16, 3), (28, 3), (32, 3), (45, 3), (64, 4), (128, 5), (224, 6)],
)
def test_blocks_of_he_normal_filters_leave_a_map_of_about_four_pixels_a_side(side, blocks):
    network = RandomConvNet.draw(3, side, 64, seeded())
    shapes = [tuple(weight.shape) for weight in network.filters]
    assert shapes == [(64, 3, 3, 3)] + [(64, 64, 3, 3)] * (blocks - 1)
    for weight in network.filters:
        he = (2 / (9 * weight.shape[1])) ** 0.5
        assert float(weight.std()) == pytest.approx(he, rel=0.05)
    features = network(torch.randn(2, 3, side, side))
    assert features.shape == (2, 64 * (side // 2**blocks) ** 2)


def test_images_too_small_are_refused():
    with pytest.raises(DistillError, check=at("pixels a side", value=3)):
        RandomConvNet.draw(1, 3, 6, torch.Generator())
