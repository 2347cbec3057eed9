"""Negatives are made of a node's own images, and give KIP something to learn on one class."""

import torch

from flwr_distill.distill import distiller
from flwr_distill.distill.negatives import negatives, shuffled


def test_negatives_keep_the_pixels_and_move_them() -> None:
    images = torch.randn(3, 2, 9, 9, generator=torch.Generator().manual_seed(0))
    made = negatives(images, 50, torch.Generator().manual_seed(1))
    assert made.shape == (50, 2, 9, 9)
    values = {tuple(image.flatten().sort().values.tolist()) for image in images}
    assert {tuple(image.flatten().sort().values.tolist()) for image in made} <= values
    same = [bool((image == images).flatten(1).all(1).any()) for image in made]
    assert not any(same)


def test_tiles_are_shuffled_and_a_remainder_stays() -> None:
    image = torch.arange(100.0).reshape(1, 1, 10, 10)
    cut = shuffled(image, torch.Generator().manual_seed(0))
    assert torch.equal(cut[..., 8:, :], image[..., 8:, :])
    tiles = {
        tuple(t.flatten().tolist())
        for t in image[0, 0, :8, :8].unfold(0, 2, 2).unfold(1, 2, 2).flatten(0, 1)
    }
    after = {
        tuple(t.flatten().tolist())
        for t in cut[0, 0, :8, :8].unfold(0, 2, 2).unfold(1, 2, 2).flatten(0, 1)
    }
    assert tiles == after


def test_images_that_are_not_square_are_turned_by_half() -> None:
    made = negatives(torch.randn(2, 1, 8, 12), 20, torch.Generator().manual_seed(0))
    assert made.shape == (20, 1, 8, 12)


def test_with_negatives_kip_learns_what_a_single_class_looks_like() -> None:
    """Plain KIP is degenerate on one class; with negatives the images come near the class mean."""
    generator = torch.Generator().manual_seed(0)
    prototype = torch.nn.functional.interpolate(
        torch.randn(1, 1, 3, 3, generator=generator), size=8, mode="bilinear"
    )
    images = 2 * prototype + 0.3 * torch.randn(80, 1, 8, 8, generator=generator)
    likeness = {}
    for name in ("kip", "kip-negatives"):
        data = distiller(name)(
            images,
            torch.zeros(80, dtype=torch.int64),
            num_classes=5,
            per_class=4,
            steps=80,
            generator=torch.Generator().manual_seed(1),
        )
        likeness[name] = torch.cosine_similarity(
            data.images.mean(0).flatten(), images.mean(0).flatten(), dim=0
        )
    assert likeness["kip-negatives"] > likeness["kip"] + 0.15
