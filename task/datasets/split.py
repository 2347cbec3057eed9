"""Another split of a data set into training and test samples than its own."""

import numpy as np

from flwr_distill.task.datasets.types import Dataset, DatasetError, RawSamples


def split_again(dataset: Dataset, test_share: float, max_samples: int, seed: int) -> Dataset:
    """Split the training and test samples of a data set again, at random within each class.

    Parameters
    ----------
    test_share : float
        Share of each class that is for testing, rounded to whole samples.
    max_samples : int
        At most so many samples, the first ones, are used: those for training before those for
        testing; 0 takes all.
    seed : int
        Seed of the draws.

    Raises
    ------
    DatasetError
        If there are so few samples that a part would be empty.
    """
    parts = dataset.train, dataset.test
    labels = np.concatenate([part.labels for part in parts])[: max_samples or None]
    images = np.concatenate([part.images for part in parts])[: max_samples or None]
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
