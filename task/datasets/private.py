"""A node's own data: a folder of images by class, or an ``.npz`` file."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from task.datasets.images import fit_samples, read_image, stack_images
from task.datasets.npz import read_npz_samples
from task.datasets.types import DatasetError, DataSpec, RawSamples, check_raw_samples
from task.image_files import (
    UnusableFileError,
    beside_class_folders,
    class_folders,
    class_names,
    visible,
)
from task.labels import is_position
from task.survey import skipped_in_a_line
from task.words import listed

logger = logging.getLogger("task")


def load_private_data(path: str | Path, spec: DataSpec) -> RawSamples:
    """Load a node's own data.

    Parameters
    ----------
    path : str or Path
        An ``.npz`` file with ``images`` and ``labels``, or a folder with one folder of images per
        class; classes may be missing. Hidden files are skipped, and with a warning files that are
        no images or cannot be read. Links are followed.
    spec : DataSpec
        Images are converted to its channels, height and width. A class folder's name is looked up
        among its classes. If these have no names, folders that are named by whole numbers are the
        labels, and others are numbered in order (`task.labels.in_order`) if every class has one (it
        may be empty). Labels of an ``.npz`` file are looked up likewise where classes are named by
        numbers; else they are positions from 0.

    Raises
    ------
    DatasetError
        If there is no usable image, or labels or shapes do not fit.
    """
    path = Path(path)
    if path.is_dir():
        return _read_class_folders(path, spec)
    if path.suffix == ".npz" and path.exists():
        raw = _named_by_number(fit_samples(read_npz_samples(path), spec), spec, path)
        return check_raw_samples(raw, spec, str(path))
    raise DatasetError(
        f"data={str(path)!r} is neither a folder of images by class nor an existing .npz file"
    )


def labels_of(path: str | Path, names: Sequence[str], spec: DataSpec) -> list[int]:
    """Labels of the classes with these names: of class folders, or in a file the labels themselves.

    Names of classes that are not there have none. For other parameters and errors see
    :func:`load_private_data`.
    """
    root = Path(path)
    if not root.is_dir():
        found = [spec.labels.label_of(name) for name in names]
        if not spec.labels.has_numbers:
            found += [int(name) for name in names if is_position(name)]
        return [label for label in found if label is not None]
    folders = class_folders(root)
    labels = _folder_labels(root, folders, spec)
    return [label for label, folder in zip(labels, folders, strict=True) if folder.name in names]


def _read_class_folders(root: Path, spec: DataSpec) -> RawSamples:
    folders = class_folders(root)
    labels, images, skipped = [], [], beside_class_folders(root)
    for label, folder in zip(_folder_labels(root, folders, spec), folders, strict=True):
        for file in visible(folder):
            try:
                images.append(read_image(file, spec))
                labels.append(label)
            except UnusableFileError as error:
                skipped.append(error.finding)
    if not images:
        raise DatasetError(
            f"{root}: its class folders have no usable image{skipped_in_a_line(skipped)}"
        )
    if skipped:
        logger.warning("%s: %d images%s", root, len(images), skipped_in_a_line(skipped))
    raw = RawSamples(stack_images(images), np.array(labels, dtype=np.int64))
    return check_raw_samples(raw, spec, str(root))


def _folder_labels(root: Path, folders: list[Path], spec: DataSpec) -> list[int]:
    names = spec.labels.classes or class_names(root) or spec.class_names
    if len(names) != spec.num_classes:
        raise DatasetError(
            f"{root}: has {len(names)} class folders ({listed(names)}) but {spec.name!r} has "
            f"{spec.num_classes} classes; list the names of all nodes' classes in the run's "
            f'setting private.classes="{",".join(names)}"'
        )
    label_of = {name: label for label, name in enumerate(names)}
    if unknown := [folder.name for folder in folders if folder.name not in label_of]:
        raise DatasetError(
            f"{root}: class folders {listed(unknown)}: not among the run's classes, "
            f"{listed(names)} (rename them, or list all names in private.classes)"
        )
    return [label_of[folder.name] for folder in folders]


def _named_by_number(raw: RawSamples, spec: DataSpec, path: Path) -> RawSamples:
    """Samples whose integers are looked up among the classes, where these are named by numbers."""
    if not spec.labels.has_numbers:
        return raw
    numbers, places = np.unique(raw.labels, return_inverse=True)
    labels = [spec.labels.label_of(str(number)) for number in numbers]
    if None in labels:
        unknown = [str(n) for n, label in zip(numbers, labels, strict=True) if label is None]
        raise DatasetError(
            f"{path}: labels {listed(unknown)}: not among the run's classes, "
            f"{listed(spec.labels.classes)} (list all names in private.classes)"
        )
    return RawSamples(raw.images, np.array(labels, dtype=np.int64)[places])
