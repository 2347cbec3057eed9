"""A node's own data: images by class of any kind that has a reader, or an ``.npz`` file."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from flwr_distill.base.text import listed
from flwr_distill.task.datasets.images import fit_samples, read_image
from flwr_distill.task.datasets.npz import read_npz_samples
from flwr_distill.task.datasets.types import DatasetError, DataSpec, RawSamples, check_raw_samples
from flwr_distill.task.image_files import Finding, UnusableFileError, class_names
from flwr_distill.task.labels import in_order, is_position
from flwr_distill.task.large_arrays import Stack
from flwr_distill.task.readers import DataReader, data_reader
from flwr_distill.task.survey import skipped_in_a_line
from flwr_distill.task.text_files import composed

logger = logging.getLogger("task")


def load_private_data(path: str | Path, spec: DataSpec) -> RawSamples:
    """Load a node's own data.

    Parameters
    ----------
    path : str or Path
        An ``.npz`` file with ``images`` and ``labels``, or images by class of any kind that has a
        reader (`task.readers`), such as a folder with one folder of images per class; classes may
        be missing. Hidden files are skipped, and unusable ones with a warning. Links are followed.
        One image at a time is in memory before it is converted.
    spec : DataSpec
        Images are converted to its channels, height and width. A class's name is looked up among
        its classes. If these have no names, classes that are named by whole numbers are the labels,
        and others are numbered in order (`task.labels.in_order`) if every class exists (it may be
        empty). Labels of an ``.npz`` file are looked up likewise where classes are named by
        numbers; else they are positions from 0.

    Raises
    ------
    DatasetError
        If there is no usable image, or labels or shapes do not fit.
    """
    path = Path(path)
    if reader := data_reader(path):
        return _read_images(path, reader, spec)
    if path.suffix == ".npz" and path.exists():
        raw = _named_by_number(fit_samples(read_npz_samples(path), spec), spec, path)
        return check_raw_samples(raw, spec, str(path))
    raise DatasetError(
        "is neither a folder nor a file of images by class, nor an existing .npz file",
        where=path,
        remedy="put it back, or correct data",
    )


def labels_of(path: str | Path, names: Sequence[str], spec: DataSpec) -> list[int]:
    """Labels of the classes with these names, of those that exist; see `load_private_data`."""
    path = Path(path)
    if (reader := data_reader(path)) is None:
        own = [spec.labels.label_of(composed(name)) for name in names]
        if spec.kind != "table" and not spec.labels.has_numbers:
            own += [int(name) for name in names if is_position(name)]
        return [label for label in own if label is not None]
    labels = _labels(path, reader, spec)
    wanted = set(map(composed, names))
    return [label for name, label in labels.items() if name in wanted]


def _read_images(path: Path, reader: DataReader, spec: DataSpec) -> RawSamples:
    label_of = _labels(path, reader, spec)
    labels: list[int] = []
    images, skipped = Stack(), []
    for sample in reader.images(path):
        try:
            if isinstance(sample, Finding):
                skipped.append(sample)
                continue
            if sample.label not in label_of:
                problem = "has changed while it was read"
                raise DatasetError(problem, where=path, remedy="start the run again")
            images.append(read_image(sample.image, spec))
            labels.append(label_of[sample.label])
        except UnusableFileError as error:
            skipped.append(replace(error.finding, place=sample.place))
    if not labels:
        raise DatasetError(f"has no usable image{skipped_in_a_line(skipped)}", where=path)
    if skipped:
        logger.warning("%s: %d images%s", path, len(labels), skipped_in_a_line(skipped))
    raw = RawSamples(images.stacked(), np.array(labels, dtype=np.int64))
    return check_raw_samples(raw, spec, str(path))


def _labels(path: Path, reader: DataReader, spec: DataSpec) -> dict[str, int]:
    """Label of each class by its name, as the data have it."""
    names = spec.labels.classes or class_names(path) or spec.class_names
    if len(names) != spec.num_classes:
        raise DatasetError(
            f"has {len(names)} classes ({listed(names)}) but {spec.name!r} has {spec.num_classes} "
            "classes",
            where=path,
            remedy=_list_all(names),
        )
    label_of = {name: label for label, name in enumerate(names)}
    own = in_order(reader.classes(path))
    unknown = [name for name in own if name not in label_of]
    if unknown and not spec.labels.classes:
        raise DatasetError(
            f"has classes {listed(own)}; numbers are positions from 0 to {spec.num_classes - 1} "
            "where the run names no classes",
            where=path,
            remedy=_list_all(own),
        )
    if unknown:
        raise DatasetError(
            f"classes {listed(unknown)}: not among the run's classes, {listed(names)}",
            where=path,
            remedy="rename them, or list all names in private.classes",
        )
    return {name: label_of[name] for name in own}


def _list_all(names: Sequence[str]) -> str:
    setting = f'private.classes="{",".join(names)}"'
    return f"list the names of all nodes' classes in the run's setting {setting}"


def _named_by_number(raw: RawSamples, spec: DataSpec, path: Path) -> RawSamples:
    """Samples whose integers are looked up among the classes, where these are named by numbers."""
    if not spec.labels.has_numbers:
        return raw
    numbers, places = np.unique(raw.labels, return_inverse=True)
    labels = [spec.labels.label_of(str(number)) for number in numbers]
    if None in labels:
        unknown = [str(n) for n, label in zip(numbers, labels, strict=True) if label is None]
        raise DatasetError(
            f"labels {listed(unknown)}: not among the run's classes, {listed(spec.labels.classes)}",
            where=path,
            remedy="list all names in private.classes",
        )
    return RawSamples(raw.images, np.array(labels, dtype=np.int64)[places])
