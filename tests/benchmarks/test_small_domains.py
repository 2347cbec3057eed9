"""Small domains of FedLGD's tables: equal by class, from made corruptions or published files."""

import numpy as np
import pytest

from flwr_distill.task.datasets import load_dataset

EACH = 100


@pytest.fixture
def root(tmp_path):
    """CIFAR-10 whose pixels say which test image they are."""
    folder = tmp_path / "cifar10"
    folder.mkdir()
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), EACH))
    images = np.zeros((len(labels), 32, 32, 3), np.uint8)
    images[:] = (np.arange(len(labels)) % 256)[:, None, None, None]
    np.savez(folder / "test.npz", images=images, labels=labels)
    np.savez(folder / "train.npz", images=255 - images[:10], labels=np.arange(10))
    return tmp_path


def test_a_corruption_is_made_of_the_first_and_last_test_images_of_each_class(root):
    data = load_dataset("benchmarks.papers.small_domains:gaussian_noise", root)
    clean = load_dataset("cifar10", root).test
    assert np.bincount(data.train.labels).tolist() == [60] * 10
    assert np.bincount(data.test.labels).tolist() == [20] * 10
    places = [np.flatnonzero(clean.labels == label) for label in range(10)]
    for part, own in ((data.train, slice(60)), (data.test, slice(-20, None))):
        found = part.images.mean(axis=(1, 2, 3))
        expected = np.sort(np.concatenate([of_class[own] for of_class in places]))
        means = clean.images[expected].mean(axis=(1, 2, 3))
        assert np.abs(found - means).max() < 15


def test_published_files_come_first(root):
    folder = root / "CIFAR-10-C"
    folder.mkdir()
    labels = np.tile(np.repeat(np.arange(10), EACH), 5)
    images = np.full((len(labels), 32, 32, 3), 9, np.uint8)
    np.save(folder / "elastic_transform.npy", images)
    np.save(folder / "labels.npy", labels.astype(np.uint8))
    data = load_dataset("benchmarks.papers.small_domains:elastic_transform", root)
    assert (data.train.images == 9).all()
    assert (len(data.train), len(data.test)) == (600, 200)
