"""A node's own data: images by class of any kind that has a reader, or an ``.npz`` file."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from task.datasets.images import fit_samples, read_image, stack_images
from task.datasets.npz import read_npz_samples
from task.datasets.types import DatasetError, DataSpec, RawSamples, check_raw_samples
from task.image_files import Finding, UnusableFileError, class_names
from task.readers import DataReader, data_reader
from task.survey import skipped_in_a_line
from task.text_files import composed

logger = logging.getLogger("task")


def load_private_data(path: str | Path, spec: DataSpec, classes: Sequence[str] = ()) -> RawSamples:
    """Load a node's own data.

    Parameters
    ----------
    path : str or Path
        An ``.npz`` file with ``images`` and ``labels``, or images by class of any kind that has a
        reader (`task.readers`), such as a folder with one folder of images per class. If all
        class names are integers, these are the labels, and classes may be missing. Hidden files
        are skipped, and with a warning files that are no images or cannot be read. Links are
        followed. One image at a time is in memory before it is converted.
    spec : DataSpec
        Images are converted to its channels, height and width.
    classes : Sequence[str] (default: ())
        Names of classes by label; classes may be missing. Without it, named classes are numbered
        in sorted order, and none may be missing (a class folder may be empty).

    Raises
    ------
    DatasetError
        If there is no usable image, or labels or shapes do not fit.
    """
    path = Path(path)
    if reader := data_reader(path):
        return _read_images(path, reader, spec, classes)
    if path.suffix == ".npz" and path.exists():
        return check_raw_samples(fit_samples(read_npz_samples(path), spec), spec, str(path))
    raise DatasetError(
        f"data={str(path)!r} is neither a folder nor a file of images by class, nor an existing "
        ".npz file"
    )


def labels_of(
    path: str | Path, names: Sequence[str], spec: DataSpec, classes: Sequence[str] = ()
) -> list[int]:
    """Labels of the classes with these names: of images, or in an npz the labels themselves.

    Names of classes that are not there have none. For other parameters and errors see
    :func:`load_private_data`.
    """
    path = Path(path)
    if (reader := data_reader(path)) is None:
        return [int(name) for name in names if name.isdecimal()]
    labels = _labels(path, reader, spec, classes)
    wanted = set(map(composed, names))
    return [label for name, label in labels.items() if name in wanted]


def _read_images(
    path: Path, reader: DataReader, spec: DataSpec, classes: Sequence[str]
) -> RawSamples:
    label_of = _labels(path, reader, spec, classes)
    labels, images, skipped = [], [], []
    for sample in reader.images(path):
        try:
            if isinstance(sample, Finding):
                skipped.append(sample)
                continue
            if sample.label not in label_of:
                raise DatasetError(f"{path}: has changed while it was read; start the run again")
            images.append(read_image(sample.image, spec))
            labels.append(label_of[sample.label])
        except UnusableFileError as error:
            skipped.append(replace(error.finding, place=sample.place))
    if not images:
        raise DatasetError(f"{path}: has no usable image{skipped_in_a_line(skipped)}")
    if skipped:
        logger.warning("%s: %d images%s", path, len(images), skipped_in_a_line(skipped))
    raw = RawSamples(stack_images(images), np.array(labels, dtype=np.int64))
    return check_raw_samples(raw, spec, str(path))


def _labels(
    root: Path, reader: DataReader, spec: DataSpec, classes: Sequence[str]
) -> dict[str, int]:
    """Label of each class by its name, as the data have it."""
    names = class_names(root)
    if not names:
        numbers = {name: int(name) for name in reader.classes(root)}
        for name, label in numbers.items():
            if label >= spec.num_classes:
                raise DatasetError(
                    f"{root}: class {name}: label {label} is outside 0 to {spec.num_classes - 1}, "
                    f"the labels of {spec.name!r}"
                )
        return numbers
    if classes:
        unknown = [name for name in names if name not in classes]
        if unknown:
            raise DatasetError(
                f"{root}: {', '.join(unknown)}: not in private.classes = {','.join(classes)!r} "
                "(rename these classes, or add them to the setting)"
            )
        return {name: classes.index(name) for name in names}
    if len(names) != spec.num_classes:
        raise DatasetError(
            f"{root}: has {len(names)} classes ({', '.join(names[:5])}, ...) but "
            f"{spec.name!r} has {spec.num_classes} classes; list the names of all nodes' classes "
            f'in the run\'s setting private.classes="{",".join(names)}", or name the classes by '
            "label number"
        )
    return {name: label for label, name in enumerate(names)}
