"""A cluster head's pool D_h: its own data and the virtual data that its members sent (HFLDD)."""

from functools import lru_cache
from logging import WARNING
from pathlib import Path

import torch
from flwr.app import ConfigRecord
from flwr.common import log

from client.session import Session
from distill.errors import VirtualDataError
from distill.virtual_data import VirtualData
from task.datasets import Samples
from task.messages import PAYLOAD, SENDER

PREFIX = "parcel-"


def keep_parcel(session: Session, rank: int, parcel: ConfigRecord) -> bool:
    """Check a member's virtual data and keep it in the node's store.

    Parameters
    ----------
    session : Session
        The head's.
    rank : int
        Rank of the member in its cluster. It orders the pool, which must not depend on Flower's
        random node ids.
    parcel : ConfigRecord
        ``payload``, what :meth:`distill.virtual_data.VirtualData.to_bytes` gave, and ``sender``.

    Returns
    -------
    bool
        False where the parcel was malformed or did not fit the task; it is then set aside with a
        line in the log.
    """
    spec, payload = session.data.spec, parcel.get(PAYLOAD)
    try:
        if not isinstance(payload, bytes):
            raise VirtualDataError(f"payload: expected bytes, got {type(payload).__name__}")
        VirtualData.from_bytes(payload).validate(spec.shape, spec.num_classes)
    except VirtualDataError as error:
        log(WARNING, "Parcel from node %s set aside: %s", parcel.get(SENDER), error)
        return False
    session.store.write(f"{PREFIX}{rank:06d}", payload)
    return True


def pooled_samples(session: Session) -> Samples:
    """D_h: the head's own training samples and all virtual data in its store, on its device."""
    own = session.data.train
    paths = [session.store.folder / n for n in session.store.names() if n.startswith(PREFIX)]
    if not paths:
        return own
    received = _read_parcels(tuple((path, path.stat().st_mtime_ns) for path in paths))
    received = received.to(session.device)
    return Samples(
        inputs=torch.cat([own.inputs, received.inputs]),
        labels=torch.cat([own.labels, received.labels]),
    )


@lru_cache(maxsize=4)
def _read_parcels(files: tuple[tuple[Path, int], ...]) -> Samples:
    """Decode parcels, once as long as the files do not change (path, modification time in ns)."""
    parcels = [VirtualData.from_bytes(path.read_bytes()) for path, _ in files]
    return Samples(
        inputs=torch.cat([parcel.images for parcel in parcels]),
        labels=torch.cat([parcel.labels for parcel in parcels]),
    )
