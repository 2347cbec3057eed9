"""The embedded handwritten digits: real data without a download."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from flwr_distill.task.datasets.types import Dataset, DataSpec, RawSamples

_SPLIT_SEED = 0


def load_digits(spec: DataSpec, root: Path, download: bool) -> Dataset:
    """Load scikit-learn's 1,797 digits: 1,437 for training, 360 for testing.

    The split is fixed and stratified by class: every fifth image of the shuffled classes is for
    testing. Pixels 0 to 16 become 0 to 255. ``root`` and ``download`` are not used.
    """
    # Read the file without importing scikit-learn, which takes as long as importing torch.
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the digits come with scikit-learn, which is not installed")
    stored = np.loadtxt(
        Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=","
    )
    images = np.rint(stored[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = stored[:, -1].astype(np.int64)
    shuffled = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    is_test = np.arange(len(labels)) % 5 == 0
    samples = RawSamples(images, labels)
    return Dataset(
        spec,
        train=samples.subset(np.sort(by_class[~is_test])),
        test=samples.subset(np.sort(by_class[is_test])),
    )
