"""Starts and ends the runs of a queue, through the Control API of a SuperLink."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from flwr_distill.fleet.queue.entry import TOKEN, Entry, State
from flwr_distill.fleet.queue.file import QueueFile
from flwr_distill.flower.control import (
    Control,
    OutageError,
    RunStatus,
    SuperLinkError,
    UnknownRunError,
)

SETTLE = 10.0
"""Seconds after an attempt without an answer in which the SuperLink may still start the run."""
MAX_ATTEMPTS = 5
"""Attempts without an answer, each with a SuperLink that answered just before."""
STOP_GRACE = 60.0
"""Seconds for the SuperLink to stop a run; then the queue continues without it."""
PAUSE = (0.5, 1.5)
"""Seconds between polls of a SuperLink, and of one that does not answer."""
AWAY = (1.0, 3.0)
_ENDS = {
    "finished:completed": State.COMPLETED,
    "finished:failed": State.FAILED,
    "finished:stopped": State.STOPPED,
}


class Scheduler:
    """Starts the runs of a queue in their order, so many at once, and ends those out of time.

    A SuperLink cannot be asked for a run twice under one name. So each run carries a token in its
    settings (`TOKEN`), and each attempt is noted before it is made. Where no answer came, as after
    a crash of either side, the SuperLink's runs are searched for the token, and only if it is not
    there after `SETTLE` seconds is the run submitted again.

    Parameters
    ----------
    queue : QueueFile
        The queue; nobody else changes the states of its runs.
    control : Callable[[], Control]
        Opens the Control API, as soon as the SuperLink answers. SuperLinkError if it does not.
    at_once : int (default: 1)
        Runs that may run at a time.
    clock : Callable[[], float] (default: time.time)
        Seconds since 1970.
    """

    def __init__(
        self,
        queue: QueueFile,
        control: Callable[[], Control],
        at_once: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._queue = queue
        self._control = control
        self._at_once = at_once
        self._clock = clock
        self._news = threading.Event()

    def wake(self) -> None:
        """Have the next step made at once: the queue has changed."""
        self._news.set()

    def serve(self, ended: threading.Event) -> None:
        """Make steps until `ended`; outages of the SuperLink are noted and waited for."""
        while not ended.is_set():
            try:
                with self._control() as link:
                    self._queue.note_problem("")
                    while not ended.is_set():
                        self.step(link)
                        self._news.wait(random.uniform(*PAUSE))
                        self._news.clear()
            except (SuperLinkError, sqlite3.Error) as error:
                with suppress(sqlite3.Error):  # a full disk, which may have room again
                    self._queue.note_problem(str(error))
                ended.wait(random.uniform(*AWAY))

    def step(self, link: Control) -> None:
        """Look after the runs that have started, and start those whose turn it is.

        Raises SuperLinkError if the SuperLink does not answer; the next step may use another link.
        """
        self._queue.note_time()
        for entry in self._queue.active():
            if entry.state is State.STARTING:
                self._find(link, entry)
            else:
                self._watch(link, entry)
        while len(self._queue.active()) < self._at_once:
            if (ready := self._queue.next_ready()) is None:
                break
            self._submit(link, ready)

    def _submit(self, link: Control, ready: Entry) -> None:
        if (entry := self._queue.note_attempt(ready.id)) is None:
            return
        config = {**entry.run_config, TOKEN: entry.token}
        try:
            run_id = link.start_run(self._queue.bundle(entry), config)
        except OutageError:
            self._queue.note_tried(entry.id)
            raise
        except (SuperLinkError, ValueError, TypeError) as error:  # what Flower cannot encode, too
            self._queue.end(entry.id, State.FAILED, str(error))
            return
        self._queue.note_running(entry.id, run_id)

    def _find(self, link: Control, entry: Entry) -> None:
        """Find the run of an attempt without an answer; try again once it can no longer appear."""
        if runs := link.runs_with(TOKEN, entry.token):
            for surplus in runs[1:]:
                self._stop(link, surplus)
            self._queue.note_running(entry.id, runs[0])
        elif self._clock() - entry.tried < SETTLE:
            return
        elif entry.stopping is not None:
            self._queue.end(entry.id, entry.stopping, entry.reason)
        elif entry.attempts >= MAX_ATTEMPTS:
            reason = f"the SuperLink did not answer to {entry.attempts} attempts to start it"
            self._queue.end(entry.id, State.FAILED, reason)
        else:
            self._submit(link, entry)

    def _watch(self, link: Control, entry: Entry) -> None:
        try:
            status = link.run_status(entry.run_id)
        except UnknownRunError as error:
            self._queue.end(entry.id, entry.stopping or State.FAILED, str(error))
            return
        now = self._clock()
        if status.finished:
            self._queue.end(entry.id, *_end_of(status, entry))
        elif entry.stopping is None:
            if now - entry.started > entry.timeout:
                reason = (
                    f"took over {entry.timeout:g} s, its timeout (raise --timeout, or see why: "
                )
                reason += f"flwr-distill logs {entry.run_id})"
                self._queue.note_stopping(entry.id, State.STOPPED, reason)
                self._stop_run_of(link, entry)
        elif entry.stopping_since and now - entry.stopping_since > STOP_GRACE:
            reason = f"{entry.reason} the SuperLink did not stop run {entry.run_id}".strip()
            self._queue.end(entry.id, entry.stopping, reason)
        else:
            self._stop_run_of(link, entry)

    def _stop_run_of(self, link: Control, entry: Entry) -> None:
        """Ask the SuperLink to stop a run, and note when it first answered."""
        self._stop(link, entry.run_id)
        self._queue.note_asked_to_stop(entry.id)

    def _stop(self, link: Control, run_id: int) -> None:
        try:
            link.stop_run(run_id)
        except OutageError:
            raise
        except SuperLinkError:  # it has just ended
            return


def _end_of(status: RunStatus, entry: Entry) -> tuple[State, str]:
    """State and reason of a run that the SuperLink has ended."""
    state = _ENDS.get(status.status, State.FAILED)
    if state is State.STOPPED and entry.stopping is not None:
        return entry.stopping, entry.reason
    return state, "" if state is State.COMPLETED else status.details
