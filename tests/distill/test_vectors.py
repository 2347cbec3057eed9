"""Virtual vectors: distilling samples without pixels, such as features of a frozen network."""

import pytest
import torch

from flwr_distill.distill import DistillError, VirtualData, VirtualDataError
from flwr_distill.distill.auto import choose
from flwr_distill.distill.distribution_matching import alike
from flwr_distill.distill.virtual_header import Bounds
from tests.distill.builders import distilled, seeded
from tests.errors import at

WIDTH = 40
CLASSES = 6


def samples(classes, each, seed=0):
    """Vectors (n, WIDTH, 1, 1) about a centre of each class, and their labels."""
    generator = seeded(seed)
    centres = torch.randn(CLASSES, WIDTH, generator=generator)
    labels = torch.tensor(classes).repeat_interleave(each)
    noise = torch.randn(len(labels), WIDTH, generator=generator)
    return (centres[labels] + 0.5 * noise)[..., None, None], labels


def made(method, classes, each, **options):
    vectors, labels = samples(classes, each)
    options = {"num_classes": CLASSES, "per_class": 4, "steps": None, "formation": 0} | options
    return vectors, labels, distilled(method, vectors, labels, seed=1, **options)


def test_distribution_matching_gives_virtual_vectors_the_mean_of_their_class():
    vectors, labels, virtual = made("dm", [1, 4], 30)
    assert virtual.images.shape == (8, WIDTH, 1, 1)
    for label in (1, 4):
        own, real = virtual.images[virtual.labels == label], vectors[labels == label]
        torch.testing.assert_close(own.mean(0), real.mean(0), atol=0.1, rtol=0)
        assert own.std(0).mean() > 0.2  # they differ among themselves


@pytest.mark.parametrize("rows", [30, 90])
def test_groups_are_cut_along_the_first_principal_component(rows):
    generator = seeded(2)
    direction = torch.nn.functional.normalize(torch.randn(WIDTH, generator=generator), dim=0)
    along = 5 * torch.randn(rows, generator=generator)
    vectors = along[:, None] * direction + 0.01 * torch.randn(rows, WIDTH, generator=generator)
    below, above = (set(group.tolist()) for group in alike(vectors[..., None, None], 2))
    ordered = along.argsort().tolist()
    halves = {frozenset(ordered[: rows // 2]), frozenset(ordered[rows // 2 :])}
    assert {frozenset(below), frozenset(above)} == halves


def test_kernel_regression_on_virtual_vectors_tells_new_ones_apart():
    _, _, virtual = made("kip", range(CLASSES), 20, per_class=2, steps=30)
    new, labels = samples(range(CLASSES), 20)
    distances = torch.cdist(new.flatten(1), virtual.images.flatten(1))
    assert (virtual.labels[distances.argmin(1)] == labels).float().mean() > 0.9


def test_what_cuts_up_images_is_refused_and_auto_takes_something_else():
    assert choose(1, CLASSES, (WIDTH, 1, 1))[0] == "dm"
    assert choose(2, CLASSES, (WIDTH, 1, 1))[0] == "dm"
    assert choose(CLASSES, CLASSES, (WIDTH, 1, 1))[0] == "kip"
    with pytest.raises(DistillError, check=at("distiller", remedy="take dm")):
        made("kip-negatives", [1], 10, steps=1)


def test_virtual_vectors_of_a_large_network_are_a_few_kilobytes():
    generator = seeded()
    features = torch.randn(20, 1280, 1, 1, generator=generator)
    virtual = VirtualData(
        features, torch.arange(20) % 10, method="dm", steps=1, seed=0, init="noise"
    )
    sent = virtual.to_bytes(bits=4)
    assert len(sent) < 20 * 1280 / 2 + 1000
    bounds = Bounds((1280, 1, 1), 10, 20, 2)
    back = VirtualData.received(sent, bounds)
    step = (features.max() - features.min()) / 15
    assert (back.images - features).abs().max() <= step / 2 * 1.001
    with pytest.raises(VirtualDataError, check=at("shape of virtual images", value=(1280, 1, 1))):
        VirtualData.received(sent, Bounds((3, 32, 32), 10, 20, 2))
