"""Overrides of Flower's SuperNode: its waits, the steps of its loop, and what it reports.

An idle SuperNode of these Flowers polls for messages every 3 s and for a ClientApp's reply every
0.5 s; it waits 1 s before it retries to pull an object that has not arrived. Each override checks
Flower's version and that the code it replaces still exists; if not, it warns, changes nothing and
returns False.

Each is replaced once, by itself with all steps around it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from logging import INFO, WARNING
from types import ModuleType
from typing import Any, TypeVar

from flwr.app import Message
from flwr.common import log
from flwr.supercore.run import Run, RunNotRunningException

from flwr_distill.flower.app_config import run_config_of
from flwr_distill.node.bundle import BundleError
from flwr_distill.node.notes import Notes, shortened
from flwr_distill.node.pace import Pace

FLOWER_VERSIONS = (
    *("1.32.1", "1.35.0", "1.36.0", "1.37.0"),
    *("1.38.0", "1.39.0", "1.40.0", "1.41.0", "1.42.0"),
)
IDLE_SLEEP = 3
REPLY_SLEEP = 0.5
"""Flower's sleeps in the SuperNode's loop, in seconds; `_PacedTime` tells them apart by value."""


def patch_supernode_sleep(pace: Pace, *, reply_poll: float = 0.02) -> bool:
    """Let the SuperNode poll for messages at `pace`, and for replies every `reply_poll` seconds.

    Waiting for a reply counts as work.
    """
    from flwr.supernode import start_client_internal

    present = getattr(start_client_internal, "time", None) is time
    if not can_override("the SuperNode's sleep", present):
        return False
    setattr(start_client_internal, "time", _PacedTime(pace, reply_poll))  # noqa: B010 (not exported)
    return True


def patch_nonce_cleanup(*, every: float = 30.0) -> bool:
    """Let the SuperNode remove expired nonces every so many seconds only.

    With a secret on its ClientAppIo API, Flower checks those of five minutes at each poll.
    """
    from flwr.supercore.corestate.in_memory_corestate import InMemoryCoreState as State

    present = hasattr(State, "_cleanup_expired_nonces")
    if not can_override("the cleaning of nonces", present):
        return False
    clean_up = State._cleanup_expired_nonces
    due = 0.0

    def clean_up_sometimes(self: State) -> None:
        nonlocal due
        if time.monotonic() > due:
            clean_up(self)
            due = time.monotonic() + every

    setattr(State, "_cleanup_expired_nonces", clean_up_sometimes)  # noqa: B010
    return True


def patch_bundle_reading() -> bool:
    """Let the SuperNode read a run's settings from its app bundle within bounds.

    It reads them before the node's guard, which refuses a bundle that cannot be read.
    """
    from flwr.supernode import start_client_internal

    name = "get_fused_config_from_fab"
    if not can_override("how a SuperNode reads bundles", hasattr(start_client_internal, name)):
        return False

    def read(content: bytes, run: Run) -> dict[str, Any]:
        try:
            return run_config_of(content, run.override_config)
        except BundleError as error:
            log(WARNING, "The app bundle of run %s cannot be read: %s", run.run_id, error)
            return {}

    setattr(start_client_internal, name, read)
    return True


class _PacedTime(ModuleType):
    """Replaces the module `time` in the SuperNode's loop."""

    def __init__(self, pace: Pace, reply_poll: float) -> None:
        super().__init__("time")
        self._pace = pace
        self._reply_poll = reply_poll

    def sleep(self, seconds: float) -> None:
        if seconds == IDLE_SLEEP:
            time.sleep(self._pace.draw())
        elif seconds == REPLY_SLEEP:
            self._pace.worked()
            time.sleep(self._reply_poll)
        else:
            time.sleep(seconds)

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


def can_override(name: str, present: bool) -> bool:
    """Whether Flower's code is unchanged since its override was written; else warn."""
    installed = version("flwr")
    if installed in FLOWER_VERSIONS and present:
        return True
    log(
        WARNING,
        "%s stays Flower's own, which is slower or may hang: flwr %s is installed, the override "
        "was written for %s%s",
        name,
        installed,
        ", ".join(FLOWER_VERSIONS),
        "" if present else ", and the code it replaces has moved",
    )
    return False


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
    `offered` is called with each task: the executor need not poll for it.
    """

    def __init__(self, offered: Callable[[], None] = lambda: None) -> None:
        self._offered = offered

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
            self._offered()
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


_REMEDIES = {
    "No SuperNode found with the given public key": (
        "the SuperLink does not know this node's key: register it there with "
        "`flwr-distill register`, or issue another if it was revoked"
    ),
    "All SuperNodes must be registered via the CLI": (
        "the SuperLink admits registered nodes only: give the node a key (auth-key; "
        "`flwr-distill certs node` makes one) and register it with `flwr-distill register`"
    ),
}
"""By the text of a SuperLink that does not admit a node: its status codes say less."""
_EXIT = "flwr_exit"
"""Flower's function that ends a process, under its name in the modules that import it."""
_EXITING = (
    *("flwr.supernode.cli.flower_supernode", "flwr.supernode.start_client_internal"),
    *("flwr.supernode.fleet_http_connection", "flwr.supercore.tls"),
)
"""Modules that end a SuperNode for its settings or its SuperLink; not every Flower has each."""


class Reports:
    """Reports ``("online", node_id)``, or before ``("unfit", reason)``: restarts do not help.

    Also ``("quiet", until)``, a local time or '', and ``("moves", progress)``, text or ''. `key` is
    the file of the node's key, by which a refusal says which node it is about; '' for none.
    """

    def __init__(self, notes: Notes, key: str = "") -> None:
        self._notes = notes
        self._key = key
        self._online = False
        self._sending = threading.Lock()  # the SuperNode moves contents in several threads

    def online(self, node_id: int) -> None:
        """The SuperLink has admitted the node."""
        self._online = True
        self._send("online", node_id)

    def refused(self, reason: str) -> None:
        """The SuperLink does not admit the node; it may the next time."""
        self.unfit(self._remedy(reason))

    def exits(self, code: int, message: str) -> None:
        """Flower ends the process, with one of its exit codes; below 100, by request."""
        if code >= 100:
            self.unfit(self._remedy(message) or message.partition("\n")[0])

    def quiet(self, until: datetime | None) -> None:
        """The link is quiet until a local time, or no longer."""
        if until is None:
            log(INFO, "Quiet hours are over: contents move again")
        else:
            log(INFO, "Quiet hours: no contents move until %s; heartbeats continue", until)
        self._send("quiet", "" if until is None else str(until))

    def moves(self, progress: str) -> None:
        """How much of a message or reply has moved; '' once nothing moves."""
        with suppress(OSError):  # a transfer does not end because nobody reads this
            self._send("moves", progress)

    def unfit(self, reason: str) -> None:
        """The node cannot work, for a reason; none if it is ''."""
        if reason and not self._online:
            self._send("unfit", shortened(reason))

    def _remedy(self, reason: str) -> str:
        """The remedy for a SuperLink's refusal that no restart would change; else ''."""
        remedy = next((remedy for text, remedy in _REMEDIES.items() if text in reason), "")
        return f"{remedy} (auth-key = {self._key!r})" if remedy and self._key else remedy

    def _send(self, *note: Any) -> None:
        with self._sending:
            self._notes.send(*note)


def patch_reports(reports: Reports) -> None:
    """Have Flower's code report; raises if the code has moved, since nodes wait for reports."""
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState as State

    set_node_id = State.set_node_id

    def set_and_report(self: State, node_id: int) -> None:
        set_node_id(self, node_id)
        reports.online(node_id)

    setattr(State, "set_node_id", set_and_report)  # noqa: B010
    for module in (import_module(name) for name in _EXITING if find_spec(name)):
        setattr(module, _EXIT, _reporting(getattr(module, _EXIT), reports.exits))


def _reporting(end: Callable[..., Any], exits: Callable[[int, str], None]) -> Callable[..., Any]:
    def report_and_end(code: int, message: str | None = None, **details: Any) -> Any:
        exits(code, message or "")
        return end(code, message, **details)

    return report_and_end
