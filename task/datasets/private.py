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
from task.survey import skipped_in_a_line

logger = logging.getLogger("task")


def load_private_data(path: str | Path, spec: DataSpec, classes: Sequence[str] = ()) -> RawSamples:
    """Load a node's own data.

    Parameters
    ----------
    path : str or Path
        An ``.npz`` file with ``images`` and ``labels``, or a folder with one folder of images per
        class. If all class folders have integer names, these are the labels, and classes
        may be missing. Hidden files are skipped, and with a warning files that are no images or
        cannot be read. Links are followed.
    spec : DataSpec
        Images are converted to its channels, height and width.
    classes : Sequence[str] (default: ())
        Names of class folders by label; classes may be missing. Without it, named folders are
        numbered in sorted order, and every class needs one (it may be empty).

    Raises
    ------
    DatasetError
        If there is no usable image, or labels or shapes do not fit.
    """
    path = Path(path)
    if path.is_dir():
        return _read_class_folders(path, spec, classes)
    if path.suffix == ".npz" and path.exists():
        return check_raw_samples(fit_samples(read_npz_samples(path), spec), spec, str(path))
    raise DatasetError(
        f"data={str(path)!r} is neither a folder of images by class nor an existing .npz file"
    )


def labels_of(
    path: str | Path, names: Sequence[str], spec: DataSpec, classes: Sequence[str] = ()
) -> list[int]:
    """Labels of the classes with these names: of class folders, or in a file the labels themselves.

    Names of classes that are not there have none. For other parameters and errors see
    :func:`load_private_data`.
    """
    root = Path(path)
    if not root.is_dir():
        return [int(name) for name in names if name.isdecimal()]
    folders = class_folders(root)
    labels = _folder_labels(root, folders, spec, classes)
    return [label for label, folder in zip(labels, folders, strict=True) if folder.name in names]


def _read_class_folders(root: Path, spec: DataSpec, classes: Sequence[str]) -> RawSamples:
    folders = class_folders(root)
    labels, images, skipped = [], [], beside_class_folders(root)
    labels_of = _folder_labels(root, folders, spec, classes)
    for label, folder in zip(labels_of, folders, strict=True):
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


def _folder_labels(
    root: Path, folders: list[Path], spec: DataSpec, classes: Sequence[str]
) -> list[int]:
    names = class_names(root)
    if not names:
        for folder in folders:
            if int(folder.name) >= spec.num_classes:
                raise DatasetError(
                    f"{folder}: label {int(folder.name)} is outside 0 to {spec.num_classes - 1}, "
                    f"the labels of {spec.name!r}"
                )
        return [int(folder.name) for folder in folders]
    if classes:
        unknown = [name for name in names if name not in classes]
        if unknown:
            raise DatasetError(
                f"{root}: {', '.join(unknown)}: not in private.classes = {','.join(classes)!r} "
                "(rename these class folders, or add them to the setting)"
            )
        return [classes.index(name) for name in names]
    if len(names) != spec.num_classes:
        raise DatasetError(
            f"{root}: has {len(names)} class folders ({', '.join(names[:5])}, ...) but "
            f"{spec.name!r} has {spec.num_classes} classes; list the names of all nodes' classes "
            f'in the run\'s setting private.classes="{",".join(names)}", or name the folders by '
            "label number"
        )
    return list(range(len(names)))
