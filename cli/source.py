"""What `flwr-distill distill` condenses: a folder of images, an npz or a data set by name."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from task.datasets import (
    Dataset,
    DatasetError,
    DataSpec,
    RawSamples,
    Samples,
    load_dataset,
    load_private_data,
)
from task.datasets.npz import read_npz, read_npz_images
from task.datasets.registry import dataset_names
from task.settings import PrivateSettings

HELD_BACK = 0.2
MOST_CLASSES = torch.iinfo(torch.int16).max + 1
"""Labels of virtual data are 16 bits wide."""


@dataclass(frozen=True)
class Source:
    """Images to distil, and others like them to judge by.

    Parameters
    ----------
    spec : DataSpec
        What the images look like.
    train : Samples
        To distil.
    held_back : Samples
        Had no part in it.
    class_names : tuple[str, ...]
        One for each class of the spec: folder names, else the numbers.
    """

    spec: DataSpec
    train: Samples
    held_back: Samples
    class_names: tuple[str, ...]


def load_source(source: str, *, data_root: Path | None, shape: str | None, seed: int) -> Source:
    """Load the images and hold some back.

    Parameters
    ----------
    source : str
        Name of a data set (see `task.datasets.load_dataset`), which holds back its test part; or
        a folder with a folder of images a class, or an npz with ``images`` and ``labels``, of
        which a fifth of each class is held back, rounded, and one at least where there are two.
    data_root : Path or None
        Folder of named data sets; None takes their default.
    shape : str or None
        Channels x height x width that the images of a folder are brought to; None takes their
        own.
    seed : int
        Draws what is held back.

    Raises
    ------
    DatasetError
        If nothing is there, or it cannot be read, or nothing can be held back.
    SettingsError
        If `shape` is malformed.
    """
    path = Path(source)
    is_file = path.suffix == ".npz"
    if shape is not None and (source in dataset_names() or is_file):
        raise DatasetError(f"shape={shape} is for folders; {source} has a shape of its own")
    if source in dataset_names() or (":" in source and not path.exists()):
        dataset, names = load_dataset(source, data_root), None
    elif path.is_dir():
        folders = sorted(p.name for p in path.iterdir() if p.is_dir() and p.name[0] != ".")
        names = None if all(name.isdecimal() for name in folders) else tuple(folders)
        spec = _spec_of_folder(path, folders, shape)
        dataset = _split(load_private_data(path, spec), spec, seed)
    elif is_file and path.exists():
        dataset, names = _split(*_read_npz(path), seed), None
    else:
        raise DatasetError(
            f"{source!r} is neither an existing folder or .npz file, nor one of the data sets "
            f"{', '.join(dataset_names())}, nor your own as 'package.module:function'"
        )
    if dataset.spec.kind != "image":
        raise DatasetError(
            f"{source} is a data set of kind {dataset.spec.kind}; distillers need images"
        )
    return Source(
        dataset.spec,
        dataset.train.to_samples(dataset.spec),
        dataset.test.to_samples(dataset.spec),
        names or tuple(map(str, range(dataset.spec.num_classes))),
    )


def _spec(name: str, shape: tuple[int, int, int], num_classes: int) -> DataSpec:
    """Describe private images, normalised as nodes do it with ``dataset="private"``."""
    half = (0.5,) * shape[0]
    return DataSpec(name, shape, num_classes, half, half)


def _read_npz(path: Path) -> tuple[RawSamples, DataSpec]:
    shape = read_npz_images(path).shape[1:]
    spec = _spec(path.name, (shape[0], shape[1], shape[2]), MOST_CLASSES)
    raw = read_npz(path, spec)
    return raw, replace(spec, num_classes=int(raw.labels.max()) + 1)


def _spec_of_folder(root: Path, folders: list[str], shape: str | None) -> DataSpec:
    if not folders:
        raise DatasetError(f"{root}: has no class folders; sort the images into one a class")
    numbered = all(name.isdecimal() for name in folders)
    num_classes = max(map(int, folders)) + 1 if numbered else len(folders)
    if num_classes > MOST_CLASSES:
        raise DatasetError(f"{root}: has a class {num_classes - 1}, need 0 to {MOST_CLASSES - 1}")
    if shape is None:
        files = (p for f in folders for p in sorted((root / f).iterdir()) if p.name[0] != ".")
        return _spec(root.name, _common_shape(root, files), num_classes)
    checked = PrivateSettings.checked({"shape": shape}, "command line").shape
    channels, height, width = (int(side) for side in checked.split("x"))
    return _spec(root.name, (channels, height, width), num_classes)


def _common_shape(root: Path, files: Iterable[Path]) -> tuple[int, int, int]:
    """Shape of all images of a folder, from their headers; grey only if all are."""
    sizes, bases = set(), set()
    for file in files:
        try:
            with Image.open(file) as image:
                sizes.add(image.size)
                bases.add(Image.getmodebase(image.mode))
        except (OSError, ValueError) as error:
            raise DatasetError(
                f"{file}: not a readable image ({error}); replace or remove it"
            ) from error
    if not sizes:
        raise DatasetError(f"{root}: its class folders hold no images")
    if len(sizes) > 1:
        found = ", ".join(f"{height}x{width}" for width, height in sorted(sizes)[:3])
        raise DatasetError(
            f"{root}: its images have {len(sizes)} sizes ({found}, ...); give the one that all are "
            "brought to, as in --shape 3x32x32"
        )
    ((width, height),) = sizes
    return (1 if bases == {"L"} else 3, height, width)


def _split(raw: RawSamples, spec: DataSpec, seed: int) -> Dataset:
    """Hold back a fifth of each class."""
    generator = np.random.default_rng(seed)
    kept: list[NDArray[np.int64]] = []
    held_back: list[NDArray[np.int64]] = []
    for c in np.unique(raw.labels):
        own = generator.permutation(np.flatnonzero(raw.labels == c))
        count = max(1, round(HELD_BACK * len(own))) if len(own) > 1 else 0
        held_back.append(own[:count])
        kept.append(own[count:])
    if not any(map(len, held_back)):
        raise DatasetError(
            f"{spec.name}: {len(raw)} image(s), no two of a class; add images, so that one can be "
            "held back to judge by"
        )
    train, test = (raw.subset(np.sort(np.concatenate(part))) for part in (kept, held_back))
    return Dataset(spec, train, test)
