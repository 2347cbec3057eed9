"""Flower's SuperLink, in which polls wait, calls go together, and SQLite is asked less often.

Each call of a node looks up its key, the run's status and tasks that have expired, and books its
bytes, in queries of their own, most of which write. Under many nodes a SuperLink does little else.
Nothing but its own process writes its database, so it can remember what it read.
"""

# mypy: disable-error-code="safe-super"
# (`WatchingLinkState` comes before a class of Flower's, and calls that, not the abstract one.)

from __future__ import annotations

import logging
import sys
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

from flwr.app import Message, Metadata
from flwr.common.constant import TRANSPORT_TYPE_GRPC_RERE, Status
from flwr.common.logger import FLOWER_LOGGER, console_handler
from flwr.server import app
from flwr.server.superlink.linkstate import LinkState, linkstate_factory
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.server.superlink.linkstate.utils import (
    convert_sint64_values_in_dict_to_uint64,
    create_message_error_unavailable_res_message,
    dict_to_message,
)
from flwr.supercore.object_store import object_store_factory
from flwr.supercore.run import Run, RunStatus
from flwr.supercore.utils import int64_to_uint64, uint64_to_int64
from flwr.superlink.servicer.serverappio import serverappio_grpc

from flwr_distill.flower.line_1_32.fleet.bundle import bound_bundles
from flwr_distill.flower.line_1_32.fleet.callers import BoundServicer
from flwr_distill.flower.line_1_32.fleet.store import OneConnectionStore, PlainQueries
from flwr_distill.flower.line_1_32.fleet.together import CallsTogether
from flwr_distill.flower.line_1_32.fleet.waiting import MOST, Doorbell, WaitingPolls
from flwr_distill.flower.line_1_32.objects import MemoryObjectStore

FRESH = 1.0
"""Seconds for which a running run's status is believed, and between searches for expired tasks."""
BOOKED = 1.0
"""Seconds between bookings of traffic."""
_MAKE = "generic_create_grpc_server"
SWITCH = 0.05
"""Seconds for which a thread computes while others want to: each of these wakes as often to ask."""
_OF_CALLS = ("[Fleet.PullMessages]", "[Fleet.PushMessages]", "[Fleet.GetRun]")
MOST_LOOKED = 100_000
"""Messages of which it is remembered when someone asked for their replies."""
CALLS = 1000
"""Threads besides those of polls that wait: as many as Flower has."""
MOST_LOST = 10_000
"""Messages of which it is remembered that their nodes have lost them."""
_AWAY = "node_unavail"
"""Flower's name for the error of a node that is away."""
_IDS = ["run_id", "src_node_id", "dst_node_id"]
"""Columns that SQLite holds as signed numbers."""
_INDICES = {"object_children": "child_id", "run_objects": "object_id", "message_ins": "dst_node_id"}
"""Columns by which each poll and each deletion would else search whole tables."""


class WatchingLinkState(LinkState):
    """Comes before a state of Flower's; notices what comes for nodes, and what they lose.

    What a node had fetched when it starts again is lost, and the reply to it is an error. Flower
    notes that only if someone asks for the reply while the node counts as offline, which may be for
    a moment.

    Attributes
    ----------
    doorbell : Doorbell
        Rings for a node when a message for it is stored.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.doorbell = Doorbell()
        self._lock = threading.Lock()
        self._lost: dict[str, Metadata] = {}

    def transaction(self) -> AbstractContextManager[None]:
        """Store what is stored meanwhile, each by itself."""
        return nullcontext()

    def store_message_ins(self, message: Message) -> str | None:
        """Store a message for a node."""
        message_id = super().store_message_ins(message)
        self._note_message(message.metadata.dst_node_id)
        return message_id

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        """Let a node come that has started."""
        activated = super().activate_node(node_id, heartbeat_interval)
        if activated:
            lost = {each.message_id: each for each in self.fetched(node_id)}
            with self._lock:
                self._lost |= lost
                while len(self._lost) > MOST_LOST:  # the oldest may be of runs that have ended
                    del self._lost[next(iter(self._lost))]
        return activated

    def get_message_res(self, message_ids: set[str]) -> list[Message]:
        """Return the replies to messages, and errors for those to which none can come."""
        with self._lock:
            lost = {name: self._lost[name] for name in message_ids if name in self._lost}
        errors = [
            create_message_error_unavailable_res_message(told, _AWAY) for told in lost.values()
        ]
        return [*super().get_message_res(message_ids - lost.keys()), *errors]

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        """Delete messages and their replies."""
        super().delete_messages(message_ins_ids)
        with self._lock:
            for name in message_ins_ids:
                self._lost.pop(name, None)

    def _note_message(self, node_id: int) -> None:
        """Note that a message for a node is here."""
        self.doorbell.ring(node_id)

    @abstractmethod
    def fetched(self, node_id: int) -> list[Metadata]:
        """Messages that a node has fetched and not answered."""

    @abstractmethod
    def sent(self, message_id: str) -> tuple[int, int] | None:
        """Node that a message was sent to, and its run; None if there is no such message."""


class MemoryLinkState(WatchingLinkState, InMemoryLinkState):
    """Flower's state in memory."""

    def fetched(self, node_id: int) -> list[Metadata]:
        """Messages that a node has fetched and not answered."""
        with self.lock:
            told = [message.metadata for message in self.message_ins_store.values()]
            answered = set(self.message_ins_id_to_message_res_id)
        return [
            each
            for each in told
            if each.dst_node_id == node_id and each.delivered_at and each.message_id not in answered
        ]

    def sent(self, message_id: str) -> tuple[int, int] | None:
        """Node that a message was sent to, and its run."""
        if (message := self.message_ins_store.get(message_id)) is None:
            return None
        return message.metadata.dst_node_id, message.metadata.run_id


class RememberingLinkState(WatchingLinkState, PlainQueries, SqlLinkState):
    """Flower's state of a SuperLink, which remembers what it has read.

    It remembers nodes' ids until a node is removed, that there is no message for a node until one
    is stored, and that a run is running for `FRESH` seconds or until a task ends. Of messages
    whose reply is not here it polls every `FRESH` seconds only whether one can still arrive.
    Traffic is booked every `BOOKED` seconds, and before anyone reads it; a SuperLink that is killed
    loses so much.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # What was read while something changed may be old already, and is not kept.
        self._changes: Counter[str] = Counter()
        self._node_ids: dict[bytes, int] = {}
        self._without_message: set[int] = set()
        self._running: dict[int, tuple[float, RunStatus]] = {}
        self._answered: set[str] = set()
        self._looked: dict[str, float] = {}
        self._cleaned = -FRESH
        self._traffic: dict[int, tuple[int, int]] = {}
        self._booked = -BOOKED

    def initialize(self, log_queries: bool = False) -> list[str]:
        """Make the tables, and share the connection of the store of objects."""
        tables = super().initialize(log_queries)
        store = self.object_store
        if isinstance(store, OneConnectionStore) and store.is_file:
            store.share(self)
            for table, column in _INDICES.items():
                name = f"idx_flwr_distill_{table}"
                self.query(f"CREATE INDEX IF NOT EXISTS {name} ON {table} ({column})")
        return tables

    def transaction(self) -> AbstractContextManager[None]:
        """Store all that is stored meanwhile, or nothing; in memory, each by itself."""
        store = self.object_store
        if isinstance(store, OneConnectionStore) and store.is_file:
            return store.transaction()
        return nullcontext()

    def get_node_id_by_public_key(self, public_key: bytes) -> int | None:
        """Return the id of the node with this key."""
        if (known := self._node_ids.get(public_key)) is not None:
            return known
        changes = self._changes["nodes"]
        node_id = super().get_node_id_by_public_key(public_key)
        if node_id is not None:
            self._keep("nodes", changes, lambda: self._node_ids.__setitem__(public_key, node_id))
        return node_id

    def fetched(self, node_id: int) -> list[Metadata]:
        """Messages that a node has fetched and not answered."""
        rows = self.query(
            "SELECT * FROM message_ins WHERE dst_node_id = :node AND delivered_at != '' "
            "AND message_id NOT IN (SELECT reply_to_message_id FROM message_res)",
            {"node": uint64_to_int64(node_id)},
        )
        for row in rows:
            convert_sint64_values_in_dict_to_uint64(row, _IDS)
        return [dict_to_message(row).metadata for row in rows]

    def sent(self, message_id: str) -> tuple[int, int] | None:
        """Node that a message was sent to, and its run."""
        rows = self.query(
            "SELECT dst_node_id, run_id FROM message_ins WHERE message_id = :name",
            {"name": message_id},
        )
        if not rows:
            return None
        return int64_to_uint64(rows[0]["dst_node_id"]), int64_to_uint64(rows[0]["run_id"])

    def delete_node(self, owner_aid: str, node_id: int) -> None:
        """Remove a node."""
        super().delete_node(owner_aid, node_id)
        with self._lock:
            self._changes["nodes"] += 1
            self._node_ids = {key: id_ for key, id_ in self._node_ids.items() if id_ != node_id}
            self._without_message.discard(node_id)

    def _note_message(self, node_id: int) -> None:
        with self._lock:
            self._changes["messages"] += 1
            self._without_message.discard(node_id)
        super()._note_message(node_id)

    def _claim_message_ins_rows(self, node_id: int, limit: int | None) -> list[dict[str, Any]]:
        if node_id in self._without_message:
            return []
        changes = self._changes["messages"]
        rows = super()._claim_message_ins_rows(node_id, limit)
        # Any id may be asked for where keys are not checked; those of strangers would fill memory.
        if not rows and node_id in self._node_ids.values():
            self._keep("messages", changes, lambda: self._without_message.add(node_id))
        return rows

    def store_message_res(self, message: Message) -> str | None:
        """Store a reply."""
        message_id = super().store_message_res(message)
        if message_id is not None:
            with self._lock:
                self._answered.add(message.metadata.reply_to_message_id)
        return message_id

    def get_message_res(self, message_ids: set[str]) -> list[Message]:
        """Return the replies to messages, and errors for those to which none can come."""
        now = time.monotonic()
        with self._lock:
            if len(self._looked) > MOST_LOOKED:
                self._looked.clear()
            due = {name for name in message_ids if now - self._looked.get(name, -FRESH) >= FRESH}
            self._looked |= dict.fromkeys(due, now)
            due |= self._answered & message_ids
        return super().get_message_res(due)

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        """Delete messages and their replies."""
        super().delete_messages(message_ins_ids)
        with self._lock:
            self._answered -= message_ins_ids
            for name in message_ins_ids:
                self._looked.pop(name, None)

    def get_run_status(self, run_ids: set[int]) -> dict[int, RunStatus]:
        """Return the status of runs."""
        now = time.monotonic()
        known = {run_id: self._running[run_id] for run_id in run_ids if run_id in self._running}
        fresh = {run_id: status for run_id, (read, status) in known.items() if now - read < FRESH}
        if fresh.keys() == run_ids:
            return fresh
        changes = self._changes["tasks"]
        statuses = super().get_run_status(run_ids)
        running = {
            run_id: (now, status)
            for run_id, status in statuses.items()
            if status.status == Status.RUNNING
        }
        self._keep("tasks", changes, lambda: self._running.update(running))
        return statuses

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        """End a task."""
        ended = super().finish_task(task_id, sub_status, details)
        self._forget_runs()
        return ended

    def _finish_run_tasks(self, *arguments: Any, **named: Any) -> None:
        super()._finish_run_tasks(*arguments, **named)
        self._forget_runs()

    def _forget_runs(self) -> None:
        with self._lock:
            self._changes["tasks"] += 1
            self._running.clear()
            self._answered.clear()  # else those of late replies would stay

    def _cleanup_expired_task_tokens(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._cleaned < FRESH:
                return
            self._cleaned = now
        super()._cleanup_expired_task_tokens()

    def store_traffic(self, run_id: int, *, bytes_sent: int, bytes_recv: int) -> None:
        """Book a run's bytes."""
        if min(bytes_sent, bytes_recv) < 0 or not (bytes_sent or bytes_recv):
            super().store_traffic(run_id, bytes_sent=bytes_sent, bytes_recv=bytes_recv)  # raises
        with self._lock:
            sent, received = self._traffic.get(run_id, (0, 0))
            self._traffic[run_id] = sent + bytes_sent, received + bytes_recv
            due = time.monotonic() - self._booked > BOOKED
        if due:
            self._book()

    def get_run_info(self, **filters: Any) -> Sequence[Run]:
        """Return what is known of runs, with all of their traffic."""
        self._book()
        return super().get_run_info(**filters)

    def _book(self) -> None:
        with self._lock:
            traffic, self._traffic = self._traffic, {}
            self._booked = time.monotonic()
        for run_id, (sent, received) in traffic.items():
            with suppress(ValueError):  # no such run
                super().store_traffic(run_id, bytes_sent=sent, bytes_recv=received)

    def _keep(self, what: str, changes: int, keep: Callable[[], None]) -> None:
        """Keep what was read if nothing of it has changed since these changes."""
        with self._lock:
            if self._changes[what] == changes:
                keep()


def why_unbound() -> str:
    """Why calls could not be bound to nodes with the process's arguments; '' if they are."""
    kind = app._parse_args_run_superlink().parse_args().fleet_api_type
    if kind == TRANSPORT_TYPE_GRPC_RERE:
        return ""
    return (
        f"--fleet-api-type {kind}: its calls carry no node's key, so any node could call for "
        f"another. Use {TRANSPORT_TYPE_GRPC_RERE}, the default, or run flower-superlink, which "
        "binds no calls (docs/flower.md)"
    )


def main() -> None:
    """Be `flower-superlink`, with the states above, and calls bound to the nodes that make them."""
    object_store_factory.SqlObjectStore = OneConnectionStore  # type: ignore[attr-defined]
    object_store_factory.InMemoryObjectStore = MemoryObjectStore  # type: ignore[attr-defined]
    linkstate_factory.SqlLinkState = RememberingLinkState  # type: ignore[attr-defined]
    linkstate_factory.InMemoryLinkState = MemoryLinkState  # type: ignore[attr-defined]
    app.FleetServicer = BoundServicer  # type: ignore[attr-defined]
    for module, interceptors in ((app, fleet_interceptors), (serverappio_grpc, app_interceptors)):
        make = partial(_server, getattr(module, _MAKE), interceptors)
        setattr(module, _MAKE, make)
    bound_bundles()
    sys.setswitchinterval(SWITCH)
    FLOWER_LOGGER.setLevel(console_handler.level)  # it would make lines of all levels to drop them
    FLOWER_LOGGER.addFilter(_is_of_no_single_call)
    app.run_superlink()


def _is_of_no_single_call(record: logging.LogRecord) -> bool:
    """Whether a line is not one of those that Flower writes at each poll and each reply."""
    return record.levelno != logging.INFO or not str(record.msg).startswith(_OF_CALLS)


def fleet_interceptors(state: WatchingLinkState, servicer: Any, add: Any) -> list[Any]:
    """What the Fleet API does besides Flower's: nodes' polls wait, and calls go together."""
    polls = WaitingPolls(state.doorbell, state.acknowledge_node_heartbeat)
    return [polls, CallsTogether(servicer, add, state.transaction)]


def app_interceptors(state: WatchingLinkState, servicer: Any, add: Any) -> list[Any]:
    """What the ServerAppIo API does besides Flower's: calls go together."""
    return [CallsTogether(servicer, add, state.transaction)]


def _server(
    make: Callable[..., Any],
    ours: Callable[..., list[Any]],
    servicer_and_add_fn: tuple[Any, Any],
    *arguments: Any,
    interceptors: Sequence[Any] | None = None,
    **named: Any,
) -> Any:
    """A server of Flower's with interceptors of ours."""
    state = servicer_and_add_fn[0].state_factory.state()
    interceptors = [*(interceptors or ()), *ours(state, *servicer_and_add_fn)]
    named["max_concurrent_workers"] = MOST + CALLS
    return make(servicer_and_add_fn, *arguments, interceptors=interceptors, **named)
