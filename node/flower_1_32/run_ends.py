"""Learns which runs have ended, ends their tasks, and removes what others sent for them.

Flower tells nodes nothing of the end of a run. It only refuses to describe a run that has ended, so
the SuperNode asks now and then about the run that its app works for, and about those that have
files of links here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from logging import DEBUG, INFO
from pathlib import Path
from typing import Any

from flwr.app import Error, Message
from flwr.common import log
from flwr.common.constant import ErrorCode, SubStatus
from flwr.supercore.run import RunNotRunningException

from flwr_distill.links.folder import remove_links, runs_with_links
from flwr_distill.node.flower.timing import can_override
from flwr_distill.node.kernel import trim_heap

EVERY = 60.0
"""Seconds between questions to the SuperLink, about: a thousand nodes are not to ask at once."""
EVERY_AT_WORK = 15.0
"""Seconds between questions while the app works for a run, about."""
MAX_QUESTIONS = 50
"""Questions at a time: a hostile app can make folders for any number of runs."""


def patch_run_ends(state_dir: Path, *, every: float = EVERY) -> bool:
    """Have the SuperNode's loop remove the links' files of runs that have ended."""
    from flwr.supernode import start_client_internal

    present = hasattr(start_client_internal, "_pull_and_store_message")
    if not can_override("the SuperNode's intake", present):
        return False
    pull_and_store: Callable[..., int | None] = start_client_internal._pull_and_store_message
    due = time.monotonic() + every * random.uniform(0.5, 1.0)

    def pull_and_store_message(*, get_run: Callable[[int], Any], **others: Any) -> int | None:
        nonlocal due
        if time.monotonic() > due:
            remove_links_of_ended_runs(state_dir, get_run)
            trim_heap()  # of a run's bundles and messages
            due = time.monotonic() + every * random.uniform(0.8, 1.2)
        return pull_and_store(get_run=get_run, **others)

    setattr(start_client_internal, "_pull_and_store_message", pull_and_store_message)  # noqa: B010
    return True


def patch_stopped_runs(*, every: float = EVERY_AT_WORK) -> bool:
    """Have the SuperNode end the app's work for a run that has ended, as when a user stops it.

    Flower's waits for the app, for hours if need be, and throws the reply away. Here the message is
    answered with an error, and its task ends: `node.flower.executor` then ends the app.
    """
    from flwr.supernode import start_client_internal as loop

    present = hasattr(loop, "_pull_and_store_message") and hasattr(loop, "_push_messages")
    if not can_override("the SuperNode's wait for its app", present):
        return False
    pull_and_store: Callable[..., int | None] = loop._pull_and_store_message
    push: Callable[..., None] = loop._push_messages
    work: _Work | None = None

    def pull_and_store_message(
        *, state: Any, get_run: Callable[[int], Any], **others: Any
    ) -> int | None:
        nonlocal work
        work = _Work(state, get_run, every)
        return pull_and_store(state=work, get_run=get_run, **others)

    def push_messages(*, state: Any, object_store: Any, **others: Any) -> None:
        assert work is not None
        work.object_store = object_store
        push(state=work, object_store=object_store, **others)

    setattr(loop, "_pull_and_store_message", pull_and_store_message)  # noqa: B010
    setattr(loop, "_push_messages", push_messages)  # noqa: B010
    return True


class _Work:
    """A SuperNode's state that gives an error as the reply once the message's run has ended."""

    object_store: Any

    def __init__(self, state: Any, get_run: Callable[[int], Any], every: float) -> None:
        self._state = state
        self._get_run = get_run
        self._every = every
        self._due = 0.0
        self._message: Message | None = None

    def store_message(self, message: Message) -> Any:
        self._message = message
        self._due = time.monotonic() + self._every * random.uniform(0.8, 1.2)
        return self._state.store_message(message)

    def get_messages(self, *, is_reply: bool | None = None, **filters: Any) -> Any:
        replies = self._state.get_messages(is_reply=is_reply, **filters)
        if replies or not is_reply or self._message is None or time.monotonic() < self._due:
            return replies
        self._due = time.monotonic() + self._every * random.uniform(0.8, 1.2)
        if not has_ended(self._message.metadata.run_id, self._get_run):
            return replies
        self._end(self._message)
        return self._state.get_messages(is_reply=is_reply, **filters)

    def _end(self, message: Message) -> None:
        from flwr.supernode.start_client_internal import _insert_message

        run_id, name = message.metadata.run_id, message.metadata.message_id
        log(INFO, "Run %s has ended: the app's work for it ends", run_id)
        for task in self._state.get_tasks(run_ids=[run_id]):
            self._state.finish_task(task.task_id, SubStatus.STOPPED, "the run has ended")
        self.object_store.delete(name)  # which the app may not have fetched
        self._state.record_message_processing_start(name)
        self._state.record_message_processing_end(name)
        reply = Message(Error(ErrorCode.CLIENT_APP_CRASHED, "the run has ended"), reply_to=message)
        _insert_message(reply, self._state, self.object_store)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def has_ended(run_id: int, get_run: Callable[[int], Any]) -> bool:
    """Whether the SuperLink says that a run has ended; see `remove_links_of_ended_runs`."""
    try:
        get_run(run_id)
    except RunNotRunningException:
        return True
    except Exception as error:  # the SuperLink cannot say: it may later
        log(DEBUG, "Run %s: %s", run_id, error)
    return False


def remove_links_of_ended_runs(state_dir: Path, get_run: Callable[[int], Any]) -> None:
    """Remove keys, spent tokens and uncollected parcels of runs that have ended.

    Parameters
    ----------
    state_dir : Path
        The node's state directory.
    get_run : Callable[[int], Run]
        The SuperLink's description of a run; RunNotRunningException if it has ended.
    """
    for run_id in runs_with_links(state_dir, MAX_QUESTIONS):
        if has_ended(run_id, get_run):
            log(INFO, "Run %s has ended: its links are removed", run_id)
            remove_links(state_dir, run_id)
