"""The runs below an edge: one for each run above, started when that first asks for it."""

from __future__ import annotations

import json
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.common import log

from flwr_distill.protocol.edge import DOOR, END, GREET, OPEN, SHARE, Opened, Opening, task_of
from flwr_distill.protocol.edge_calls import EdgeError, NobodyThereError, call, listen
from flwr_distill.protocol.meeting import Continuation
from flwr_distill.protocol.registry import find_method
from flwr_distill.server.record.checkpoint import checkpoints
from flwr_distill.server.settings import RunSettings
from flwr_distill.task.durable import replacing
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import (
    RunConfigValue,
)

if TYPE_CHECKING:
    import grpc

    from flwr_distill.flower.line_1_32.fleet.superlink import Control

FIXED = ("edge", "resume", "runs-dir", "num-rounds", "phase-timeout", "patience-failed")
"""Settings of a run below that follow from the run above."""
MOST_RUNS = 4
"""Runs that are there at a time; each is a process. One more ends the one that was asked last."""
MOST_KNOWN = 1000
"""Runs above of which an edge remembers its own."""
ENDS_WITHIN = 60.0
_THREADS = 8
_LOOK = 0.2
_GREETING = 2.0


@dataclass(frozen=True)
class RunBelow:
    """A run below: its socket, its folder if it continues there, and when it was last wanted."""

    run_id: int
    socket: Path
    folder: Path
    resumed: bool
    wanted: float


class EdgeRuns:
    """Starts, resumes and ends the runs below an edge.

    Parameters
    ----------
    sockets : Path
        Folder for the sockets, which only this user and the node's app may enter.
    state_dir : Path
        Folder that outlasts the edge: which run below belongs to which above, and the runs' folders
        in ``runs``.
    own : Mapping[str, bool | int | float | str]
        Settings of the runs below that are the edge's own.
    control : Callable[[], Control]
        Opens the Control API of the edge's SuperLink.
    bundle : bytes
        The app bundle.
    """

    def __init__(
        self,
        sockets: Path,
        state_dir: Path,
        own: Mapping[str, RunConfigValue],
        control: Callable[[], Control],
        bundle: bytes,
    ) -> None:
        self._sockets = sockets
        self._own = own
        self._control = control
        self._bundle = bundle
        self._runs_dir = state_dir / "runs"
        self._file = state_dir / "runs-above.json"
        self._known: dict[str, str] = _read(self._file)
        self._below: dict[str, RunBelow] = {}
        self._lock = threading.Lock()

    def listen(self) -> grpc.Server:
        """Answer the edge's node."""
        return listen(self._sockets / DOOR, {OPEN: self.open}, threads=_THREADS)

    def open(self, request: bytes, seconds: float) -> bytes:
        """Have a run below be there, within so many seconds."""
        end = time.monotonic() + seconds
        opening = Opening.checked(json.loads(request), "the edge's node")
        if not self._lock.acquire(timeout=seconds):
            raise EdgeError(f"the edge did not start a run below within {seconds:.0f} s")
        try:
            if opening.earlier is not None:
                self._turn_back(opening.run, opening.earlier)
            below = self._below.get(opening.run)
            if below is None or not _is_there(below):
                below = self._start(opening, end)
            self._below[opening.run] = replace(below, wanted=time.monotonic())
        finally:
            self._lock.release()
        opened = Opened(socket=str(below.socket), resumed=below.resumed)
        return opened.model_dump_json(by_alias=True).encode()

    def end(self) -> None:
        """Have all runs write their results, and wait for that."""
        with self._lock:
            for run in list(self._below):
                self._end(run)

    def _turn_back(self, run: str, earlier: Continuation) -> None:
        """Have a run continue where the run below was after a round of an earlier run above."""
        folder = self._folder(earlier.run_id)
        if folder is None:
            log(WARNING, "Run %s continues from %s, which is new here", run, earlier.run_id)
            return
        if self._folder(run) == folder:
            return
        own = self._folder(run)
        self._end(run)
        for other in [name for name, below in self._below.items() if below.folder == folder]:
            self._end(other)  # it waits for messages that will not come
        if own is not None and max(checkpoints(own), default=0) == 0:  # nothing was learnt there
            shutil.rmtree(own, ignore_errors=True)
        for later in [file for n, file in checkpoints(folder).items() if n > earlier.round]:
            later.unlink()
        self._remember(run, folder.name)

    def _start(self, opening: Opening, end: float) -> RunBelow:
        """Start a run below, and wait until it is there."""
        present = {run: below for run, below in self._below.items() if _is_there(below)}
        while len(present) >= MOST_RUNS:
            longest = min(present, key=lambda run: present[run].wanted)
            log(WARNING, "More than %d runs: the one for %s ends", MOST_RUNS, longest)
            self._end(longest)
            del present[longest]
        folder = self._folder(opening.run)
        resumed = folder is not None and bool(checkpoints(folder))
        socket = self._sockets / secrets.token_hex(8)
        config = below_config(opening.run_config, self._own) | {
            "edge": str(socket),
            "runs-dir": str(self._runs_dir),
            "resume": folder.name if folder is not None and resumed else "",
        }
        from flwr_distill.flower.line_1_32.fleet.superlink import (
            SuperLinkError,  # here: imports Flower's Control API
        )

        try:
            RunSettings.from_run_config(config)
            with self._control() as control:
                run_id = control.start_run(self._bundle, config)
                if folder is None or not resumed:
                    folder = self._runs_dir / str(run_id)
                    self._remember(opening.run, folder.name)
                log(INFO, "Run %d below serves run %s above", run_id, opening.run)
                below = RunBelow(run_id, socket, folder, resumed, time.monotonic())
                self._below[opening.run] = below
                _wait_for(below, control, end)
        except (SettingsError, SuperLinkError) as error:
            raise EdgeError(f"the edge cannot start a run below: {error}") from error
        return below

    def _end(self, run: str) -> None:
        """Have a run below write its results; wait for that."""
        below = self._below.pop(run, None)
        if below is None:
            return
        try:
            call(below.socket, END, b"", _GREETING)
        except EdgeError:
            return  # it has ended
        end = time.monotonic() + ENDS_WITHIN
        while _is_there(below):
            if time.monotonic() > end:
                log(WARNING, "Run %d below does not end in %.0f s", below.run_id, ENDS_WITHIN)
                return
            time.sleep(_LOOK)

    def _folder(self, run: str) -> Path | None:
        """Folder of the run below of a run above; None if there was none."""
        name = self._known.get(run)
        return None if name is None else self._runs_dir / name

    def _remember(self, run: str, name: str) -> None:
        self._known[run] = name
        while len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._file) as partial:
            partial.write_text(json.dumps(self._known), encoding="utf-8")


def below_config(
    above: Mapping[str, RunConfigValue], own: Mapping[str, RunConfigValue]
) -> dict[str, RunConfigValue]:
    """Settings of a run below: the task and the rounds from above, all else the edge's own.

    A phase below may take three quarters of one above. Nodes below evaluate if nodes above do.
    """
    method = find_method(str(own.get("strategy", "")))
    rounds, timeout = int(above["num-rounds"]), float(above["phase-timeout"])
    return {
        **task_of(above),
        "fraction-evaluate": 1.0 if float(above["fraction-evaluate"]) > 0 else 0.0,
        **(method.defaults.get("edge", {}) if method else {}),
        **own,
        "num-rounds": rounds,
        "phase-timeout": SHARE * timeout,
        "patience-failed": rounds + 1,  # the run above has patience of its own
    }


def _wait_for(below: RunBelow, control: Control, end: float) -> None:
    """Wait until a run listens.

    Raises
    ------
    EdgeError
        If it ends, or does not listen in time.
    """
    while not _is_there(below):
        status = control.run_status(below.run_id)
        if status.finished:
            raise EdgeError(
                f"the run below has ended ({status.status}): {status.details or 'its log says why'}"
            )
        if time.monotonic() > end:
            raise EdgeError("the run below did not start in time")
        time.sleep(_LOOK)


def _is_there(below: RunBelow) -> bool:
    try:
        call(below.socket, GREET, b"", _GREETING)
    except NobodyThereError:
        return False
    except EdgeError:
        return True  # it is busy
    return True


def _read(file: Path) -> dict[str, str]:
    try:
        known: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = {}
    return known
