"""The timing of Flower that we override, and one repair of it, all of it here.

Flower 1.32.1 fixes its waits in code: an idle SuperNode looks for messages every 3 s, looks for a
ClientApp's reply every 0.5 s, and a pull of an object that is not there yet waits 1 s before the
next try. And it offers a message as a task before the message is all there. All overrides check
that Flower is the version they were written for and that what they replace is still there; if not,
they warn and leave Flower as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from logging import WARNING
from types import ModuleType
from typing import Any, TypeVar

from flwr.common.logger import log
from flwr.supercore.run import RunNotRunningException

from node.pace import Pace

T = TypeVar("T")

FLOWER_VERSION = "1.32.1"
"""The version of Flower that these overrides were written and tested for."""

IDLE_SLEEP = 3
REPLY_SLEEP = 0.5
"""Flower's own sleeps in the SuperNode's loop, in seconds; the numbers tell them apart."""


def patch_pull_backoff(*, initial: float = 0.02, cap: float = 0.25) -> bool:
    """Ask again soon for an object that is announced but still on its way.

    Flower's limit on the number of tries falls with the waits, so that only a limit on the time
    remains: a slow link is not cut off.

    Parameters
    ----------
    initial : float (default: 0.02)
        Seconds before the second try; Flower: 1.
    cap : float (default: 0.25)
        Seconds that the wait grows to by doubling; Flower: 10.

    Returns
    -------
    bool
        Whether it was done.
    """
    from flwr.supercore.inflatable import inflatable_utils

    changes = {
        "initial_backoff": initial,
        "backoff_cap": cap,
        "max_tries_per_object": None,
    }
    functions = [
        getattr(inflatable_utils, name, None)
        for name in ("pull_objects", "pull_and_inflate_object_from_tree")
    ]
    defaults = [getattr(function, "__kwdefaults__", None) or {} for function in functions]
    if not _as_expected(
        "the pull back-off", all(changes.keys() <= each.keys() for each in defaults)
    ):
        return False
    for each in defaults:
        each.update(changes)
    return True


def patch_supernode_sleep(pace: Pace, *, reply_poll: float = 0.02) -> bool:
    """Let the SuperNode look for messages at our pace, and for replies every few milliseconds.

    Parameters
    ----------
    pace : Pace
        How long to wait when the SuperLink had no message; waiting for a reply counts as work.
    reply_poll : float (default: 0.02)
        Seconds between two looks for the ClientApp's reply, in this process's memory.

    Returns
    -------
    bool
        Whether it was done.
    """
    from flwr.supernode import start_client_internal

    if not _as_expected(
        "the SuperNode's sleep", getattr(start_client_internal, "time", None) is time
    ):
        return False
    setattr(start_client_internal, "time", _PacedTime(pace, reply_poll))  # noqa: B010 (not exported)
    return True


def patch_intake() -> bool:
    """Have the SuperNode offer a message as a task once the message is all there.

    Flower offers it before its objects are pulled. If the run ends meanwhile, or the pull fails,
    they never come, and whoever claimed the task waits for them, and with it the node, whatever
    comes next. Here such a message is given up, and the next one pulled.

    Returns
    -------
    bool
        Whether it was done.
    """
    from flwr.supernode import start_client_internal

    present = hasattr(start_client_internal, "_pull_and_store_message")
    if not _as_expected("the SuperNode's intake", present):
        return False
    pull_and_store: Callable[..., int | None] = start_client_internal._pull_and_store_message

    def pull_and_store_message(
        *,
        state: Any,
        pull_object: Callable[[int, str], bytes],
        confirm_message_received: Callable[[int, str], None],
        **others: Any,
    ) -> int | None:
        deferring = _DeferringState(state)
        run_id = pull_and_store(
            state=deferring,
            pull_object=_ending(pull_object),
            confirm_message_received=_ending(confirm_message_received),
            **others,
        )
        if deferring.given_up:
            return None
        if deferring.task is not None:
            state.create_task(**deferring.task)
        return run_id

    setattr(start_client_internal, "_pull_and_store_message", pull_and_store_message)  # noqa: B010
    return True


def _ending(call: Callable[[int, str], T]) -> Callable[[int, str], T]:
    """The call, whose end of the run is an error like any other, after which Flower clears away."""

    def called(run_id: int, name: str) -> T:
        try:
            return call(run_id, name)
        except RunNotRunningException:
            raise RunEndedError("the run has ended") from None

    return called


class _DeferringState:
    """A SuperNode's state that takes note of a task in place of creating it."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.task: dict[str, Any] | None = None
        self.given_up = False

    def create_task(self, **task: Any) -> int:
        """Take note of a task."""
        self.task = task
        return 0

    def finish_task(self, task_id: int, **how: Any) -> bool:
        """Give the task up; nobody has seen it."""
        self.given_up = True
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


class RunEndedError(RuntimeError):
    """A message's run ended while it came in."""


class _PacedTime(ModuleType):
    """Stands in for the module `time` where the SuperNode's loop sleeps."""

    def __init__(self, pace: Pace, reply_poll: float) -> None:
        super().__init__("time")
        self._pace = pace
        self._reply_poll = reply_poll

    def sleep(self, seconds: float) -> None:
        """Sleep for our time instead of Flower's."""
        if seconds == IDLE_SLEEP:
            time.sleep(self._pace.pause)
        elif seconds == REPLY_SLEEP:
            self._pace.worked()
            time.sleep(self._reply_poll)
        else:
            time.sleep(seconds)

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


def _as_expected(what: str, present: bool) -> bool:
    """Check version and internals before an override; warn if it cannot be done."""
    found = version("flwr")
    if found == FLOWER_VERSION and present:
        return True
    log(
        WARNING,
        "%s stays Flower's own, which is slower or may hang: flwr %s is installed, the override "
        "was written for %s%s",
        what,
        found,
        FLOWER_VERSION,
        "" if present else ", and what it replaces has moved",
    )
    return False
