"""Small domains of FedLGD's tables, as plug-ins for ``dataset``: what two cores can run.

``benchmarks.papers.small_domains:usps`` (also ``mnist``, ``mnist_m``) has 1,000 training and 300
test images. ``benchmarks.papers.small_domains:contrast`` and the like are a tenth of CIFAR10C: 600
training and 200 test images of one corruption, of the test images of CIFAR-10. Published files are
read where they exist, else the corruption is made. Its severity is 3: the paper states none.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_distill.task.datasets import Dataset, load_dataset
from flwr_distill.task.datasets.corruptions import PREFIX, corrupted, published_files

DIGITS = ("mnist", "usps", "mnist-m")
OF_DIGITS, OF_CORRUPTIONS = (100, 30), (60, 20)
"""Images of each class, to train on and to test."""
SEVERITY = 3


def _digits(name: str, root: Path, download: bool) -> Dataset:
    return _small(load_dataset(name, root, download=download), *OF_DIGITS)


def _corruption(name: str, root: Path, download: bool) -> Dataset:
    name = f"{PREFIX}{name}-{SEVERITY}"
    if all(file.exists() for file in published_files(name, root)):
        return _small(load_dataset(name, root), *OF_CORRUPTIONS)
    clean = load_dataset("cifar10", root, download=download)
    whole = Dataset(clean.spec, clean.test, clean.test)  # as the published files
    return corrupted(_small(whole, *OF_CORRUPTIONS), name)


def _small(data: Dataset, train: int, test: int) -> Dataset:
    """The first images of each class to train on, and the last ones to test."""
    return Dataset(
        data.spec,
        data.train.subset(_places(data.train.labels, train, 1)),
        data.test.subset(_places(data.test.labels, test, -1)),
    )


def _places(labels: NDArray[np.int64], each: int, step: int) -> NDArray[np.int64]:
    of_class = [np.flatnonzero(labels == label)[::step][:each] for label in np.unique(labels)]
    return np.sort(np.concatenate(of_class))


def __getattr__(name: str) -> Callable[[Path, bool], Dataset]:
    if name.startswith("_"):
        raise AttributeError(name)
    name = name.replace("_", "-")
    return partial(_digits if name in DIGITS else _corruption, name)
