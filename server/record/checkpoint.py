"""Checkpoints: what a run needs in order to go on after any round, one file a round."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from server.record.packing import Arrays, pack, unpack

FORMAT = 2
KEY = "flwr-distill checkpoint"
FOLDER = "checkpoints"
PREFIX = "round-"


class CheckpointError(RuntimeError):
    """A run cannot be resumed; the text names the file or setting and says what differs."""


@dataclass(frozen=True)
class Checkpoint:
    """A run after a round.

    Parameters
    ----------
    run_id : int
        Flower's id of the run that wrote it; a resumed run has a new one.
    round : int
        The last round that is over; 0 before the first.
    settings : Mapping[str, Any]
        All settings, in nested tables.
    nodes : Mapping[int, str]
        Name of each node id that the run met.
    arrays : ArrayRecord
        The global model.
    state : Any
        The strategy's (:mod:`strategies.common.state`).
    record : Mapping[str, Any]
        What reports tell of the rounds so far (:class:`server.record.recorder.RunRecorder`).
    """

    run_id: int
    round: int
    settings: Mapping[str, Any]
    nodes: Mapping[int, str]
    arrays: ArrayRecord
    state: Any
    record: Mapping[str, Any]


def save_checkpoint(
    folder: Path, checkpoint: Checkpoint, keep: int = 2, best: int | None = None
) -> Path:
    """Write a checkpoint into the folder of a run, whole or not at all; remove old ones.

    Parameters
    ----------
    folder : Path
        Of the run.
    checkpoint : Checkpoint
        What to write.
    keep : int (default: 2)
        How many of the last ones stay, this one among them.
    best : int, optional (default: None)
        Round whose checkpoint stays too.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    PackingError
        If state or record hold what cannot be kept.
    """
    arrays: Arrays = {}
    values = {field.name: getattr(checkpoint, field.name) for field in fields(checkpoint)}
    content = json.dumps(pack(values, arrays))
    header = {"format": FORMAT, "sha256": _digest(content, arrays), "content": content}
    target = folder / FOLDER / f"{PREFIX}{checkpoint.round:06d}.safetensors"
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    save_file(arrays, partial, metadata={KEY: json.dumps(header)})
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, target)
    for server_round, old in [*checkpoints(folder).items()][:-keep]:
        if server_round != best:
            old.unlink()
    return target


def load_checkpoint(file: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises
    ------
    CheckpointError
        If the file is none, of another format, truncated or changed.
    """
    remedy = "remove the file to resume from the one before it"
    try:
        with safe_open(file, framework="numpy") as opened:
            header = json.loads((opened.metadata() or {}).get(KEY, "null"))
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if not isinstance(header, dict):
            raise CheckpointError(f"{file} is a safetensors file, but no checkpoint of a run")
        if header["format"] != FORMAT:
            raise CheckpointError(
                f"{file} is a checkpoint of format {header['format']}, this version reads "
                f"format {FORMAT} (resume with the version that wrote it)"
            )
        if _digest(header["content"], arrays) != header["sha256"]:
            raise CheckpointError(f"{file} was changed: its checksum differs ({remedy})")
        return Checkpoint(**unpack(json.loads(header["content"]), arrays))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r} ({remedy})") from error


def checkpoints(folder: Path) -> dict[int, Path]:
    """Checkpoints in the folder of a run by round, the last one last."""
    files = sorted((folder / FOLDER).glob(f"{PREFIX}*.safetensors"))
    return {int(file.stem.removeprefix(PREFIX)): file for file in files}


def _digest(content: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(content.encode())
    for name in sorted(arrays):
        digest.update(arrays[name].reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
