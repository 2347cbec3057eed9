"""Auxiliary images D_g: the same on every node, unrelated to any node's data (HFLDD, step 1)."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from flwr_distill.task.auxiliary_names import NAMED, NOISE, RESERVED
from flwr_distill.task.datasets.images import fit_array, read_image
from flwr_distill.task.datasets.npz import read_npz_images, read_npz_samples
from flwr_distill.task.datasets.registry import (
    data_root,
    dataset_files,
    dataset_names,
    folder_names,
    load_dataset,
)
from flwr_distill.task.datasets.types import DatasetError, DataSpec, Pixels, normalise, not_found
from flwr_distill.task.large_arrays import stacked


def auxiliary_images(
    name: str, spec: DataSpec, size: int, seed: int, root: str | Path | None = None
) -> torch.Tensor:
    """Unlabelled images for soft labels (HFLDD, step 1), float32 (size, C, H, W), normalised.

    Equal arguments and files give the identical tensor on every node.

    Parameters
    ----------
    name : str
        ``noise`` (smooth random patterns), ``cifar100``, ``fashion-mnist``, ``tiny-imagenet``, or
        the path of a folder of images or an ``.npz`` file with ``images``.
    seed : int
        Seed of the patterns, or of the choice of images (without replacement).
    root : str or Path, optional (default: None)
        Folder of the named sets: ``<root>/<name>_aux`` or ``<root>/<name>`` (``-`` or ``_``) with
        ``train.npz`` or ``test.npz``, else as for `load_dataset`; None as there.

    Raises
    ------
    DatasetError
        If there are no images, or too few.
    """
    if size < 1:
        raise DatasetError("must be >= 1", where="auxiliary size", value=size, remedy="try 1000")
    if spec.kind == "text":
        raise DatasetError(
            "has no texts",
            where="auxiliary",
            value=name,
            remedy=f"choose {RESERVED}, and set partition.reserved",
        )
    rng = np.random.default_rng(seed)
    if name == NOISE:
        return _smooth_noise(spec, size, rng)
    stored = _stored_images(name, data_root() if root is None else Path(root))
    if len(stored) < size:
        raise DatasetError(
            f"has {len(stored)} images, not {size}",
            where="auxiliary",
            value=name,
            remedy="lower the auxiliary size or use noise",
        )
    chosen = rng.choice(len(stored), size, replace=False)
    return normalise(stacked(_fit(stored[index], spec) for index in chosen), spec)


def auxiliary_labels(
    name: str, size: int, seed: int, root: str | Path | None = None
) -> torch.Tensor:
    """Labels of the set's own classes, int64 (size,), of `auxiliary_images` with these arguments.

    Raises
    ------
    DatasetError
        If the set has none, or not one for each image.
    """
    labels = _stored_labels(name, data_root() if root is None else Path(root))
    chosen = np.random.default_rng(seed).choice(len(labels), size, replace=False)
    return torch.from_numpy(labels[chosen])


def auxiliary_files(name: str, root: str | Path | None = None) -> list[Path]:
    """Files and folders that `auxiliary_images` may read, existing or not."""
    if name == NOISE:
        return []
    if name not in NAMED:
        return [Path(name)]
    folder = data_root() if root is None else Path(root)
    stored = dataset_files(name, folder) if name in dataset_names() else []
    return [*_named_files(name, folder), *stored]


def _smooth_noise(spec: DataSpec, size: int, rng: np.random.Generator) -> torch.Tensor:
    """Draw Gaussian noise on a coarse grid, upsample it and standardise each image.

    Rows of one or two numbers are drawn as they are: standardised, one would be 0 / 0, and any two
    1 and -1.
    """
    channels, height, width = spec.shape
    if channels * height * width <= 2:
        return torch.from_numpy(rng.standard_normal((size, *spec.shape))).float()
    coarse = rng.standard_normal((size, channels, max(4, height // 4), max(4, width // 4)))
    smooth = F.interpolate(torch.from_numpy(coarse), (height, width), mode="bilinear")
    deviation, mean = torch.std_mean(smooth, dim=(1, 2, 3), keepdim=True, correction=0)
    return ((smooth - mean) / deviation).float()


def _stored_images(name: str, root: Path) -> Pixels | list[Path]:
    """All images of a set: pixels (n, C, H, W), or the image files."""
    if name in NAMED:
        return _named_images(name, root)
    path = Path(name)
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
    if path.suffix == ".npz" and path.exists():
        return read_npz_images(path)
    raise DatasetError(
        "is unknown",
        where="auxiliary",
        value=name,
        remedy=f"choose noise, {', '.join(NAMED)}, or an existing folder of images or .npz file",
    )


def _named_images(name: str, root: Path) -> Pixels:
    if file := _named_file(name, root):
        return read_npz_images(file)
    if name in dataset_names():
        return load_dataset(name, root).train.images
    places = ", ".join(map(str, _named_files(name, root)))
    raise not_found(name, places, ", or use noise", where="auxiliary")


def _stored_labels(name: str, root: Path) -> NDArray[np.int64]:
    file = _named_file(name, root) if name in NAMED else Path(name)
    if file and file.suffix == ".npz" and file.exists():
        stored = read_npz_samples(file)
        if stored.labels.shape != (len(stored.images),):  # others would be drawn than the images
            problem = f"has labels of shape {stored.labels.shape} for {len(stored.images)} images"
            raise DatasetError(problem, where=file, remedy="store one label for each image")
        return stored.labels
    if name in NAMED and name in dataset_names():
        return load_dataset(name, root).train.labels
    raise DatasetError("has no labels", where="auxiliary", value=name)


def _named_file(name: str, root: Path) -> Path | None:
    return next((file for file in _named_files(name, root) if file.exists()), None)


def _named_files(name: str, root: Path) -> list[Path]:
    folders = [root / f"{folder}{end}" for end in ("_aux", "") for folder in folder_names(name)]
    return [folder / part for folder in folders for part in ("train.npz", "test.npz")]


def _fit(image: Pixels | Path, spec: DataSpec) -> Pixels:
    return read_image(image, spec) if isinstance(image, Path) else fit_array(image, spec)
