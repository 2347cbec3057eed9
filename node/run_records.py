"""What a node records of each run, where no app can write: its app bundle, and what it resumes.

The sandbox of a run shows its app the files of these runs (`node.run_sandbox`), of one bundle only.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flwr_distill.base.files import replacing
from flwr_distill.storage.store import RUNS

FOLDER = "run-records"
"""Folder of a state directory with a file for each run."""


class RunRecordError(Exception):
    """A run is of another app bundle than before, or resumes what it may not."""


@dataclass(frozen=True)
class _Record:
    bundle: str
    resumes: int | None = None


class RunRecords:
    """Records of runs in a node's state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._runs = state_dir / RUNS
        self._folder = state_dir / FOLDER

    def note(self, run_id: int, bundle: str, resumes: int | None = None) -> None:
        """Note that a run is of a bundle, and the run that it resumes.

        The first bundle of a run, or of one that resumes it, remains its bundle. RunRecordError if
        the run or the one that it resumes is of another bundle, or if it resumes two.
        """
        own = self._read(run_id) or _Record(bundle)
        if own.bundle != bundle:
            raise RunRecordError(f"run {run_id} began with app bundle {own.bundle}")
        if resumes is not None and own.resumes != resumes:
            if own.resumes is not None:
                raise RunRecordError(f"run {run_id} resumes run {own.resumes} already")
            self._check_resumed(resumes, bundle)
            own = _Record(bundle, resumes)
        self._write(run_id, own)

    def _check_resumed(self, run_id: int, bundle: str) -> None:
        resumed = self._read(run_id)
        if resumed is None and not (self._runs / str(run_id)).exists():  # it was not on this node
            self._write(run_id, _Record(bundle))
        elif resumed is None or resumed.bundle != bundle:
            own = "an unknown app bundle" if resumed is None else f"app bundle {resumed.bundle}"
            raise RunRecordError(
                f"run {run_id} was of {own}, and in a sandbox only a run of the same one resumes it"
            )

    def shared(self, run_id: int, bundle: str) -> list[int]:
        """Runs whose files a run of a bundle uses: itself, the one that it resumes, and so on."""
        runs, record = [run_id], self._read(run_id)
        while record is not None and record.resumes is not None and record.resumes not in runs:
            earlier = self._read(record.resumes)
            if earlier is None or earlier.bundle != bundle:
                break
            runs.append(record.resumes)
            record = earlier
        return runs

    def remove_old(self, age: float) -> None:
        """Remove records, if older than `age` seconds, of runs without files."""
        oldest = time.time() - age
        with suppress(OSError):
            for file in self._folder.iterdir():
                with suppress(OSError):
                    if file.stat().st_mtime <= oldest and not (self._runs / file.name).exists():
                        file.unlink()

    def _read(self, run_id: int) -> _Record | None:
        try:
            content = (self._folder / str(run_id)).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return _Record(**json.loads(content))

    def _write(self, run_id: int, record: _Record) -> None:
        if self._read(run_id) == record:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(self._folder / str(run_id)) as partial:
            partial.write_text(json.dumps(vars(record)), encoding="utf-8")
