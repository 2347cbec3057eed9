"""Checkpoints: what a run needs to continue after a round, one file per round."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flwr_distill.base.files import replacing
from flwr_distill.server.hooks import Hook
from flwr_distill.server.record.packing import Arrays, pack, unpack
from flwr_distill.task.errors import ReportedError

FORMAT = 4
KEY = "flwr-distill checkpoint"
FOLDER = "checkpoints"
PREFIX = "round-"


class CheckpointError(ReportedError):
    """A run cannot be resumed."""


@dataclass(frozen=True)
class Checkpoint:
    """State of a run after a round; round 0 is before training."""

    run_id: int  # Flower's; a resumed run has a new one
    round: int
    settings: Mapping[str, Any]
    nodes: Mapping[int, str]  # identity of each node id that the run met: see Roster
    arrays: ArrayRecord  # the global model
    state: Any  # the strategy's
    record: Mapping[str, Any]  # of History
    keys: Mapping[int, str] = field(default_factory=dict)  # of nodes that showed theirs


class Checkpoints(Hook):
    """Writes checkpoints; keeps those of the last `keep` rounds, and that of the `best` so far."""

    def __init__(self, folder: Path, keep: int, best: Callable[[], int | None]) -> None:
        self._folder = folder
        self._keep = keep
        self._best = best

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write it."""
        save_checkpoint(self._folder, checkpoint, self._keep, self._best())


def save_checkpoint(
    folder: Path, checkpoint: Checkpoint, keep: int = 2, best: int | None = None
) -> Path:
    """Write a checkpoint atomically; remove all but the last `keep` and the one of round `best`.

    Raises PackingError if state or record contain unsupported types.
    """
    arrays: Arrays = {}
    content = json.dumps(pack(vars(checkpoint), arrays))
    header = {"format": FORMAT, "sha256": _digest(content, arrays), "content": content}
    target = folder / FOLDER / f"{PREFIX}{checkpoint.round:06d}.safetensors"
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(".*"):  # of killed processes: only this one writes here now
        leftover.unlink()
    with replacing(target) as partial:
        save_file(arrays, partial, metadata={KEY: json.dumps(header)})
    for server_round, old in [*checkpoints(folder).items()][:-keep]:
        if server_round != best:
            old.unlink()
    return target


def load_checkpoint(file: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises CheckpointError if the file is not a checkpoint, of another format, truncated or changed.
    """
    remedy = "remove the file to resume from the one before it"

    def error_of(problem: str, remedy: str = remedy) -> CheckpointError:
        return CheckpointError(problem, where=file, remedy=remedy)

    try:
        with safe_open(file, framework="numpy") as opened:
            header = json.loads((opened.metadata() or {}).get(KEY, "null"))
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if not isinstance(header, dict):
            raise error_of("it is a safetensors file, but not a checkpoint", "")
        if header["format"] != FORMAT:
            raise error_of(
                f"it is of format {header['format']}, this version reads format {FORMAT}",
                "resume with the version that wrote it",
            )
        if _digest(header["content"], arrays) != header["sha256"]:
            raise error_of("it was changed: its checksum differs")
        return Checkpoint(**unpack(json.loads(header["content"]), arrays))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise error_of(f"it cannot be read: {error!r}") from error


def checkpoints(folder: Path) -> dict[int, Path]:
    """Checkpoints in a run's folder by round, in ascending order."""
    files = sorted((folder / FOLDER).glob(f"{PREFIX}*.safetensors"))
    return {int(file.stem.removeprefix(PREFIX)): file for file in files}


def _digest(content: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(content.encode())
    for name in sorted(arrays):
        digest.update(arrays[name].reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
