"""Watches a federation for the dashboard: all sources are read in one place, for all browsers."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flwr_distill.fleet.dashboard.files import is_plain
from flwr_distill.fleet.dashboard.health import Check, checks, read_certificates
from flwr_distill.fleet.dashboard.nodes import LocalNode, Node, all_nodes, read_local
from flwr_distill.fleet.dashboard.runs import Run, RunFolder, run_of
from flwr_distill.fleet.federation_record import FederationFile
from flwr_distill.fleet.queue.door import FILE as QUEUE_FILE
from flwr_distill.fleet.queue.entry import QueuedRun
from flwr_distill.fleet.queue.file import read_queue
from flwr_distill.flower.control import Control, KnownNode, KnownRun, RunStatus, SuperLinkError
from flwr_distill.server.record.run_ids import JOURNAL, LATEST, SETTINGS

LOG = logging.getLogger("flwr_distill.dashboard")
MAX_RUNS = 100
"""Latest runs that are read; older ones are in `flwr-distill runs list`."""


@dataclass(frozen=True)
class Place:
    """What the dashboard shows, and where it is found.

    Parameters
    ----------
    superlink : str
        Address of the Control API, for display.
    control : Callable[[], Control]
        Opens it.
    runs_dir : Path
        Folder of the runs' folders.
    state_dir : Path
        That of the local federation and the queue.
    certs : Path | None (default: None)
        The authority's folder.
    node_dirs : Sequence[Path] (default: ())
        State directories of more nodes of this machine.
    """

    superlink: str
    control: Callable[[], Control]
    runs_dir: Path
    state_dir: Path
    certs: Path | None = None
    node_dirs: Sequence[Path] = ()


@dataclass(frozen=True)
class Snapshot:
    """A federation at one time; `runs` from the latest to the oldest."""

    time: float
    nodes: Sequence[Node] = ()
    runs: Sequence[Run] = ()
    queue: Sequence[QueuedRun] = ()
    queue_problem: str = ""
    checks: Sequence[Check] = ()
    local: Sequence[LocalNode] = ()
    away: str = ""
    """Why the SuperLink does not answer; empty if it does."""
    away_since: float = 0.0
    """When it last answered, or the dashboard started; nodes and runs are as they were then."""

    @property
    def live(self) -> list[Run]:
        """Runs that are not over."""
        return [run for run in self.runs if run.live]

    def run(self, run_id: str) -> Run | None:
        """The run with an id, or with a folder of that name: that of a resumed run is older."""
        by_folder = (run for run in self.runs if run.folder and run.folder.name == run_id)
        by_id = (run for run in self.runs if run.run_id == run_id)
        return next(by_folder, None) or next(by_id, None)


@dataclass
class Watch:
    """Reads a place again and again; `read` must not be called twice at a time."""

    place: Place
    _folders: dict[str, RunFolder] = field(default_factory=dict)
    _answered: float = field(default_factory=time.time)
    _last: tuple[list[KnownNode], list[KnownRun]] = ([], [])

    def read(self) -> Snapshot:
        """Read everything once; what cannot be read is named in the snapshot."""
        nodes, known, away, seconds = self._from_superlink()
        runs = self._runs(known)
        local = read_local([*self._federation_nodes(), *self.place.node_dirs])
        issued = read_certificates(self.place.certs)
        queue, queue_problem = self._queue()
        names = {each.login_key: each.name for each in issued if each.is_node}
        return Snapshot(
            time=time.time(),
            nodes=all_nodes(nodes, runs, local, names),
            runs=runs,
            queue=queue,
            queue_problem=queue_problem,
            checks=checks(self.place.superlink, away, seconds, self._disk_folders(local), issued),
            local=local,
            away=away,
            away_since=self._answered if away else 0.0,
        )

    def _from_superlink(self) -> tuple[list[KnownNode], list[KnownRun], str, float]:
        """Nodes, runs, why they are not those of now, and the seconds that the answer took."""
        start = time.monotonic()
        try:
            with self.place.control() as control:
                nodes, runs = control.nodes(), control.runs()
        except SuperLinkError as error:
            nodes, runs = self._last
            cut_off = [
                replace(n, status="cut off", since=self._answered) if n.status == "online" else n
                for n in nodes
            ]
            silent = RunStatus("unfinished", "the SuperLink does not answer")
            runs = [run if run.status.finished else replace(run, status=silent) for run in runs]
            return cut_off, runs, str(error), 0.0
        self._answered, self._last = time.time(), (nodes, runs)
        return nodes, runs, "", time.monotonic() - start

    def _runs(self, known: Sequence[KnownRun]) -> list[Run]:
        """The latest runs; those that the SuperLink says are not over are always among them."""
        by_id = {str(run.run_id): run for run in known}
        wanted = {run_id for run_id, run in by_id.items() if not run.status.finished}
        wanted |= set(list(by_id)[-MAX_RUNS:]) | set(_latest(self.place.runs_dir))
        for gone in self._folders.keys() - wanted:
            del self._folders[gone]
        for run_id in wanted - self._folders.keys():
            path = self.place.runs_dir / run_id
            if path.is_dir() and not path.is_symlink():
                self._folders[run_id] = RunFolder(path)
        owner, resumed = dict[str, RunFolder](), dict[str, str]()
        for name, folder in self._folders.items():
            try:
                folder.update()
            except Exception:  # whatever its files contain: the other runs are shown all the same
                LOG.exception("The files of run %s cannot be read", name)
            run_id = folder.run_id if self._speaks(folder, by_id) else name
            owner[run_id] = folder
            if run_id != name:
                resumed[name] = run_id
        shown = (owner.keys() | by_id.keys() & wanted) - resumed.keys()
        runs = [run_of(owner.get(run_id), by_id.get(run_id)) for run_id in shown]
        runs += [
            replace(run_of(None, by_id.get(name)), run_id=name, title=f"resumed as run {later[:6]}")
            for name, later in resumed.items()
        ]
        # What the SuperLink knows comes first: a run can write folders in the name of others.
        runs.sort(key=lambda run: (not run.live, run.run_id not in by_id, -run.started))
        return sorted(runs[:MAX_RUNS], key=lambda run: (not run.live, -run.started))

    def _speaks(self, folder: RunFolder, known: Mapping[str, KnownRun]) -> bool:
        """Whether a folder is that of the run that it names: its own, or one that resumes it."""
        if folder.run_id == folder.path.name:
            return True
        run = known.get(folder.run_id)
        if run is None or folder.run_id in self._folders:
            return False
        return run.resumes is None or (
            run.resumes == LATEST
            or (bool(run.resumes) and folder.path.name.startswith(run.resumes))
        )

    def _queue(self) -> tuple[list[QueuedRun], str]:
        file = self.place.state_dir / QUEUE_FILE
        try:
            return read_queue(file), ""
        except (sqlite3.Error, OSError) as error:
            return [], f"{file} cannot be read: {error}"

    def _federation_nodes(self) -> list[Path]:
        record = FederationFile(self.place.state_dir).read()
        return [Path(folder) for folder in record.node_dirs] if record else []

    def _disk_folders(self, local: Iterable[LocalNode]) -> list[Path]:
        folders = [self.place.runs_dir, self.place.state_dir, *(node.folder for node in local)]
        return [folder for folder in folders if os.path.isdir(folder)]


def _latest(runs_dir: Path) -> list[str]:
    """Names of the folders that changed last."""
    try:
        with os.scandir(runs_dir) as entries:
            folders = [
                (entry.stat(follow_symlinks=False).st_mtime, entry.name)
                for entry in entries
                if is_plain(entry.name)
                and entry.is_dir(follow_symlinks=False)
                and any(os.path.lexists(Path(entry, name)) for name in (SETTINGS, JOURNAL))
            ]
    except OSError:
        return []
    return [name for _, name in sorted(folders)[-MAX_RUNS:]]
