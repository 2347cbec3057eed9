"""Three domains of handwritten digits of equal size, as plug-ins for a node's ``dataset``.

``--dataset benchmarks.domains:usps``, with files in ``data_root``.
"""

from functools import partial
from pathlib import Path

import numpy as np

from task.datasets import Dataset, RawSamples, load_dataset

TRAIN = 3000
TEST = 1000


def _domain(name: str, root: Path, download: bool) -> Dataset:
    """First samples of a dataset in a fixed random order."""
    dataset = load_dataset(name, root, download=download)
    return Dataset(dataset.spec, _cut(dataset.train, TRAIN), _cut(dataset.test, TEST))


def _cut(samples: RawSamples, size: int) -> RawSamples:
    return samples.subset(np.random.default_rng(0).permutation(len(samples))[:size])


mnist = partial(_domain, "mnist")
usps = partial(_domain, "usps")
mnist_m = partial(_domain, "mnist-m")
