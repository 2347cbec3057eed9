"""White blood cells of four sources, as a plug-in for ``dataset``.

The data root has them in the folder ``blood_cells``. ``benchmarks.papers.blood_cells:images`` are
all of them, and ``benchmarks.papers.blood_cells:sites`` says which are whose.
"""

from pathlib import Path

import numpy as np

from flwr_distill.task.datasets import Dataset, DatasetError, DataSpec
from flwr_distill.task.datasets.npz import read_array, read_npz_samples

SPEC = DataSpec("blood-cells", (3, 64, 64), 5, (0.805, 0.696, 0.699), (0.193, 0.237, 0.129))
"""Means and deviations are those of the training pixels."""


def images(root: Path, download: bool) -> Dataset:
    """Images of all sites; none is downloaded."""
    folder = root / "blood_cells"
    if not folder.is_dir():
        raise DatasetError("there is no such folder", where=folder)
    train, test = (read_npz_samples(folder / f"{part}.npz") for part in ("train", "test"))
    return Dataset(SPEC, train, test)


def sites(root: Path) -> dict[str, list[int]]:
    """Training images of each site."""
    of_image = read_array(root / "blood_cells" / "train.npz", "sites")
    return {
        str(node): np.flatnonzero(of_image == site).tolist()
        for node, site in enumerate(np.unique(of_image))
    }
