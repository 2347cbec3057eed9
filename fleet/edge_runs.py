"""The runs below an edge: one for each run above, started at its first request."""

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

from flwr_distill.base.files import replacing
from flwr_distill.flower.control import Control, SuperLinkError, UnknownRunError
from flwr_distill.protocol.edge import DOOR, END, GREET, OPEN, SHARE, Opened, Opening, task_of
from flwr_distill.protocol.edge_calls import EdgeError, NobodyThereError, call, listen
from flwr_distill.protocol.meeting import Continuation
from flwr_distill.protocol.registry import find_method
from flwr_distill.server.record.checkpoint import checkpoints
from flwr_distill.server.settings import RunSettings
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import RunConfigValue

if TYPE_CHECKING:
    import grpc

FIXED = ("edge", "resume", "runs-dir", "num-rounds", "phase-timeout", "patience-failed")
"""Settings of a run below that follow from the run above."""
MAX_RUNS = 4
"""Runs at a time, each a process. One more ends the one that was unused for longest."""
MAX_KNOWN = 1000
"""Runs above whose runs below an edge records."""
END_TIMEOUT = 60.0
_THREADS = 8
_CHECK_EVERY = 0.2
_GREETING_TIMEOUT = 2.0


@dataclass(frozen=True)
class RunBelow:
    """A run below: its socket, its folder, and when it was last requested.

    `has_listened` is false until it has answered at its socket.
    """

    run_id: int
    socket: Path
    folder: Path
    resumed: bool
    requested: float
    has_listened: bool = False


class EdgeRuns:
    """Starts, resumes and ends the runs below an edge.

    Only this user and the node's app may enter the folder of `sockets`. `state_dir` lasts: it has
    the runs' folders in ``runs``, and which of them belongs to which run above. `own` are the
    edge's settings of runs below. `control` opens the Control API of the edge's SuperLink.
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
        known = self._file.read_text(encoding="utf-8") if self._file.exists() else "{}"
        self._known: dict[str, str] = json.loads(known)
        self._below: dict[str, RunBelow] = {}
        self._lock = threading.Lock()

    def listen(self) -> grpc.Server:
        """Answer the edge's node."""
        return listen(self._sockets / DOOR, {OPEN: self.open}, threads=_THREADS)

    def open(self, request: bytes, seconds: float) -> bytes:
        """Start the run below, unless it runs, within so many seconds."""
        end = time.monotonic() + seconds
        opening = Opening.checked(json.loads(request), "the edge's node")
        if not self._lock.acquire(timeout=seconds):
            raise EdgeError(f"the edge did not start a run below within {seconds:.0f} s")
        try:
            if opening.earlier is not None:
                self._return_to(opening.run, opening.earlier)
            below = self._below.get(opening.run)
            if below is None or not _listens(below):
                below = self._start(opening, end)
            now = time.monotonic()
            self._below[opening.run] = replace(below, requested=now, has_listened=True)
        finally:
            self._lock.release()
        opened = Opened(socket=str(below.socket), resumed=below.resumed)
        return opened.model_dump_json(by_alias=True).encode()

    def end(self) -> None:
        """Have all runs write their results, and wait for their end."""
        with self._lock:
            for run in list(self._below):
                self._end(run)

    def _return_to(self, run: str, earlier: Continuation) -> None:
        """Continue a run where the run below was after a round of an earlier run above."""
        folder = self._folder(earlier.run_id)
        if folder is None:
            log(WARNING, "Run %s continues from %s, which is unknown here", run, earlier.run_id)
            return
        if self._folder(run) == folder:
            return
        own = self._folder(run)
        self._end(run)
        for other in [name for name, below in self._below.items() if below.folder == folder]:
            self._end(other)  # it waits for messages that will not arrive
        if own is not None and max(checkpoints(own), default=0) == 0:  # it has learnt nothing
            shutil.rmtree(own, ignore_errors=True)
        for later in [file for n, file in checkpoints(folder).items() if n > earlier.round]:
            later.unlink()
        self._record(run, folder.name)

    def _start(self, opening: Opening, end: float) -> RunBelow:
        """Wait until a run below listens; start it, unless an earlier message has."""
        present = {run: below for run, below in self._below.items() if _listens(below)}
        while len(present) >= MAX_RUNS:
            longest = min(present, key=lambda run: present[run].requested)
            log(WARNING, "More than %d runs: the one for %s ends", MAX_RUNS, longest)
            self._end(longest)
            del present[longest]
        try:
            with self._control() as control:
                below = self._below.get(opening.run)
                if below is None or below.has_listened or _is_over(below, control):
                    below = self._submit(opening, control)
                _wait_for(below, control, end)
        except (SettingsError, SuperLinkError) as error:
            raise EdgeError(f"the edge cannot start a run below: {error}") from error
        return below

    def _submit(self, opening: Opening, control: Control) -> RunBelow:
        folder = self._folder(opening.run)
        resumed = folder is not None and bool(checkpoints(folder))
        socket = self._sockets / secrets.token_hex(8)
        config = below_config(opening.run_config, self._own) | {
            "edge": str(socket),
            "runs-dir": str(self._runs_dir),
            "resume": folder.name if folder is not None and resumed else "",
        }
        RunSettings.from_run_config(config)
        run_id = control.start_run(self._bundle, config)
        if folder is None or not resumed:
            folder = self._runs_dir / str(run_id)
            self._record(opening.run, folder.name)
        log(INFO, "Run %d below serves run %s above", run_id, opening.run)
        below = RunBelow(run_id, socket, folder, resumed, time.monotonic())
        self._below[opening.run] = below
        return below

    def _end(self, run: str) -> None:
        """Have a run below write its results; wait for its end."""
        below = self._below.pop(run, None)
        if below is None:
            return
        try:
            call(below.socket, END, b"", _GREETING_TIMEOUT)
        except EdgeError:
            return  # it has ended
        end = time.monotonic() + END_TIMEOUT
        while _listens(below):
            if time.monotonic() > end:
                log(WARNING, "Run %d below does not end in %.0f s", below.run_id, END_TIMEOUT)
                return
            time.sleep(_CHECK_EVERY)

    def _folder(self, run: str) -> Path | None:
        """Folder of the run below of a run above; None without one."""
        name = self._known.get(run)
        return None if name is None else self._runs_dir / name

    def _record(self, run: str, name: str) -> None:
        self._known[run] = name
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._file) as partial:
            partial.write_text(json.dumps(self._known), encoding="utf-8")


def below_config(
    above: Mapping[str, RunConfigValue], own: Mapping[str, RunConfigValue]
) -> dict[str, RunConfigValue]:
    """Settings of a run below: the task and the rounds from above, everything else the edge's own.

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
    """Wait until a run listens; EdgeError if it ends, or does not listen in time."""
    while not _listens(below):
        status = control.run_status(below.run_id)
        if status.finished:
            raise EdgeError(
                f"the run below has ended ({status.status}): {status.details or 'its log says why'}"
            )
        if time.monotonic() > end:
            raise EdgeError("the run below did not start in time")
        time.sleep(_CHECK_EVERY)


def _is_over(below: RunBelow, control: Control) -> bool:
    try:
        return control.run_status(below.run_id).finished
    except UnknownRunError:
        return True


def _listens(below: RunBelow) -> bool:
    try:
        call(below.socket, GREET, b"", _GREETING_TIMEOUT)
    except NobodyThereError:
        return False
    except EdgeError:
        return True  # it is busy
    return True
