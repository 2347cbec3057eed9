"""The file by which other processes find a running local federation."""

from __future__ import annotations

import fcntl
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from flwr_distill.base.files import try_lock
from flwr_distill.task.errors import ReportedError

READERS_TIMEOUT = 0.5
"""Seconds for others that read the record to unlock it; each takes microseconds."""
_PAUSE = 0.02


class FederationRunsError(ReportedError, RuntimeError):
    """Another federation runs in the same state directory."""


@dataclass(frozen=True)
class FederationRecord:
    """How to reach a local federation; the process `pid` ends it on SIGTERM.

    Its ServerApps run in `working_dir`, to which a run's ``runs-dir`` is relative.
    """

    pid: int
    control_address: str
    flower_home: str
    node_dirs: list[str]
    working_dir: str


class FederationFile:
    """A record in a state directory, locked while its process lives."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "federation.json"
        self._locked_file: IO[str] | None = None

    def lock(self) -> None:
        """Lock the state directory, or raise `FederationRunsError`."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a+", encoding="utf-8")
        deadline = time.monotonic() + READERS_TIMEOUT
        while not try_lock(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                file.close()
                raise FederationRunsError(
                    "a federation already runs in this directory",
                    where=self._path.parent,
                    remedy=f"end it with `flwr-distill stop --state-dir {self._path.parent}`, or "
                    "use another directory",
                )
            time.sleep(_PAUSE)
        file.truncate(0)  # the record of an earlier federation
        self._locked_file = file

    def write(self, record: FederationRecord) -> None:
        """Write the record; the state directory must be locked."""
        assert self._locked_file is not None
        self._locked_file.write(json.dumps(asdict(record), indent=2))  # in one piece
        self._locked_file.flush()

    def unlock(self) -> None:
        """Unlock the state directory."""
        if self._locked_file is not None:
            self._locked_file.close()
            self._locked_file = None

    def read(self) -> FederationRecord | None:
        """Return the record of the running federation, None without one or before it is written."""
        try:
            with self._path.open(encoding="utf-8") as file:
                if not try_lock(file, fcntl.LOCK_SH):
                    content = file.read()
                    return FederationRecord(**json.loads(content)) if content else None
        except FileNotFoundError:
            pass
        return None
