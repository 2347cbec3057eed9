"""The embedded handwritten digits: real data that needs no download."""

from pathlib import Path

import numpy as np

from task.datasets.types import Dataset, DataSpec, RawSamples

_SPLIT_SEED = 0


def load_digits(spec: DataSpec, root: Path, download: bool) -> Dataset:
    """Load scikit-learn's 1,797 digits: 1,437 to train on, 360 to test on.

    The split is fixed and stratified by class. Pixels 0 to 16 become 0 to 255. ``root`` and
    ``download`` are not needed: the data come with scikit-learn.
    """
    from sklearn.datasets import load_digits as load_sklearn_digits
    from sklearn.model_selection import train_test_split

    bunch = load_sklearn_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = bunch.target.astype(np.int64)
    train, test = train_test_split(
        np.arange(len(labels)), test_size=360, stratify=labels, random_state=_SPLIT_SEED
    )
    samples = RawSamples(images, labels)
    return Dataset(spec, samples.subset(train), samples.subset(test))
