"""Loads the images for `flwr-distill distill`: by class, from an npz, or a named data set."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_distill.task.datasets import (
    Dataset,
    DatasetError,
    DataSpec,
    RawSamples,
    Samples,
    load_dataset,
    load_private_data,
)
from flwr_distill.task.datasets.npz import read_npz, read_npz_images
from flwr_distill.task.datasets.registry import dataset_names
from flwr_distill.task.image_files import Finding, UnusableFileError, class_names, inspect_image
from flwr_distill.task.labels import LabelMap
from flwr_distill.task.readers import DataReader, data_reader
from flwr_distill.task.settings import PrivateSettings
from flwr_distill.task.survey import skipped_in_a_line

HELD_BACK = 0.2
MAX_CLASSES = torch.iinfo(torch.int16).max + 1
"""Labels of virtual data are 16 bits wide."""


@dataclass(frozen=True)
class Source:
    """Images to distil, and held-back ones to judge the result."""

    spec: DataSpec
    train: Samples
    held_back: Samples
    class_names: tuple[str, ...]


def load_source(source: str, *, data_root: Path | None, shape: str | None, seed: int) -> Source:
    """Load the images, and hold some back.

    `source` is a named data set, images by class of any kind with a reader, or an npz with
    ``images`` and ``labels``. Of a named one the test part is held back. Of others it is a rounded
    fifth of each class, at least one of two images. `shape` (channels x height x width) resizes
    images by class.
    """
    path = Path(source)
    is_file = path.suffix == ".npz"
    if shape is not None and (source in dataset_names() or is_file):
        raise DatasetError(f"is for folders; {source} has its own", where="shape", value=shape)
    if source in dataset_names() or (":" in source and not path.exists()):
        dataset = load_dataset(source, data_root)
    elif reader := data_reader(path):
        spec = _spec_of_images(path, reader, shape)
        dataset = _split(load_private_data(path, spec), spec, seed)
    elif is_file and path.exists():
        dataset = _split(*_read_npz(path), seed)
    else:
        raise DatasetError(
            f"neither images by class nor an existing .npz file, nor one of the data sets "
            f"{', '.join(dataset_names())}, nor your own as 'package.module:function'",
            where=source,
        )
    if dataset.spec.kind != "image":
        problem = f"a data set of kind {dataset.spec.kind}; distillers need images"
        raise DatasetError(problem, where=source)
    return Source(
        dataset.spec,
        dataset.train.to_samples(dataset.spec),
        dataset.test.to_samples(dataset.spec),
        dataset.spec.class_names,
    )


def _spec(
    name: str, shape: tuple[int, int, int], num_classes: int, labels: LabelMap | None = None
) -> DataSpec:
    # Normalised as on nodes with ``dataset="private"``.
    half = (0.5,) * shape[0]
    return DataSpec(name, shape, num_classes, half, half, labels=labels or LabelMap())


def _read_npz(path: Path) -> tuple[RawSamples, DataSpec]:
    shape = read_npz_images(path).shape[1:]
    spec = _spec(path.name, (shape[0], shape[1], shape[2]), MAX_CLASSES)
    raw = read_npz(path, spec)
    return raw, replace(spec, num_classes=int(raw.labels.max()) + 1)


def _spec_of_images(path: Path, reader: DataReader, shape: str | None) -> DataSpec:
    labels = LabelMap(class_names(path))
    num_classes = len(labels.classes) or max(map(int, reader.classes(path)), default=0) + 1
    if num_classes > MAX_CLASSES:
        problem = f"has a class {num_classes - 1}, need 0 to {MAX_CLASSES - 1}"
        raise DatasetError(problem, where=path)
    if shape is None:
        return _spec(path.name, _common_shape(path, reader), num_classes, labels)
    checked = PrivateSettings.checked({"shape": shape}, "command line").shape
    channels, height, width = (int(side) for side in checked.split("x"))
    return _spec(path.name, (channels, height, width), num_classes, labels)


def _common_shape(path: Path, reader: DataReader) -> tuple[int, int, int]:
    """Shape of all images, from their headers; grey only if all of them are grey."""
    sizes, greys, skipped = set(), set(), []
    for sample in reader.images(path):
        try:
            if isinstance(sample, Finding):
                skipped.append(sample)
                continue
            stored = inspect_image(sample.image)
        except UnusableFileError as error:
            skipped.append(error.finding)
        else:
            sizes.add(stored.size)
            greys.add(stored.is_grey)
    if not sizes:
        raise DatasetError(f"has no usable image{skipped_in_a_line(skipped)}", where=path)
    if len(sizes) > 1:
        examples = ", ".join(f"{height}x{width}" for height, width in sorted(sizes)[:3])
        problem = f"its images have {len(sizes)} sizes ({examples}, ...)"
        raise DatasetError(
            problem, where=path, remedy="give one size for all, as in --shape 3x32x32"
        )
    ((height, width),) = sizes
    return (1 if all(greys) else 3, height, width)


def _split(raw: RawSamples, spec: DataSpec, seed: int) -> Dataset:
    generator = np.random.default_rng(seed)
    training: list[NDArray[np.int64]] = []
    held_back: list[NDArray[np.int64]] = []
    for c in np.unique(raw.labels):
        indices = generator.permutation(np.flatnonzero(raw.labels == c))
        count = max(1, round(HELD_BACK * len(indices))) if len(indices) > 1 else 0
        held_back.append(indices[:count])
        training.append(indices[count:])
    if not any(map(len, held_back)):
        problem = f"{len(raw)} image(s), no two of a class"
        remedy = "add images, so that one can be held back for the test"
        raise DatasetError(problem, where=spec.name, remedy=remedy)
    train, test = (raw.subset(np.sort(np.concatenate(part))) for part in (training, held_back))
    return Dataset(spec, train, test)
