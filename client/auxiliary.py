"""The auxiliary set of a run, as a node reads it."""

import hashlib
from pathlib import Path

from torch import Tensor

from flwr_distill.client.session import Session, check_unchanged, own_file
from flwr_distill.task.auxiliary_names import RESERVED
from flwr_distill.task.datasets import (
    DataSpec,
    Samples,
    auxiliary_files,
    auxiliary_images,
    auxiliary_labels,
)
from flwr_distill.task.file_state import read_once
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import reserved_samples, source_files

OF_DATA = ("dataset", "data_root", "download", "seed", "partition")
"""Settings of the task that decide on an auxiliary set: equal ones are read once."""


def auxiliary_of(session: Session, name: str, size: int) -> Tensor:
    """Samples without labels, (size, ...), by name, path or ``@NAME``: see `auxiliary_images`.

    Those that cannot be read, or are not what the run read first, are a DatasetError.
    """
    task, root = session.task, str(session.node_config.get("data-root", ""))
    of_data = TaskSettings(**{key: getattr(task, key) for key in OF_DATA})
    wanted = of_data, session.own.spec, own_file(session.node_config, name), size, root
    samples, fingerprint = _read(*wanted)
    own = hashlib.blake2b(repr(wanted).encode(), digest_size=8).hexdigest()
    check_unchanged(session.store, f"auxiliary-{own}", fingerprint, _files(*wanted))
    return samples


def labelled_auxiliary(session: Session, name: str, size: int) -> Samples:
    """Samples of `auxiliary_of` with labels: the run's of ``reserved``, else the set's own.

    Raises DatasetError if the set has none.
    """
    task, root = session.task, str(session.node_config.get("data-root", ""))
    if name == RESERVED:
        return reserved_samples(task, session.own.spec, size, root)
    file = own_file(session.node_config, name)
    labels = auxiliary_labels(file, size, task.seed, root or task.data_root or None)
    return Samples(auxiliary_of(session, name, size), labels)


def _files(task: TaskSettings, spec: DataSpec, name: str, size: int, root: str) -> list[Path]:
    if name == RESERVED:
        return source_files(task, root)
    return auxiliary_files(name, root or task.data_root or None)


@read_once(_files, maxsize=2)
def _read(
    task: TaskSettings, spec: DataSpec, name: str, size: int, root: str
) -> tuple[Tensor, bytes]:
    if name == RESERVED:
        samples = reserved_samples(task, spec, size, root).inputs
    else:
        samples = auxiliary_images(name, spec, size, task.seed, root or task.data_root or None)
    return samples, hashlib.blake2b(samples.numpy().data, digest_size=16).digest()
