"""Steps of a SuperNode's loop: spacing of polls, its link's limits and progress, log ids, run ends.

Flower does not tell nodes that a run has ended. It only refuses to describe such a run, so the
SuperNode asks now and then about the run that its app works for, and about those with files of
links here.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from logging import DEBUG, INFO
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Error, Message
from flwr.common import log
from flwr.common.constant import ErrorCode, SubStatus
from flwr.supercore.inflatable.inflatable_object import (
    get_object_type_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.run import RunNotRunningException

from flwr_distill.base import json_lines
from flwr_distill.flower.overrides import Step, WrappedState, answer
from flwr_distill.links.folder import remove_links, runs_with_links
from flwr_distill.node.kernel import trim_heap
from flwr_distill.node.link import Link
from flwr_distill.node.pace import Pace
from flwr_distill.protocol.messages import POLL_EVERY

SMALL_RECORD = 256
"""Bytes of an object beyond which it is not a record about the pace."""


class Spacing(Step):
    """Lets the server space this node's polls, by a record in a message.

    Without one in a message, the node polls at its own pace.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def pull(self, inner: Callable[..., int | None], **named: Any) -> int | None:
        """Pull a message, and read how it spaces polls."""
        reading = ReadingPull(named["pull_object"])
        if (run_id := inner(**{**named, "pull_object": reading})) is not None:
            self._pace.space(reading.spacing)
        return run_id


class ReadingPull:
    """Pulls a message's objects; `spacing` is what they set as seconds between polls, else 0."""

    def __init__(self, pull_object: Callable[[int, str], bytes]) -> None:
        self._pull_object = pull_object
        self.spacing = 0.0

    def __call__(self, run_id: int, object_id: str) -> bytes:
        """Pull an object."""
        content = self._pull_object(run_id, object_id)
        if (
            len(content) <= SMALL_RECORD
            and get_object_type_from_object_content(content) == ConfigRecord.__name__
        ):
            seconds = ConfigRecord.inflate(content).get(POLL_EVERY)
            self.spacing = seconds if isinstance(seconds, float) else self.spacing
        return content


MAX_PAUSE = 20.0
"""Seconds without a poll in quiet hours, after which the clock is read again."""


PROGRESS_EVERY = 2.0
"""Seconds between lines on how much has moved; what takes less has none."""


class LimitedLink(Step):
    """Moves contents as a link allows. In its quiet hours, no message is taken up either.

    Then messages wait at the SuperLink; what it no longer has afterwards needs no work.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def pull(self, inner: Callable[..., int | None], **named: Any) -> int | None:
        """Pull a message, or wait without one."""
        if seconds := self._link.quiet():
            time.sleep(min(seconds, MAX_PAUSE))
            return None
        limited = {
            "pull_object": self._limited(named["pull_object"], lambda of, content: len(content)),
            "get_fab": self._limited(named["get_fab"], lambda of, fab: len(fab.content)),
        }
        return inner(**{**named, **limited})

    def push(self, inner: Callable[..., None], **named: Any) -> None:
        """Push the reply."""
        limited = self._limited(named["push_object"], lambda of, nothing: len(of[-1]))
        inner(**{**named, "push_object": limited})

    def _limited(
        self, call: Callable[..., Any], size: Callable[[tuple[Any, ...], Any], int]
    ) -> Callable[..., Any]:
        """A call in its time; `size` gets its arguments and its result."""

        def move(*of: Any) -> Any:
            return self._link.move(lambda: call(*of), lambda result: size(of, result))

        return move


class Progress(Step):
    """Reports how much of a message or reply has moved, where that takes seconds.

    `report` gets a line now and then, and '' once nothing moves. Pieces are counted as they arrive:
    what the SuperLink announces is their number alone.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def pull(self, inner: Callable[..., int | None], **named: Any) -> int | None:
        """Pull a message."""
        move = _Move("receives", self._report)

        def receive() -> Any:
            if received := named["receive"]():
                move.begin(len({part.object_id for part in iterate_object_tree(received[1])}))
            return received

        def pull_object(*of: Any) -> bytes:
            content: bytes = named["pull_object"](*of)
            move.add(len(content))
            return content

        try:
            return inner(**{**named, "receive": receive, "pull_object": pull_object})
        finally:
            move.end()

    def push(self, inner: Callable[..., None], **named: Any) -> None:
        """Push the reply."""
        move = _Move("sends", self._report)

        def send(*of: Any) -> Any:
            sent = named["send"](*of)
            move.begin(len(sent[0] if isinstance(sent, tuple) else sent))  # newer: and a session
            return sent

        def push_object(*of: Any) -> None:
            named["push_object"](*of)
            move.add(len(of[-1]))

        try:
            inner(**{**named, "send": send, "push_object": push_object})
        finally:
            move.end()


class _Move:
    """Pieces of one message or reply, which several threads move."""

    def __init__(self, verb: str, report: Callable[[str], None]) -> None:
        self._verb = verb
        self._report = report
        self._lock = threading.Lock()
        self._pieces = self._total = self._bytes = 0
        self._due = math.inf
        self._reported = False

    def begin(self, total: int) -> None:
        self._total = total
        self._due = time.monotonic() + PROGRESS_EVERY

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._pieces += 1
            self._bytes += num_bytes
            if time.monotonic() < self._due:
                return
            self._due = time.monotonic() + PROGRESS_EVERY
            self._reported = True
            moved = f"{self._pieces} of {self._total} pieces, {self._bytes / 1e6:.1f} MB"
            self._report(f"{self._verb} {moved}")

    def end(self) -> None:
        if self._reported:
            self._report("")


class LogIds(Step):
    """Has lines of a log as JSON name the message that the node works on."""

    def pull(self, inner: Callable[..., int | None], **named: Any) -> int | None:
        """Pull a message; lines are about it as soon as its header is there."""

        def receive() -> Any:
            if received := named["receive"]():
                metadata = received[0].metadata
                json_lines.work_on(metadata.run_id, metadata.message_id)
            return received

        run_id = inner(**{**named, "receive": receive})
        if run_id is None:
            json_lines.work_on()
        return run_id

    def push(self, inner: Callable[..., None], **named: Any) -> None:
        """Push the reply, the last of the message's work."""
        inner(**named)
        json_lines.work_on()


EVERY = 60.0
"""Seconds between questions to the SuperLink, jittered so that nodes do not ask all at once."""
EVERY_AT_WORK = 15.0
"""Seconds between questions while the app works for a run, jittered."""
MAX_QUESTIONS = 50
"""Questions at a time: a hostile app can make folders for any number of runs."""


class RunEnds(Step):
    """Removes the links' files of runs that have ended."""

    def __init__(self, state_dir: Path, *, every: float = EVERY) -> None:
        self._state_dir = state_dir
        self._every = every
        self._due = time.monotonic() + every * random.uniform(0.5, 1.0)

    def pull(self, inner: Callable[..., int | None], **named: Any) -> int | None:
        """Remove them now and then, before a message is pulled."""
        if time.monotonic() > self._due:
            remove_links_of_ended_runs(self._state_dir, named["get_run"])
            trim_heap()  # of a run's bundles and messages
            self._due = _next(self._every)
        return inner(**named)


class StoppedRuns(Step):
    """Ends the app's work for a run that has ended, as when a user stops it.

    Flower's SuperNode waits for the app, even for hours, and drops the reply. Here the message is
    answered with an error, and its task ends: `flower.executor` then ends the app.
    """

    def __init__(self, *, every: float = EVERY_AT_WORK) -> None:
        self._every = every
        self._work: _Work | None = None

    def pull(self, inner: Callable[..., int | None], **named: Any) -> int | None:
        """Pull a message; keep it, and how to ask for its run."""
        self._work = _Work(named["state"], named["get_run"], self._every)
        return inner(**{**named, "state": self._work})

    def push(self, inner: Callable[..., None], **named: Any) -> None:
        """Wait for the reply, or the end of the run."""
        assert self._work is not None
        self._work.object_store = named["object_store"]
        inner(**{**named, "state": self._work})


class _Work(WrappedState):
    """Answers with an error once the message's run has ended."""

    object_store: Any

    def __init__(self, state: Any, get_run: Callable[[int], Any], every: float) -> None:
        super().__init__(state)
        self._get_run = get_run
        self._every = every
        self._due = 0.0
        self._message: Message | None = None

    def store_message(self, message: Message) -> Any:
        self._message = message
        self._due = _next(self._every)
        return self._state.store_message(message)

    def get_messages(self, **filters: Any) -> Any:
        return self._replies(self._state.get_messages, **filters)

    def get_messages_legacy(self, **filters: Any) -> Any:  # its name from Flower 1.42 on
        return self._replies(self._state.get_messages_legacy, **filters)

    def _replies(self, find: Callable[..., Any], **filters: Any) -> Any:
        replies, message = find(**filters), self._message
        is_early = time.monotonic() < self._due
        if replies or message is None or is_early or not filters.get("is_reply"):
            return replies
        self._due = _next(self._every)
        if not _has_ended(message.metadata.run_id, self._get_run):
            return replies
        self._end(message)
        return find(**filters)

    def _end(self, message: Message) -> None:
        run_id = message.metadata.run_id
        log(INFO, "Run %s has ended: the app's work for it ends", run_id)
        for task in self._state.get_tasks(run_ids=[run_id]):
            self._state.finish_task(task.task_id, SubStatus.STOPPED, "the run has ended")
        error = Error(ErrorCode.CLIENT_APP_CRASHED, "the run has ended")
        answer(Message(error, reply_to=message), self._state, self.object_store)


def _next(every: float) -> float:
    return time.monotonic() + every * random.uniform(0.8, 1.2)


def _has_ended(run_id: int, get_run: Callable[[int], Any]) -> bool:
    try:
        get_run(run_id)
    except RunNotRunningException:
        return True
    except Exception as error:  # the SuperLink cannot say: it may later
        log(DEBUG, "Run %s: %s", run_id, error)
    return False


def remove_links_of_ended_runs(state_dir: Path, get_run: Callable[[int], Any]) -> None:
    """Remove keys, spent tokens and uncollected parcels of runs that have ended.

    `get_run` asks the SuperLink to describe a run, and raises RunNotRunningException if it has
    ended.
    """
    for run_id in runs_with_links(state_dir, MAX_QUESTIONS):
        if _has_ended(run_id, get_run):
            log(INFO, "Run %s has ended: its links are removed", run_id)
            remove_links(state_dir, run_id)
