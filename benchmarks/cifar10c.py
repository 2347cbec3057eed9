"""A tenth of FedLGD's CIFAR10C, as plug-ins for ``dataset``: what a run on two cores can load.

``benchmarks.cifar10c:contrast`` has 600 training and 200 test images of one corruption, of the test
images of CIFAR-10. Published files are read where they exist, else the corruption is made. The
severity is 3: the paper states none.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_distill.task.datasets import Dataset, load_dataset
from flwr_distill.task.datasets.corruptions import PREFIX, corrupted, published_files

TRAIN, TEST = 60, 20
"""Images of each class."""
SEVERITY = 3


def _domain(corruption: str, root: Path, download: bool) -> Dataset:
    name = f"{PREFIX}{corruption}-{SEVERITY}"
    if all(file.exists() for file in published_files(name, root)):
        return _tenth(load_dataset(name, root))
    # Made of the test images, as the published ones.
    clean = load_dataset("cifar10", root, download=download)
    return corrupted(_tenth(Dataset(clean.spec, clean.test, clean.test)), name)


def _tenth(data: Dataset) -> Dataset:
    """The first images of each class to train on, and the last ones to test."""
    return Dataset(
        data.spec,
        data.train.subset(_places(data.train.labels, TRAIN, 1)),
        data.test.subset(_places(data.test.labels, TEST, -1)),
    )


def _places(labels: NDArray[np.int64], each: int, step: int) -> NDArray[np.int64]:
    of_class = [np.flatnonzero(labels == label)[::step][:each] for label in np.unique(labels)]
    return np.sort(np.concatenate(of_class))


def __getattr__(name: str) -> Callable[[Path, bool], Dataset]:
    if name.startswith("_"):
        raise AttributeError(name)
    return partial(_domain, name.replace("_", "-"))
