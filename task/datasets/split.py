"""Another split of a data set into training and test samples than its own."""

import numpy as np

from flwr_distill.task.datasets.types import Dataset, DatasetError, RawSamples


def split_anew(dataset: Dataset, test_share: float, pool: int, seed: int) -> Dataset:
    """Split the training and test samples of a data set anew, at random within each class.

    Parameters
    ----------
    test_share : float
        Share of each class that is for testing, rounded to whole samples.
    pool : int
        The first samples, those for training before those for testing, of which both parts are; 0
        takes all.
    seed : int
        Seed of the draws.

    Raises
    ------
    DatasetError
        If there are fewer samples than `pool`, or so few that a part would be empty.
    """
    parts = dataset.train, dataset.test
    available = sum(map(len, parts))
    if pool > available:
        raise DatasetError(
            f"{dataset.spec.name} has {available:,} samples here",
            where="partition.pool",
            value=pool,
            remedy="set it to 0 for all of them",
        )
    labels = np.concatenate([part.labels for part in parts])[: pool or None]
    images = np.concatenate([part.images for part in parts])[: pool or None]
    draws = np.random.default_rng([seed, 2])
    is_test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        samples = draws.permutation(np.flatnonzero(labels == label))
        is_test[samples[: round(test_share * len(samples))]] = True
    if is_test.all() or not is_test.any():
        raise DatasetError(
            f"leaves no samples to {'train on' if is_test.all() else 'test on'}",
            where="partition.test-share",
            value=test_share,
        )
    train, test = (RawSamples(images[chosen], labels[chosen]) for chosen in (~is_test, is_test))
    return Dataset(dataset.spec, train, test)
