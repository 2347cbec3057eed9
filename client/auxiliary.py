"""The auxiliary set of a run, as a node reads it."""

import hashlib
from pathlib import Path

from torch import Tensor

from flwr_distill.client.session import Session, check_unchanged, own_file
from flwr_distill.task.datasets import DataSpec, auxiliary_files, auxiliary_images
from flwr_distill.task.file_state import read_once


def auxiliary_of(session: Session, name: str, size: int) -> Tensor:
    """Images without labels, (size, C, H, W), by name, path or ``@NAME``: see `auxiliary_images`.

    Images that cannot be read, or are not those that the run read first, are a DatasetError.
    """
    root = str(session.node_config.get("data-root", "")) or session.task.data_root or None
    wanted = own_file(session.node_config, name), session.own.spec, size, session.task.seed, root
    images, fingerprint = _read(*wanted)
    own = hashlib.blake2b(repr(wanted).encode(), digest_size=8).hexdigest()
    check_unchanged(session.store, f"auxiliary-{own}", fingerprint, _files(*wanted))
    return images


def _files(name: str, spec: DataSpec, size: int, seed: int, root: str | None) -> list[Path]:
    return auxiliary_files(name, root)


@read_once(_files, maxsize=2)
def _read(
    name: str, spec: DataSpec, size: int, seed: int, root: str | None
) -> tuple[Tensor, bytes]:
    images = auxiliary_images(name, spec, size, seed, root)
    return images, hashlib.blake2b(images.numpy().data, digest_size=16).digest()
