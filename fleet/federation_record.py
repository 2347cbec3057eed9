"""The file by which other processes find a local federation, and know that it is alive."""

from __future__ import annotations

import fcntl
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO


class FederationRunsError(RuntimeError):
    """Another federation runs in the same state directory."""


@dataclass(frozen=True)
class FederationRecord:
    """What others need to know of a local federation.

    Attributes
    ----------
    pid : int
        The process that started the federation and ends it on SIGTERM.
    control_address : str
        ``host:port`` of the SuperLink's Control API.
    flower_home : str
        Value of ``FLWR_HOME`` for ``flwr`` commands.
    node_dirs : list[str]
        The nodes' state directories.
    """

    pid: int
    control_address: str
    flower_home: str
    node_dirs: list[str]


class FederationFile:
    """A record in a state directory, held with a lock that the kernel drops with its process.

    Parameters
    ----------
    state_dir : Path
        The federation's state directory.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "federation.json"
        self._held: IO[str] | None = None

    def hold(self) -> None:
        """Claim the state directory.

        Raises
        ------
        FederationRunsError
            If it is taken.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise FederationRunsError(
                f"a federation already runs in {self._path.parent}: end it with "
                f"`flwr-distill down --state-dir {self._path.parent}`, or use another directory"
            ) from None
        self._held = file

    def write(self, record: FederationRecord) -> None:
        """Write the record of a state directory that is held."""
        self._path.write_text(json.dumps(asdict(record), indent=2), encoding="utf-8")

    def release(self) -> None:
        """Give the state directory back."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def read(self) -> FederationRecord | None:
        """Return the record of the federation that runs in the state directory, if one does."""
        try:
            with self._path.open(encoding="utf-8") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return FederationRecord(**json.load(file))
        except FileNotFoundError:
            pass
        return None
