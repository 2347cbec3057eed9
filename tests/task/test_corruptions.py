"""Corrupted CIFAR-10: what a name makes of an image, the same everywhere, and bad names."""

import io

import numpy as np
import pytest
import torch
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from PIL import Image
from scipy.ndimage import gaussian_filter
from torch.nn.functional import interpolate

from flwr_distill.task.datasets import DatasetError, load_dataset
from flwr_distill.task.datasets.corruptions import _CORRUPTIONS, corrupted
from tests.errors import at

KINDS = sorted(_CORRUPTIONS)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with CIFAR-10's format: smooth images, so that blur and pixels show."""
    folder = tmp_path_factory.mktemp("data") / "cifar10"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("test", 3)):
        coarse = torch.from_numpy(rng.integers(60, 200, (count, 3, 9, 9), dtype=np.uint8))
        images = interpolate(coarse.float(), (32, 32), mode="bilinear").byte().movedim(1, 3)
        np.savez(folder / f"{part}.npz", images=images.numpy(), labels=np.arange(count))
    return folder.parent


def distance(one, other):
    return float(np.abs(one.images.astype(float) - other.images).mean())


@pytest.mark.parametrize("kind", KINDS)
def test_a_corruption_changes_pixels_by_its_severity_and_nothing_else(root, kind):
    clean = load_dataset("cifar10", root)
    mild, again, strong = (
        load_dataset(f"cifar10-c/{kind}-{severity}", root) for severity in (1, 1, 5)
    )
    assert (mild.train.images == again.train.images).all()
    assert mild.spec == clean.spec
    assert mild.test.labels.tolist() == clean.test.labels.tolist()
    assert mild.train.images.dtype == np.uint8
    assert 0 < distance(clean.train, mild.train) < 30
    assert 0 < distance(clean.test, strong.test) < 80
    assert distance(clean.train, mild.train) < distance(clean.train, strong.train)


def test_domains_and_their_parts_have_noise_of_their_own(root):
    clean = load_dataset("cifar10", root)
    one, other = (load_dataset(f"cifar10-c/gaussian-noise-{s}", root) for s in (4, 5))
    noise = [d.train.images.astype(float) - clean.train.images for d in (one, other)]
    of_test = one.test.images.astype(float) - clean.test.images
    for two in (noise, (noise[0][:3], of_test)):
        assert abs(np.corrcoef(two[0].ravel(), two[1].ravel())[0, 1]) < 0.05


def test_degrees_mean_what_the_published_code_says(root):
    clean = load_dataset("cifar10", root).train.images / 255

    def made(name):
        return load_dataset(f"cifar10-c/{name}", root).train.images / 255

    assert np.std(made("gaussian-noise-5") - clean) == pytest.approx(0.10, rel=0.03)
    turned = made("impulse-noise-5") != np.rint(clean * 255) / 255
    assert turned.mean() == pytest.approx(0.07, rel=0.1)
    hsv = rgb_to_hsv(np.moveaxis(clean, 1, 3))
    hsv[..., 2] = np.minimum(hsv[..., 2] + 0.15, 1)
    assert np.moveaxis(made("brightness-3"), 1, 3) == pytest.approx(hsv_to_rgb(hsv), abs=0.003)
    mean = clean.mean(axis=(2, 3), keepdims=True)
    assert made("contrast-4") == pytest.approx(mean + 0.3 * (clean - mean), abs=0.003)
    blurred = gaussian_filter(clean, (0, 0, 0.8, 0.8), mode="mirror", truncate=4)
    assert made("gaussian-blur-4") == pytest.approx(blurred, abs=0.003)
    assert made("jpeg-5") == pytest.approx(np.stack([packed(image, 40) for image in clean]))


def packed(image, quality):
    """An image after JPEG, by Pillow."""
    file = io.BytesIO()
    pixels = np.rint(image * 255).astype(np.uint8)
    Image.fromarray(pixels.transpose(1, 2, 0)).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file)).transpose(2, 0, 1) / 255


@pytest.mark.parametrize("name", ["fog-3", "jpeg-6", "jpeg-0", "jpeg", ""])
def test_an_unknown_corruption_is_an_error_with_the_list(root, name):
    name = f"cifar10-c/{name}"
    with pytest.raises(DatasetError, match="zoom-blur", check=at("dataset", value=name)):
        corrupted(load_dataset("cifar10", root), name)


def test_without_cifar10_the_error_names_it(tmp_path):
    with pytest.raises(DatasetError, check=at("dataset", value="cifar10")):
        load_dataset("cifar10-c/jpeg-3", tmp_path)


def write_published(root, corruption, per_class=5):
    """Files as CIFAR-10-C has them: severities one after the other, pixels that tell which."""
    folder = root / "CIFAR-10-C"
    folder.mkdir(exist_ok=True)
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(10), per_class))
    images = np.zeros((5, len(order), 32, 32, 3), np.uint8)
    images += np.arange(1, 6, dtype=np.uint8)[:, None, None, None, None] * 50
    images[:, :, 0, 0, 0] = np.arange(len(order))
    images[..., 2] = 7
    np.save(folder / f"{corruption}.npy", images.reshape(-1, 32, 32, 3))
    np.save(folder / "labels.npy", np.tile(order, 5).astype(np.uint8))
    return order


@pytest.mark.parametrize(
    ("name", "file"),
    [("fog", "fog"), ("glass-blur", "glass_blur"), ("jpeg", "jpeg_compression")],
)
def test_published_files_are_read_by_severity_and_split_by_image(tmp_path, name, file):
    labels = write_published(tmp_path, file)
    for severity in (1, 4):
        data = load_dataset(f"cifar10-c/{name}-{severity}", tmp_path)
        assert (data.train.images[:, 0, 1, 1] == 50 * severity).all()
        assert (data.test.images[:, 2] == 7).all()
        places = [part.images[:, 0, 0, 0] for part in (data.train, data.test)]
        assert [labels[p].tolist() for p in places] == [
            data.train.labels.tolist(),
            data.test.labels.tolist(),
        ]
        assert data.train.labels.dtype == np.int64
        assert np.bincount(data.train.labels).tolist() == [3] * 10
        assert sorted(np.concatenate(places).tolist()) == list(range(50))
    with pytest.raises(DatasetError, check=at("dataset", value=f"cifar10-c/{name}-6")):
        load_dataset(f"cifar10-c/{name}-6", tmp_path)


def test_a_damaged_published_file_is_named(tmp_path):
    write_published(tmp_path, "fog")
    file = tmp_path / "CIFAR-10-C" / "fog.npy"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DatasetError, check=at(file)):
        load_dataset("cifar10-c/fog-1", tmp_path)


def test_what_has_no_published_file_is_made_of_cifar10(root):
    before = load_dataset("cifar10-c/contrast-2", root)
    write_published(root, "snow")
    assert (load_dataset("cifar10-c/contrast-2", root).train.images == before.train.images).all()
    assert len(load_dataset("cifar10-c/snow-2", root).train) == 30
