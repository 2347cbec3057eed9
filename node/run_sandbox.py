"""The sandbox of each run (`node.sandbox`): of the state directory it has the run's files alone.

Each run has a process, since nothing can be mounted later.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from flwr_distill.node.bundle import folder_of_bundles
from flwr_distill.node.log_lines import OutputQuota
from flwr_distill.node.run_records import RunRecords
from flwr_distill.node.settings import FLOWER_HOME
from flwr_distill.storage import untrusted
from flwr_distill.storage.store import LASTING, RUNS

MEASURED_EVERY = 5.0
"""Seconds between measurements of the disk, at least."""
SHARE = 0.25
"""Of the disk's free space, what the app of a run may keep where the policy has no number."""
RESERVE = 1 << 28
"""Bytes that stay free: what an app has deleted and keeps open is in no folder."""

MAX_QUOTAS = 1000
"""Runs of which it is cached how much their apps have printed."""

_BUNDLE = re.compile("[0-9a-f]{64}")


class Mount(NamedTuple):
    """A folder that a sandbox may write: where it is outside, and inside."""

    source: Path
    target: Path


@dataclass(frozen=True)
class RunSandbox:
    """A sandbox for the app of a run; equal to another if their apps see the same.

    `node.child.Sandbox` says what it is used for.
    """

    mounts: tuple[Mount, ...]
    command: Sequence[str] = field(compare=False)
    title: str = field(compare=False)
    quota: OutputQuota = field(compare=False)
    disk: Disk = field(compare=False)

    def excess(self) -> str:
        """Why its app keeps too much on disk; empty if it does not, or was measured lately."""
        return self.disk.excess()


class RunSandboxes:
    """Makes the sandboxes of a node's runs.

    `command`, from `node.sandbox.sandbox_command`, is common to all. `most_disk` are the bytes that
    the app of a run may keep; None for `SHARE`.
    """

    def __init__(self, command: Sequence[str], state_dir: Path, most_disk: int | None) -> None:
        self._command = command
        self._state_dir = state_dir
        self._most_disk = most_disk
        self._records = RunRecords(state_dir)
        self._quotas: dict[str, OutputQuota] = {}

    def of_no_run(self) -> RunSandbox:
        """For a process that runs no app: it shows whether the node can work."""
        return self._sandbox((), "", "worker")

    def of_run(self, run_id: int, bundle: str) -> RunSandbox:
        """Make what the app may write: of its run, the runs that it resumes, and its bundle.

        OSError if the disk is full, or a link is in the place of a folder.
        """
        if not _BUNDLE.fullmatch(bundle):
            raise OSError(f"{bundle!r:.80} is not the SHA-256 of an app bundle")
        shared = self._records.shared(run_id, bundle)
        folders = [self._state_dir / RUNS / str(each) for each in shared]
        lasting = self._state_dir / LASTING
        mounts = *(_mount(folder, folder) for folder in folders), _mount(lasting / bundle, lasting)
        return self._sandbox(mounts, bundle, f"app of run {run_id}")

    def _sandbox(self, mounts: tuple[Mount, ...], bundle: str, title: str) -> RunSandbox:
        words = list(self._command)
        for mount in mounts:
            words += ["--bind", str(mount.source), str(mount.target)]
        if bundle:
            code = str(folder_of_bundles(self._state_dir / FLOWER_HOME) / bundle)
            words += ["--ro-bind-try", code, code]
        # These are in memory. Nothing is mounted in them after this.
        words += ["--remount-ro", str(self._state_dir), "--remount-ro", "/"]
        folders = [mount.source for mount in mounts]
        disk = Disk(self._state_dir, folders, self._most_disk)
        return RunSandbox(mounts, words, title, self._quota(title), disk)

    def _quota(self, title: str) -> OutputQuota:
        """One for all processes of a run's app: each message may have another."""
        while len(self._quotas) > MAX_QUOTAS:
            del self._quotas[next(iter(self._quotas))]
        return self._quotas.setdefault(title, OutputQuota())


def _mount(source: Path, target: Path) -> Mount:
    with untrusted.folder(source, create=True) as folder:
        os.utime(folder)  # it is in use: it is not removed as an old one
    return Mount(source, target)


class Disk:
    """Measures what an app keeps in the folders that it can write, against a bound.

    `most` are the bytes in all of them; None for `SHARE` of what is free or theirs at first.
    """

    def __init__(self, state_dir: Path, folders: Sequence[Path], most: int | None) -> None:
        self._state_dir = state_dir
        self._folders = folders
        self._most = most
        self._reserve: int | None = None
        self._due = 0.0

    def excess(self) -> str:
        """Why the app keeps too much, and what helps; empty if it does not, or none is due.

        Also that someone has removed what it can write to: its process can no longer write.
        """
        if not self._folders or time.monotonic() < self._due:
            return ""
        names = " and ".join(str(path.relative_to(self._state_dir)) for path in self._folders)
        try:
            usage = self._usage()
        except FileNotFoundError:  # its sandbox still shows what was removed
            return f"a folder of its sandbox was removed: {names}"
        self._due = time.monotonic() + MEASURED_EVERY
        free = self._free()
        if self._reserve is None:
            self._reserve = min(RESERVE, free // 2)
        if self._most is None:
            self._most = int(SHARE * (free + (usage or 0)))
        if usage is None:
            text = f"more files or deeper folders than can be counted in {names}"
        elif usage > self._most:
            text = f"{usage:,} bytes in {names}, over {self._most:,}"
        elif free < self._reserve:
            text = f"{usage:,} bytes, and the disk has fewer than {self._reserve:,} left"
        else:
            return ""
        return f"most-disk: the app keeps {text} (the node's owner can remove them or allow more)"

    def _usage(self) -> int | None:
        usage = 0
        for path in self._folders:
            with untrusted.folder(path) as folder:
                use = untrusted.disk_use(folder)
            if use is None:
                return None
            usage += use
        return usage

    def _free(self) -> int:
        status = os.statvfs(self._state_dir)
        return status.f_bavail * status.f_frsize
