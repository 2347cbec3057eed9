"""Three domains of handwritten digits of equal size, and a smaller CIFAR-10, for ``dataset``.

``--dataset benchmarks.domains:usps``, with files in ``data_root``, is one of them, for a node's own
data. ``dataset="benchmarks.domains:digits"`` has three that need no file, and ``mnist_12000`` four
times as many samples of MNIST.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from flwr_distill.task.datasets import Dataset, RawSamples, load_dataset

TRAIN = 3000
TEST = 1000


def _domain(name: str, root: Path, download: bool, train: int = TRAIN) -> Dataset:
    """First samples of a dataset in a fixed random order."""
    dataset = load_dataset(name, root, download=download)
    return Dataset(dataset.spec, _cut(dataset.train, train), _cut(dataset.test, TEST))


def _cut(samples: RawSamples, size: int) -> RawSamples:
    return samples.subset(np.random.default_rng(0).permutation(len(samples))[:size])


def digits(root: Path, download: bool) -> Dataset:
    """The embedded digits, of which every third is a negative and every third on a bright gradient.

    Image i belongs to domain ``i % 3``.
    """
    data = load_dataset("digits", root, download=download)
    return Dataset(data.spec, _in_domains(data.train), _in_domains(data.test))


def _in_domains(samples: RawSamples) -> RawSamples:
    images = samples.images.copy()
    images[1::3] = 255 - images[1::3]
    gradient = np.linspace(0, 255, images.shape[-1])
    images[2::3] = np.rint(gradient + images[2::3] * (1 - gradient / 127.5))
    return RawSamples(images, samples.labels)


def cifar10_halved(root: Path, download: bool) -> Dataset:
    """CIFAR-10 with half as many pixels a side, each the mean of four."""
    data = load_dataset("cifar10", root, download=download)
    spec = replace(data.spec, name="cifar10-halved", shape=(3, 16, 16))
    return Dataset(spec, _halved(data.train), _halved(data.test))


def _halved(samples: RawSamples) -> RawSamples:
    count, channels, height, width = samples.images.shape
    squares = samples.images.reshape(count, channels, height // 2, 2, width // 2, 2)
    return RawSamples(np.rint(squares.mean(axis=(3, 5))).astype(np.uint8), samples.labels)


mnist = partial(_domain, "mnist")
mnist_12000 = partial(_domain, "mnist", train=12_000)
usps = partial(_domain, "usps")
mnist_m = partial(_domain, "mnist-m")
