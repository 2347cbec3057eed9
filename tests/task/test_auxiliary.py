from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flwr_distill.task.datasets import (
    DatasetError,
    DataSpec,
    auxiliary_images,
    auxiliary_labels,
)
from tests.errors import at

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
GREY = DataSpec("grey", (1, 6, 8), 3, (0.25,), (0.5,))
COLOUR = DataSpec("colour", (3, 6, 8), 3, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


@pytest.fixture
def root(tmp_path):
    rng = np.random.default_rng(0)
    for folder, shape in (("fashion_mnist_aux", (28, 28)), ("tiny-imagenet", (32, 32, 3))):
        (tmp_path / folder).mkdir()
        images = rng.integers(0, 256, (20, *shape), dtype=np.uint8)
        np.savez(tmp_path / folder / "test.npz", images=images)
    (tmp_path / "pictures" / "deep").mkdir(parents=True)
    for index in range(6):
        pixels = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / "deep" / f"{index}.png")
    return tmp_path


def _sources(root):
    pictures, file = root / "pictures", root / "tiny-imagenet" / "test.npz"
    return ["noise", "fashion-mnist", "tiny-imagenet", str(pictures), str(file)]


@pytest.mark.parametrize("spec", [GREY, COLOUR], ids=["grey", "colour"])
def test_every_source_gives_the_same_images_to_every_node_and_fits_the_spec(root, spec):
    for name in _sources(root):
        first, again, other = (auxiliary_images(name, spec, 5, seed, root) for seed in (1, 1, 2))
        assert first.shape == (5, *spec.shape)
        assert first.dtype == torch.float32
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert len(torch.unique(first.flatten(1), dim=0)) == 5


def test_stored_images_are_normalised_like_inputs(tmp_path):
    np.savez(tmp_path / "white.npz", images=np.full((1, 6, 8, 3), 255, np.uint8))
    images = auxiliary_images(str(tmp_path / "white.npz"), COLOUR, 1, 0)
    expected = (1 - torch.tensor(COLOUR.mean)) / torch.tensor(COLOUR.std)
    torch.testing.assert_close(images[0, :, 2, 3], expected)


@pytest.mark.parametrize("side", [8, 28, 32])
def test_noise_is_standardised_and_smooth(side):
    images = auxiliary_images("noise", DataSpec("s", (1, side, side), 2, (0.5,), (0.5,)), 200, 0)
    per_image = images.flatten(1)
    torch.testing.assert_close(per_image.mean(1), torch.zeros(200), atol=1e-5, rtol=0)
    torch.testing.assert_close(per_image.std(1, correction=0), torch.ones(200))
    neighbours = (images[..., 1:] * images[..., :-1]).mean()
    assert neighbours > 0.5


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_noise_for_rows_of_few_numbers_has_as_many_different_rows(columns):
    table = DataSpec("t", (columns, 1, 1), 2, (0.0,) * columns, (1.0,) * columns, kind="table")
    rows = auxiliary_images("noise", table, 200, 0).flatten(1)
    assert len(rows.unique(dim=0)) == 200
    torch.testing.assert_close(rows.mean(), torch.zeros(()), rtol=0, atol=0.2)
    torch.testing.assert_close(rows.std(), torch.ones(()), rtol=0, atol=0.2)


def test_noise_draws_from_its_seed_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    auxiliary_images("noise", GREY, 3, 7)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("place", ["named", "by path"])
def test_labels_are_those_of_the_same_images(tmp_path, place):
    file = tmp_path / "cifar100" / "train.npz"
    file.parent.mkdir()
    labels = np.arange(20) * 5
    np.savez(
        file, images=np.full((20, 6, 8, 3), labels[:, None, None, None], np.uint8), labels=labels
    )
    name = "cifar100" if place == "named" else str(file)
    images = auxiliary_images(name, COLOUR, 7, 3, tmp_path)
    found = auxiliary_labels(name, 7, 3, tmp_path)
    pixels = (images * torch.tensor(COLOUR.std)[:, None, None]).add(
        torch.tensor(COLOUR.mean)[:, None, None]
    )
    assert (255 * pixels[:, 0, 0, 0]).round().long().tolist() == found.tolist()


def test_labels_that_are_not_one_for_each_image_are_refused(tmp_path):
    """They would be drawn otherwise than the images, and belong to others."""
    file = tmp_path / "set.npz"
    np.savez(file, images=np.zeros((20, 6, 8, 3), np.uint8), labels=np.arange(21))
    with pytest.raises(DatasetError, check=at(file)):
        auxiliary_labels(str(file), 7, 3, tmp_path)


@pytest.mark.parametrize("name", ["noise", "pictures"])
def test_noise_and_folders_have_no_labels(root, name):
    name = str(root / name) if name == "pictures" else name
    with pytest.raises(DatasetError, check=at("auxiliary", value=name)):
        auxiliary_labels(name, 3, 0, root)


@pytest.mark.skipif(not SHARED.exists(), reason=f"no real data in {SHARED}")
@pytest.mark.parametrize("name", ["cifar100", "fashion-mnist", "tiny-imagenet"])
def test_a_thousand_real_images_are_there(name):
    images = auxiliary_images(name, GREY, 1000, 0, SHARED)
    assert images.shape == (1000, *GREY.shape)


@pytest.mark.parametrize(
    ("name", "size", "folder", "said"),
    [
        ("tiny-imagenet", 21, ".", "has 20 images, not 21"),
        ("tiny-imagenet", 1, "none", r"tiny_imagenet_aux/train\.npz.*data-root"),
        ("odd", 1, ".", "noise, cifar100"),
    ],
)
def test_a_set_that_is_too_small_missing_or_unknown_is_an_error(root, name, size, folder, said):
    with pytest.raises(DatasetError, match=said, check=at("auxiliary", value=name)):
        auxiliary_images(name, GREY, size, 0, root / folder)


def test_a_size_below_one_is_an_error():
    with pytest.raises(DatasetError, check=at("auxiliary size", value=0)):
        auxiliary_images("noise", GREY, 0, 0)
