"""The frozen part of a run's model, written once: its checkpoints have what trains."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from flwr_distill.base.files import replacing
from flwr_distill.protocol.arrays import as_tensors, digest
from flwr_distill.server.record.checkpoint import CheckpointError

FILE = "frozen.safetensors"
KEY = "sha256"


def save_frozen(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the weights into a run's folder; no file if there are none."""
    if not weights:
        return
    # In C order, since safetensors writes bytes as they lie in memory.
    arrays = {name: np.array(weight.numpy(), order="C") for name, weight in weights.items()}
    with replacing(folder / FILE) as partial:
        save_file(arrays, partial, {KEY: digest("", arrays)})


def load_frozen(folder: Path) -> dict[str, Tensor]:
    """The weights in a run's folder; empty if there is no file.

    Raises CheckpointError if the file is truncated or changed.
    """
    file = folder / FILE
    if not file.is_file():
        return {}
    remedy = "restore it from a copy, or start a new run"
    try:
        with safe_open(file, framework="numpy") as opened:
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            known = (opened.metadata() or {}).get(KEY)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"it cannot be read: {error!r}", where=file, remedy=remedy) from error
    if known != digest("", arrays):
        raise CheckpointError("it was changed: its checksum differs", where=file, remedy=remedy)
    return dict(as_tensors(arrays))
