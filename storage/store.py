"""A node's files for a run, so that a restarted process or a resumed run finds them again."""

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from flwr_distill.base.files import replacing
from flwr_distill.storage import untrusted
from flwr_distill.task.errors import SettingsError

CONTINUES = "continues"
"""Blob that names the run that this run resumes, and the node's id in it."""

SPENT = "privacy-spent"
"""Blob that holds what was spent of the node's privacy budget."""

SECRET = "place-secret"
"""File of a state directory from which `NodeStore.place_secret` derives what a server gets."""

SECRET_BYTES = 16

DURABLE = "durable"
"""Key of the node config: false says that a power cut may take what a node has written.

A thousand virtual nodes would otherwise wait for the disk some thousand times.
"""

RUNS = "runs"
"""Folder of a state directory with a folder for each run, and in it one for each node."""

LASTING = "lasting"
"""Folder of a state directory with files that are of no single run."""

_CHAIN = re.compile(rb"[0-9]{1,20}/[0-9]{1,20}")
_MAX_CHAIN = 1_000
"""Runs of which each resumes the one before."""

MAX_WRITE = 3600.0
"""Seconds after which an unfinished file was left by a writer that was killed."""

ROUNDS_TO_KEEP = 3
"""Rounds to keep a blob for. A server writes a round's checkpoint while the next one trains: if it
dies then, its last checkpoint is two rounds behind."""


@dataclass(frozen=True)
class NodeStore:
    """Named blobs in a node's state directory.

    Links are not followed, as apps write there (`storage.untrusted`). Write a blob that changes
    every round with the store of that round (`at`). It keeps the blobs of the two rounds before
    too, so a resumed run has the state of its checkpoint's round. What is not `durable` outlasts
    processes, but no power cut.
    """

    folder: Path
    round: int | None = None
    durable: bool = True

    @classmethod
    def open(
        cls, state_dir: str | Path | None, run_id: int, node_id: int, *, durable: bool = True
    ) -> "NodeStore":
        """Store of one node for one run.

        A state directory of None is FLWR_DISTILL_STATE from the environment, or a folder of this
        user in the system's temporary directory (see `temporary_root`).
        """
        root = state_dir or os.environ.get("FLWR_DISTILL_STATE") or temporary_root()
        folder = Path(root).resolve() / RUNS / str(run_id) / str(node_id)
        return cls(folder, durable=durable)

    def below(self, name: str) -> Self:
        """Store of a folder in this one's, for blobs of no round."""
        return replace(self, folder=self.folder / name, round=None)

    def at(self, server_round: int | None) -> Self:
        """The same store, for blobs of a round, or of none."""
        return replace(self, round=server_round)

    def write(self, name: str, data: bytes) -> None:
        """Write ``data`` under ``name``, atomically."""
        with untrusted.folder(self.folder, create=True) as folder:
            file = name if self.round is None else f"{name}@{self.round:06d}"
            untrusted.write(folder, file, data, durable=self.durable)
            if self.round is not None:
                for old in _rounds(folder, name)[:-ROUNDS_TO_KEEP]:
                    os.unlink(old, dir_fd=folder)

    def read(self, name: str, most: int | None = None) -> bytes | None:
        """Read the blob ``name`` of the last round; None if there is none.

        Of a larger blob only `most` bytes and one are read.
        """
        with suppress(FileNotFoundError), untrusted.folder(self.folder) as folder:
            if file := _newest(folder, name):
                return untrusted.read(folder, file, most)
        return None

    def remove(self, name: str) -> None:
        """Remove what has this name, as in `names`; what cannot be removed stays."""
        with suppress(FileNotFoundError), untrusted.folder(self.folder) as folder:
            untrusted.remove(folder, name)

    def file(self, name: str) -> Path | None:
        """File of the blob ``name`` of the last round; None if there is none."""
        with suppress(FileNotFoundError), untrusted.folder(self.folder) as folder:
            if file := _newest(folder, name):
                return self.folder / file
        return None

    def names(self) -> list[str]:
        """Names of all files, sorted."""
        with suppress(FileNotFoundError), untrusted.folder(self.folder) as folder:
            return sorted(name for name in untrusted.names(folder) if name[0] != ".")
        return []

    def take_over(self, run_id: str, node_id: str, server_round: int) -> int:
        """Copy the blobs that a node had at the end of a round of another run; return their number.

        Files of links are not copied: they are valid for one run only. Raises `ValueError` if this
        run has spent of a privacy budget, or resumes another: its files would stay, and what they
        have cost would no longer count.
        """
        other, plain = NodeStore(self.folder.parent.parent / run_id / node_id), self.at(None)
        resumed = f"{run_id}/{node_id}".encode()
        if plain.read(CONTINUES) != resumed:
            if {CONTINUES, SPENT} & set(plain.names()):
                raise ValueError(f"run {run_id} cannot be resumed: this one has started")
            chain = list(other._chain())
            if plain in chain or len(chain) > _MAX_CHAIN:
                raise ValueError(f"run {run_id} cannot be resumed: it resumes this one or too many")
            plain.write(CONTINUES, resumed)
        count = 0
        with suppress(FileNotFoundError), untrusted.folder(other.folder) as folder:
            for name in other.names():
                _, _, written = name.partition("@")
                if name == CONTINUES or int(written or 0) > server_round:
                    continue
                if untrusted.is_file(folder, name):
                    plain.write(name, untrusted.read(folder, name))
                    count += 1
        return count

    def place_secret(self, run_id: str | None = None) -> bytes:
        """Bytes by which a server that resumes a run recognises the state directory.

        `run_id` is the run that first showed them (default: this store's); each run has its own.
        """
        run = self.folder.parent.name if run_id is None else run_id
        return hmac.digest(self.secret(), f"place {run}".encode(), hashlib.sha256)[:SECRET_BYTES]

    def keyed(self, content: bytes) -> bytes:
        """Hash of a content of the node, for this run: unguessable without the secret.

        In another run it differs, so that a server cannot tell what two runs have in common.
        """
        name = f"content {self.folder.parent.name} ".encode()
        return hmac.digest(self.secret(), name + content, hashlib.sha256)[:SECRET_BYTES]

    def secret(self) -> bytes:
        """Random bytes of the state directory, created on first use; never sent.

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

        It has what concerns all of these runs, such as the privacy budget.
        """
        *_, first = self._chain()
        return first

    def _chain(self) -> Iterator["NodeStore"]:
        """Stores of this run, of the one that it resumes, and so on."""
        store = self.at(None)
        yield store
        for _ in range(_MAX_CHAIN):
            resumed = store.read(CONTINUES, most=64)
            if resumed is None or not _CHAIN.fullmatch(resumed):
                return
            store = NodeStore(self.folder.parent.parent / resumed.decode())
            yield store


def _newest(folder: int, name: str) -> str | None:
    """File of a blob of the last round."""
    files = [name, *_rounds(folder, name)]
    return next((file for file in reversed(files) if untrusted.is_file(folder, file)), None)


def _rounds(folder: int, name: str) -> list[str]:
    return sorted(file for file in untrusted.names(folder) if file.startswith(f"{name}@"))


def remove_old_runs(state_dir: Path, age: float) -> None:
    """Remove runs' files if nothing has changed in them for `age` seconds, and old lasting ones.

    Files on spent privacy budgets stay, with the links to them from resumed runs. Of all runs, what
    writers left unfinished that were killed is removed.
    """
    oldest = time.time() - age
    with suppress(OSError), untrusted.folder(state_dir / LASTING) as lasting:
        _remove_old_files(lasting, oldest)
    with suppress(OSError), untrusted.folder(state_dir / RUNS) as runs:
        for name in untrusted.names(runs):
            with suppress(OSError):
                _remove_old_nodes(runs, name, oldest)


def _remove_old_files(lasting: int, oldest: float) -> None:
    """Remove old files, also in folders, which sandboxes have; and old folders that are empty."""
    for name in untrusted.names(lasting):
        if not untrusted.is_folder(lasting, name):
            if untrusted.last_change(lasting, name) <= oldest:
                untrusted.remove(lasting, name)
            continue
        changed = untrusted.size_and_change(lasting, name)[1]
        with suppress(OSError), untrusted.subfolder(lasting, name) as files:
            for file in untrusted.names(files):
                if untrusted.last_change(files, file) <= oldest:
                    untrusted.remove(files, file)
        _remove_empty(lasting, name, changed, oldest)


def _remove_partial(nodes: int, name: str) -> None:
    """Remove a node's hidden files that nobody has written to for `MAX_WRITE` seconds."""
    oldest = time.time() - MAX_WRITE
    with suppress(OSError), untrusted.subfolder(nodes, name) as files:
        for file in untrusted.names(files):
            if file.startswith(".") and untrusted.last_change(files, file) <= oldest:
                untrusted.remove(files, file)


def _remove_empty(parent: int, name: str, changed: float, oldest: float) -> None:
    """Remove an empty folder, but not one just created for a sandbox."""
    if changed <= oldest:
        with suppress(OSError):
            os.rmdir(name, dir_fd=parent)


def _remove_old_nodes(runs: int, run: str, oldest: float) -> None:
    """Remove old folders in a run's, and the run's if it is old and empty then."""
    if not untrusted.is_folder(runs, run):  # not created by a store
        if untrusted.last_change(runs, run) <= oldest:
            untrusted.remove(runs, run)
        return
    changed = untrusted.size_and_change(runs, run)[1]
    with untrusted.subfolder(runs, run) as nodes:
        for name in untrusted.names(nodes):
            if untrusted.last_change(nodes, name) > oldest:
                _remove_partial(nodes, name)
                continue
            with suppress(OSError), untrusted.subfolder(nodes, name) as files:
                untrusted.clear(files, keep=(SPENT, CONTINUES))
            with suppress(OSError):  # it is no folder, or not empty
                os.rmdir(name, dir_fd=nodes)
            with suppress(OSError):
                os.unlink(name, dir_fd=nodes)
    _remove_empty(runs, run, changed, oldest)


def temporary_root() -> Path:
    """Folder of this user in the system's temporary directory, where anyone may make it first.

    Raises `SettingsError` if it is a link or another user's, or if other users could write there.
    """
    folder = Path(tempfile.gettempdir()) / f"flwr-distill-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status, problem = folder.lstat(), ""
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        problem = "not a folder of this user: someone else may have created it"
    elif status.st_mode & 0o022:
        problem = "other users can write there"
    if problem:
        raise SettingsError(
            problem,
            where="state-dir",
            value=str(folder),
            remedy="remove it, or set state-dir or FLWR_DISTILL_STATE",
        )
    folder.chmod(0o700)  # nobody else reads there, however it was made
    return folder
