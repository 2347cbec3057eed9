"""Checkpoints: what a run needs to continue after a round, one file per round."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from flwr.app import ArrayRecord
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flwr_distill.base.files import replacing
from flwr_distill.protocol.arrays import digest
from flwr_distill.server.hooks import Hook, RunEnd
from flwr_distill.server.record.packing import Arrays, pack, unpack
from flwr_distill.task.errors import ReportedError

FORMAT = 8
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
    arrays: ArrayRecord  # the global model, without its frozen part: see record.frozen
    state: Any  # the strategy's
    record: Mapping[str, Any]  # of History
    keys: Mapping[int, str] = field(default_factory=dict)  # of nodes that showed theirs


class Checkpoints(Hook):
    """Writes checkpoints; keeps those of the last `keep` rounds, and that of the `best` so far.

    A file is written while the next round trains, and finished before that ends: a server that is
    killed resumes from one of the last two rounds. With `at_once` it is finished at once. A `with`
    block does not end before the last file is finished.
    """

    def __init__(
        self, folder: Path, keep: int, best: Callable[[], int | None], *, at_once: bool = False
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._best = best
        self._at_once = at_once
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Path] | None = None

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Wait for the file of the round before; begin to write this one."""
        self._finish()
        packed = PackedCheckpoint.of(checkpoint)
        self._writing = self._writer.submit(packed.save, self._folder, self._keep, self._best())
        if self._at_once:
            self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._writer.shutdown()  # the run's error is more important than one about the file

    def on_run_end(self, end: RunEnd) -> None:
        """Wait for the file."""
        self._finish()

    def _finish(self) -> None:
        if self._writing:
            self._writing.result()


@dataclass(frozen=True)
class PackedCheckpoint:
    """A copy of a checkpoint's content, as its file has it."""

    round: int
    content: str
    arrays: Arrays

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """Copy it; raises PackingError if state or record contain unsupported types."""
        arrays: Arrays = {}
        return cls(checkpoint.round, json.dumps(pack(vars(checkpoint), arrays)), arrays)

    def save(self, folder: Path, keep: int = 2, best: int | None = None) -> Path:
        """Write the file atomically; remove all but the last `keep` and the one of round `best`."""
        header = {
            "format": FORMAT,
            "sha256": digest(self.content, self.arrays),
            "content": self.content,
        }
        target = folder / FOLDER / f"{PREFIX}{self.round:06d}.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in target.parent.glob(f".{PREFIX}*"):  # of killed processes
            leftover.unlink()
        with replacing(target) as partial:
            save_file(self.arrays, partial, metadata={KEY: json.dumps(header)})
        for server_round, old in [*checkpoints(folder).items()][:-keep]:
            if server_round != best:
                old.unlink()
        return target


def save_checkpoint(
    folder: Path, checkpoint: Checkpoint, keep: int = 2, best: int | None = None
) -> Path:
    """Write a checkpoint at once; see `PackedCheckpoint`."""
    return PackedCheckpoint.of(checkpoint).save(folder, keep, best)


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
        if digest(header["content"], arrays) != header["sha256"]:
            raise error_of("it was changed: its checksum differs")
        return Checkpoint(**unpack(json.loads(header["content"]), arrays))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise error_of(f"it cannot be read: {error!r}") from error


def checkpoints(folder: Path) -> dict[int, Path]:
    """Checkpoints in a run's folder by round, in ascending order; no copies by other names."""
    files = sorted((folder / FOLDER).glob(f"{PREFIX}*.safetensors"))
    rounds = ((file.stem.removeprefix(PREFIX), file) for file in files)
    return {int(number): file for number, file in rounds if number.isdecimal()}
