"""Steps around Flower's two functions with which a SuperNode pulls a message and pushes its reply.

Each is replaced once, by itself with all steps around it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from flwr.app import Message
from flwr.supercore.run import RunNotRunningException

from flwr_distill.flower.timing import can_override

T = TypeVar("T")


class Step:
    """Work around these functions, with their arguments by name; by default none."""

    def pull(self, inner: Callable[..., int | None], **named: Any) -> int | None:
        """Pull a message and store it, with `inner`; return its run's id, None without message."""
        return inner(**named)

    def push(self, inner: Callable[..., None], **named: Any) -> None:
        """Wait for the app's reply and push it, with `inner`."""
        inner(**named)


def patch_loop(*steps: Step) -> bool:
    """Put steps around Flower's functions, the first one innermost; False if they do not fit."""
    from flwr.supernode import start_client_internal as loop

    present = hasattr(loop, "_pull_and_store_message") and hasattr(loop, "_push_messages")
    if not can_override("the SuperNode's loop", present):
        return False
    pull: Callable[..., int | None] = loop._pull_and_store_message
    push: Callable[..., None] = loop._push_messages
    for step in steps:
        pull, push = partial(step.pull, pull), partial(step.push, push)
    setattr(loop, "_pull_and_store_message", pull)  # noqa: B010 (not exported)
    setattr(loop, "_push_messages", push)  # noqa: B010
    return True


class WholeMessages(Step):
    """Offers a message to the app as a task only once it is complete.

    Flower offers it before it pulls its objects. If the run ends in between or the pull fails, they
    never arrive, and the node waits for them forever. This drops the message and pulls the next.
    """

    def pull(self, inner: Callable[..., int | None], **named: Any) -> int | None:
        """Pull a message; create its task at the end."""
        deferring = _DeferringState(named["state"])
        whole = {
            "state": deferring,
            "pull_object": _run_end_as_error(named["pull_object"]),
            "confirm_message_received": _run_end_as_error(named["confirm_message_received"]),
        }
        run_id = inner(**{**named, **whole})
        if deferring.dropped:
            return None
        if deferring.task is not None:
            named["state"].create_task(**deferring.task)
        return run_id


def _run_end_as_error(call: Callable[[int, str], T]) -> Callable[[int, str], T]:
    # Flower cleans up after other errors, but not after the end of a run.
    def wrapper(run_id: int, name: str) -> T:
        try:
            return call(run_id, name)
        except RunNotRunningException:
            raise RuntimeError("the run has ended") from None

    return wrapper


class WrappedState:
    """A SuperNode's state; subclasses replace some of its methods."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


class _DeferringState(WrappedState):
    """Records a task instead of creating it."""

    task: dict[str, Any] | None = None
    dropped = False

    def create_task(self, **task: Any) -> int:
        self.task = task
        return 0

    def finish_task(self, task_id: int, **arguments: Any) -> bool:
        self.dropped = True
        return True


def answer(reply: Message, state: Any, store: Any) -> None:
    """Answer a message in place of the app, which does not get it."""
    from flwr.supernode.start_client_internal import _insert_message

    name = reply.metadata.reply_to_message_id
    store.delete(name)
    state.record_message_processing_start(name)
    state.record_message_processing_end(name)
    _insert_message(reply, state, store)
