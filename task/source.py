"""Data of a run: its spec, the parts of the nodes, the server's test samples."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_distill.base.text import listed
from flwr_distill.task.auxiliary_names import RESERVED
from flwr_distill.task.columns import Scale
from flwr_distill.task.datasets import (
    Dataset,
    DatasetError,
    DataSpec,
    RawSamples,
    Samples,
    dataset_files,
    load_dataset,
)
from flwr_distill.task.datasets.images import fit_samples
from flwr_distill.task.datasets.split import split_again
from flwr_distill.task.datasets.types import PRIVATE as PRIVATE  # passed on
from flwr_distill.task.datasets.types import check_raw_samples
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.file_state import read_once
from flwr_distill.task.labels import LabelMap
from flwr_distill.task.partition import check_partition, draw_samples, partition_indices
from flwr_distill.task.settings import TaskSettings

Split = tuple[float, int, int]
"""Share of the test samples, most samples and seed of `split_again`."""


@dataclass(frozen=True)
class ReadDataset:
    """A named data set as a process has read it.

    Parameters
    ----------
    key : tuple
        Its name, folder, whether it may be downloaded, and how the run splits it.
    state : bytes
        Of its files, when they were read; see `task.file_state.state_of`.
    dataset : Dataset
        What was read.
    """

    key: tuple[str, str, bool, Split | None]
    state: bytes
    dataset: Dataset


def open_columns(settings: TaskSettings) -> tuple[str, ...]:
    """Columns of nodes' tables that the nodes' means and deviations standardise; often none."""
    if settings.dataset != PRIVATE or not (columns := settings.private.table):
        return ()
    return tuple(columns.inputs[place] for place in columns.open_inputs)


def check_columns(settings: TaskSettings, *, edge: bool = False) -> None:
    """Raise SettingsError if the run needs means and variances that nodes must not send.

    `edge` says that the run is one of the nodes below an edge.
    """
    names, reason = open_columns(settings), ""
    if settings.train.dp_noise:
        reason = "train.dp-noise adds no noise to them"
    elif settings.evaluate.model:
        reason = "evaluate.model was trained on those of its own run"
    elif edge:
        reason = "each edge would have other ones"
    if names and reason:
        raise SettingsError(
            f"leaves means and deviations of {listed(names)} to the nodes, and {reason}",
            where="private.columns",
            remedy=f"state them for each column, private.columns={names[0]}:MEAN+-DEVIATION",
        )


def data_spec(settings: TaskSettings, data_root: str = "", scale: Scale | None = None) -> DataSpec:
    """Spec of a run's data: the named dataset's, or of nodes' own from ``private.*``.

    Images of nodes have mean and deviation 0.5. `data_root` is this machine's folder of datasets,
    if it differs from the run's, and `scale` that of `open_columns`, once it is known.
    """
    if settings.dataset == PRIVATE and (columns := settings.private.table):
        names = settings.private.class_names
        mean, std = columns.scale_of_inputs(scale)
        labels = LabelMap(names, columns.inputs)
        shape = len(columns.inputs), 1, 1
        return DataSpec(PRIVATE, shape, len(names), mean, std, kind="table", labels=labels)
    if settings.dataset == PRIVATE:
        channels, height, width = (int(side) for side in settings.private.shape.split("x"))
        half = (0.5,) * channels
        names = settings.private.class_names
        num_classes = len(names) or settings.private.num_classes
        shape = channels, height, width
        return DataSpec(PRIVATE, shape, num_classes, half, half, labels=LabelMap(names))
    return _dataset_of(settings, data_root).spec


def server_data(settings: TaskSettings) -> Dataset | None:
    """The server's copy of the named data set, to test on; None if nodes have their own.

    It is the same object as long as its files are unchanged.
    """
    if settings.dataset == PRIVATE:
        return None
    return _dataset_of(settings)


def read_dataset(settings: TaskSettings, data_root: str = "") -> ReadDataset | None:
    """The named data set, for `take_dataset` in another process.

    None if nodes have their own, or its folder has too many files to see whether it changes.
    """
    if settings.dataset == PRIVATE:
        return None
    key = _dataset_key(settings, data_root)
    dataset, state = _dataset(*key), _dataset.state(*key)
    return None if state is None else ReadDataset(key, state, dataset)


def take_dataset(read: ReadDataset) -> None:
    """Have this process use what another one read, until the files change."""
    _dataset.take(read.dataset, read.state, *read.key)


def partition_samples(
    settings: TaskSettings, partition_id: int, num_partitions: int, data_root: str = ""
) -> RawSamples:
    """One node's part of the named dataset's training samples, by partition id from 0."""
    dataset = _dataset_of(settings, data_root)
    return dataset.train.subset(_partitions(settings, num_partitions, data_root)[partition_id])


def reserved_samples(
    settings: TaskSettings, spec: DataSpec, size: int, data_root: str = ""
) -> Samples:
    """Some of the training samples that ``partition.reserved`` keeps from nodes, for all alike.

    Raises DatasetError if there are fewer than `size`.
    """
    reserved = 0 if settings.dataset == PRIVATE else settings.partition.reserved
    if size > reserved:
        raise DatasetError(
            f"has {reserved} samples, not {size}",
            where="auxiliary",
            value=RESERVED,
            remedy=f"set partition.reserved to {size}, with a named data set",
        )
    dataset = _dataset_of(settings, data_root)
    _, chosen = _drawn(settings, dataset)
    return dataset.train.subset(chosen[:size]).to_samples(spec)


def check_partition_settings(settings: TaskSettings) -> None:
    """Raise PartitionError if no number of nodes makes the partition possible."""
    if settings.dataset != PRIVATE:
        dataset = _dataset_of(settings)
        shared, _ = _drawn(settings, dataset)
        check_partition(
            dataset.train.labels[shared],
            scheme=settings.partition.scheme,
            classes_per_node=settings.partition.classes,
            clusters=settings.partition.clusters,
        )


def domain(
    settings: TaskSettings, name: str, partition: tuple[int, int] | None, data_root: str = ""
) -> Dataset:
    """Load a dataset that a node has instead of the run's, in the run's image format.

    Its labels must be among the run's. `partition` is the partition id and the number of partitions
    of its training samples; None means all but the reserved ones. Test samples are those of the
    whole dataset. Raises DatasetError if it does not fit.
    """
    spec = data_spec(settings, data_root)
    own = settings.model_copy(
        update={"dataset": name, "data_root": data_root or settings.data_root}
    )
    dataset = _dataset_of(own)
    kinds = dataset.spec.kind, spec.kind
    if kinds != ("image", "image"):
        raise DatasetError(
            f"is of kind {kinds[0]}, the run's of kind {kinds[1]}; both need images",
            where="dataset of this node",
            value=name,
        )
    train = partition_samples(own, *partition) if partition else _not_reserved(own, dataset)
    train, test = (
        check_raw_samples(fit_samples(part, spec), spec, f"dataset={name!r} of this node")
        for part in (train, dataset.test)
    )
    return Dataset(spec, train, test)


def source_files(settings: TaskSettings, data_root: str = "") -> list[Path]:
    """Files and folders of the run's data set and its partition, existing or not."""
    if settings.dataset == PRIVATE:
        return []
    return _partition_files(settings, 0, data_root)


def _dataset_of(settings: TaskSettings, data_root: str = "") -> Dataset:
    """The named data set, from this machine's `data_root` if there is one, split by the run."""
    return _dataset(*_dataset_key(settings, data_root))


def _dataset_key(settings: TaskSettings, data_root: str) -> tuple[str, str, bool, Split | None]:
    own = settings.partition
    split = (own.test_share, own.max_samples, settings.seed) if own.test_share else None
    return settings.dataset, data_root or settings.data_root, settings.download, split


def _dataset_files(name: str, data_root: str, download: bool, split: Split | None) -> list[Path]:
    return dataset_files(name, data_root or None)


@read_once(_dataset_files, maxsize=2)
def _dataset(name: str, data_root: str, download: bool, split: Split | None) -> Dataset:
    dataset = load_dataset(name, data_root or None, download=download)
    return split_again(dataset, *split) if split else dataset


def _partition_files(settings: TaskSettings, num_partitions: int, data_root: str) -> list[Path]:
    files = dataset_files(settings.dataset, data_root or settings.data_root or None)
    index_file = settings.partition.index_file
    return [*files, Path(index_file)] if index_file else files


@read_once(_partition_files, maxsize=2)
def _partitions(
    settings: TaskSettings, num_partitions: int, data_root: str
) -> list[NDArray[np.int64]]:
    dataset = _dataset_of(settings, data_root)
    shared, _ = _drawn(settings, dataset)
    parts = partition_indices(
        dataset.train.labels[shared],
        num_partitions,
        scheme=settings.partition.scheme,
        classes_per_node=settings.partition.classes,
        alpha=settings.partition.alpha,
        clusters=settings.partition.clusters,
        samples=settings.partition.samples,
        spread=settings.partition.spread,
        pooled=settings.partition.pooled,
        seed=settings.seed,
        index_file=settings.partition.index_file or None,
        min_of_a_class=settings.partition.min_of_a_class,
    )
    return [shared[part] for part in parts]


def _not_reserved(settings: TaskSettings, dataset: Dataset) -> RawSamples:
    """All training samples but those that ``partition.reserved`` keeps from nodes."""
    if not settings.partition.reserved:
        return dataset.train
    _, reserved = _drawn(settings, dataset)
    return dataset.train.subset(np.setdiff1d(np.arange(len(dataset.train)), reserved))


def _drawn(settings: TaskSettings, dataset: Dataset) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return draw_samples(
        dataset.train.labels,
        max_of_a_class=settings.partition.max_of_a_class,
        reserved=settings.partition.reserved,
        seed=settings.seed,
    )
