"""A node's files for a run, so that a restarted process or a resumed run finds them again."""

import fcntl
import os
import secrets
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from task.durable import replacing

CONTINUES = "continues"
"""Blob that names the run that this run resumes, and the node's id in it."""

SPENT = "privacy-spent"
"""Blob that holds what was spent of the node's privacy budget."""

SECRET = "place-secret"
"""File of a state directory by which a server knows the node again when it resumes a run."""

SECRET_BYTES = 16

LASTING = "lasting"
"""Folder of a state directory with files that are of no single run."""

KEPT_ROUNDS = 2
"""Rounds to keep a blob for: a server that died may have no checkpoint of the last one."""


@dataclass(frozen=True)
class NodeStore:
    """Named blobs in a node's state directory.

    Write a blob that changes every round with the store of that round (`at`). It keeps the previous
    round's blob too, so a resumed run can take up the state at the end of its checkpoint's round.

    Parameters
    ----------
    folder : Path
        Folder of this node and run, created by the first write.
    round : int, optional (default: None)
        Round of the blobs written; None for blobs of no round.
    """

    folder: Path
    round: int | None = None

    @classmethod
    def open(cls, state_dir: str | Path | None, run_id: int, node_id: int) -> "NodeStore":
        """Store of one node for one run.

        A state directory of None is FLWR_DISTILL_STATE from the environment, else a folder of this
        user in the system's temporary directory.
        """
        root = state_dir or os.environ.get("FLWR_DISTILL_STATE") or _temporary_root()
        return cls(Path(root) / "runs" / str(run_id) / str(node_id))

    def at(self, server_round: int | None) -> Self:
        """The same store, for blobs of a round, or of none."""
        return replace(self, round=server_round)

    def write(self, name: str, data: bytes) -> None:
        """Write ``data`` under ``name``, atomically; it outlasts a power cut."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = name if self.round is None else f"{name}@{self.round:06d}"
        with replacing(self.folder / file) as partial:
            partial.touch(mode=0o600)
            partial.write_bytes(data)
        if self.round is not None:
            for old in self._rounds(name)[:-KEPT_ROUNDS]:
                old.unlink()

    def read(self, name: str) -> bytes | None:
        """Read the blob ``name`` of the last round; None if there is none."""
        file = self.file(name)
        return None if file is None else file.read_bytes()

    def file(self, name: str) -> Path | None:
        """File of the blob ``name`` of the last round; None if there is none."""
        files = [self.folder / name, *self._rounds(name)]
        return next((file for file in reversed(files) if file.is_file()), None)

    def names(self) -> list[str]:
        """Names of all files, sorted."""
        if not self.folder.is_dir():
            return []
        return sorted(path.name for path in self.folder.iterdir() if path.name[0] != ".")

    def take_over(self, run_id: str, node_id: str, server_round: int) -> int:
        """Copy the blobs that a node had at the end of a round of another run; return their number.

        Files of links are not copied: they are valid for one run only.
        """
        other, plain = NodeStore(self.folder.parent.parent / run_id / node_id), self.at(None)
        count = 0
        for name in other.names():
            _, _, written = name.partition("@")
            if (other.folder / name).is_file() and int(written or 0) <= server_round:
                plain.write(name, (other.folder / name).read_bytes())
                count += 1
        plain.write(CONTINUES, f"{run_id}/{node_id}".encode())
        return count

    def secret(self) -> bytes:
        """Random bytes of the state directory, made when they are first asked for.

        Nodes that share the directory share them, even if they ask at the same time.
        """
        root = self.folder.parents[2]
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = root / SECRET
        lock = os.open(root, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.is_file() or file.stat().st_size != SECRET_BYTES:  # or damaged
                with replacing(file) as partial:
                    partial.touch(mode=0o600)
                    partial.write_bytes(secrets.token_bytes(SECRET_BYTES))
            return file.read_bytes()
        finally:
            os.close(lock)

    @property
    def lasting(self) -> "NodeStore":
        """Store of the state directory, for what any later run may use again."""
        return NodeStore(self.folder.parents[2] / LASTING)

    @property
    def origin(self) -> "NodeStore":
        """Store of the first run in the chain of runs that this one resumes.

        It holds what concerns all of these runs together, such as the privacy budget.
        """
        resumed = self.read(CONTINUES)
        if resumed is None:
            return self.at(None)
        return NodeStore(self.folder.parent.parent / resumed.decode()).origin

    def _rounds(self, name: str) -> list[Path]:
        return sorted(self.folder.glob(f"{name}@*"))


def remove_old_runs(state_dir: Path, age: float) -> None:
    """Remove runs' files if nothing has changed in them for `age` seconds, and old lasting ones.

    What was spent of a privacy budget stays, with what leads to it from resumed runs: it must never
    be spent again.
    """
    newest = time.time() - age
    for path in state_dir.glob(f"{LASTING}/*"):
        if _changed(path) <= newest:
            path.unlink(missing_ok=True)
    for folder in state_dir.glob("runs/*/*"):
        files = [path for path in folder.rglob("*") if not path.is_dir()]
        if any(_changed(path) > newest for path in [folder, *files]):
            continue
        for path in files:
            if path.name not in (SPENT, CONTINUES):
                path.unlink(missing_ok=True)
        for path in [*sorted(folder.rglob("*"), reverse=True), folder, folder.parent]:
            with suppress(OSError):  # it is not empty
                path.rmdir()


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # just now
        return time.time()


def _temporary_root() -> Path:
    return Path(tempfile.gettempdir()) / f"flwr-distill-{os.getuid()}"
