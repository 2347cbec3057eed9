"""Flower's SuperLink, in which polls wait, calls go in batches, and SQLite has less work.

Each call of a node looks up its key, the run's status and expired tasks, and books its bytes, in
queries of their own, most of which write. Under many nodes a SuperLink does little else. Only its
own process writes its database, so it can cache what it read.
"""

# ruff: noqa: D102 (Flower's methods)
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

from flwr_distill.flower.app_config import app_config
from flwr_distill.flower.line_1_32.fleet.calls import (
    MOST,
    BatchedCalls,
    BoundServicer,
    Doorbell,
    WaitingPolls,
)
from flwr_distill.flower.line_1_32.fleet.store import OneConnectionStore, PlainQueries
from flwr_distill.flower.line_1_32.objects import MemoryObjectStore

FRESH = 1.0
"""Seconds for which a running run's status is cached, and between searches for expired tasks."""
BOOKED = 1.0
"""Seconds between bookings of traffic."""
MAX_POLLED = 100_000
"""Messages of which it is cached when their replies were last polled."""
MAX_LOST = 10_000
"""Messages of which it is cached that their nodes have lost them."""
CALLS = 1000
"""Threads besides those of waiting polls: as many as Flower has."""
SWITCH = 0.05
"""Seconds for which a thread computes while others wait: each of them wakes up as often."""
_MAKE = "generic_create_grpc_server"
_OF_CALLS = (
    *("[Fleet.PullMessages]", "[Fleet.PushMessages]", "[Fleet.GetRun]"),
    "ControlServicer.ListRuns",  # the queue's, each second
)
_UNAVAILABLE = "node_unavail"
"""Flower's name for the error of a node that is away."""
_SIGNED_COLUMNS = ["run_id", "src_node_id", "dst_node_id"]
_INDICES = {"object_children": "child_id", "run_objects": "object_id", "message_ins": "dst_node_id"}
"""Columns for which each poll and each deletion would otherwise search whole tables."""


class WatchingLinkState(LinkState):
    """Comes before a state of Flower's; rings for new messages, and reports lost ones.

    Messages that a node had fetched when it restarts are lost, and the reply to each is an error.
    Flower notes that only if someone polls for the reply while the node counts as offline, which
    may be for a moment. The `doorbell` rings for a node when a message for it is stored.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.doorbell = Doorbell()
        self._lock = threading.Lock()
        self._lost: dict[str, Metadata] = {}

    def transaction(self) -> AbstractContextManager[None]:
        """No-op transaction."""
        return nullcontext()

    def store_message_ins(self, message: Message) -> str | None:
        message_id = super().store_message_ins(message)
        self._note_message(message.metadata.dst_node_id)
        return message_id

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        activated = super().activate_node(node_id, heartbeat_interval)
        if activated:
            lost = {each.message_id: each for each in self.fetched(node_id)}
            with self._lock:
                self._lost |= lost
                while len(self._lost) > MAX_LOST:  # the oldest may be of runs that have ended
                    del self._lost[next(iter(self._lost))]
        return activated

    def get_message_res(self, message_ids: set[str]) -> list[Message]:
        with self._lock:
            lost = {name: self._lost[name] for name in message_ids if name in self._lost}
        errors = [
            create_message_error_unavailable_res_message(header, _UNAVAILABLE)
            for header in lost.values()
        ]
        return [*super().get_message_res(message_ids - lost.keys()), *errors]

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        super().delete_messages(message_ins_ids)
        with self._lock:
            for name in message_ins_ids:
                self._lost.pop(name, None)

    def _note_message(self, node_id: int) -> None:
        self.doorbell.ring(node_id)

    @abstractmethod
    def fetched(self, node_id: int) -> list[Metadata]:
        """Messages that a node has fetched and not answered."""

    @abstractmethod
    def sent(self, message_id: str) -> tuple[int, int] | None:
        """Node that a message was sent to, and its run; None without such a message."""


class MemoryLinkState(WatchingLinkState, InMemoryLinkState):
    """Flower's state in memory."""

    def fetched(self, node_id: int) -> list[Metadata]:
        with self.lock:
            headers = [message.metadata for message in self.message_ins_store.values()]
            answered = set(self.message_ins_id_to_message_res_id)
        return [
            each
            for each in headers
            if each.dst_node_id == node_id and each.delivered_at and each.message_id not in answered
        ]

    def sent(self, message_id: str) -> tuple[int, int] | None:
        if (message := self.message_ins_store.get(message_id)) is None:
            return None
        return message.metadata.dst_node_id, message.metadata.run_id


class CachingLinkState(WatchingLinkState, PlainQueries, SqlLinkState):
    """Flower's state of a SuperLink, which caches what it has read.

    It caches nodes' ids until a node is removed; that a node has no message until one is stored;
    and that a run is running, for `FRESH` seconds or until a task ends. For messages without a
    reply it checks every `FRESH` seconds only whether one can still arrive. Traffic is booked every
    `BOOKED` seconds, and before anyone reads it; a SuperLink that is killed loses that much.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # What was read during a change may be outdated, and is not cached.
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
        tables = super().initialize(log_queries)
        if store := self._file_store:
            store.share(self)
            for table, column in _INDICES.items():
                name = f"idx_flwr_distill_{table}"
                self.query(f"CREATE INDEX IF NOT EXISTS {name} ON {table} ({column})")
        return tables

    def transaction(self) -> AbstractContextManager[None]:
        return store.transaction() if (store := self._file_store) else nullcontext()

    @property
    def _file_store(self) -> OneConnectionStore | None:
        store = self.object_store
        return store if isinstance(store, OneConnectionStore) and store.is_file else None

    def get_node_id_by_public_key(self, public_key: bytes) -> int | None:
        if (known := self._node_ids.get(public_key)) is not None:
            return known
        changes = self._changes["nodes"]
        node_id = super().get_node_id_by_public_key(public_key)
        if node_id is not None:
            self._cache("nodes", changes, lambda: self._node_ids.__setitem__(public_key, node_id))
        return node_id

    def fetched(self, node_id: int) -> list[Metadata]:
        rows = self.query(
            "SELECT * FROM message_ins WHERE dst_node_id = :node AND delivered_at != '' "
            "AND message_id NOT IN (SELECT reply_to_message_id FROM message_res)",
            {"node": uint64_to_int64(node_id)},
        )
        for row in rows:
            convert_sint64_values_in_dict_to_uint64(row, _SIGNED_COLUMNS)
        return [dict_to_message(row).metadata for row in rows]

    def sent(self, message_id: str) -> tuple[int, int] | None:
        rows = self.query(
            "SELECT dst_node_id, run_id FROM message_ins WHERE message_id = :name",
            {"name": message_id},
        )
        if not rows:
            return None
        return int64_to_uint64(rows[0]["dst_node_id"]), int64_to_uint64(rows[0]["run_id"])

    def delete_node(self, owner_aid: str, node_id: int) -> None:
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
        # Where keys are not checked, anyone may poll for any id, which would fill memory.
        if not rows and node_id in self._node_ids.values():
            self._cache("messages", changes, lambda: self._without_message.add(node_id))
        return rows

    def store_message_res(self, message: Message) -> str | None:
        message_id = super().store_message_res(message)
        if message_id is not None:
            with self._lock:
                self._answered.add(message.metadata.reply_to_message_id)
        return message_id

    def get_message_res(self, message_ids: set[str]) -> list[Message]:
        now = time.monotonic()
        with self._lock:
            if len(self._looked) > MAX_POLLED:
                self._looked.clear()
            due = {name for name in message_ids if now - self._looked.get(name, -FRESH) >= FRESH}
            self._looked |= dict.fromkeys(due, now)
            due |= self._answered & message_ids
        return super().get_message_res(due)

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        super().delete_messages(message_ins_ids)
        with self._lock:
            self._answered -= message_ins_ids
            for name in message_ins_ids:
                self._looked.pop(name, None)

    def get_run_status(self, run_ids: set[int]) -> dict[int, RunStatus]:
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
        self._cache("tasks", changes, lambda: self._running.update(running))
        return statuses

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        ended = super().finish_task(task_id, sub_status, details)
        self._evict_runs()
        return ended

    def _finish_run_tasks(self, *arguments: Any, **named: Any) -> None:
        super()._finish_run_tasks(*arguments, **named)
        self._evict_runs()

    def _evict_runs(self) -> None:
        with self._lock:
            self._changes["tasks"] += 1
            self._running.clear()
            self._answered.clear()  # otherwise those of late replies would stay

    def _cleanup_expired_task_tokens(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._cleaned < FRESH:
                return
            self._cleaned = now
        super()._cleanup_expired_task_tokens()

    def store_traffic(self, run_id: int, *, bytes_sent: int, bytes_recv: int) -> None:
        if min(bytes_sent, bytes_recv) < 0 or not (bytes_sent or bytes_recv):
            super().store_traffic(run_id, bytes_sent=bytes_sent, bytes_recv=bytes_recv)  # raises
        with self._lock:
            sent, received = self._traffic.get(run_id, (0, 0))
            self._traffic[run_id] = sent + bytes_sent, received + bytes_recv
            due = time.monotonic() - self._booked > BOOKED
        if due:
            self._book()

    def get_run_info(self, **filters: Any) -> Sequence[Run]:
        self._book()
        return super().get_run_info(**filters)

    def _book(self) -> None:
        with self._lock:
            traffic, self._traffic = self._traffic, {}
            self._booked = time.monotonic()
        for run_id, (sent, received) in traffic.items():
            with suppress(ValueError):  # no such run
                super().store_traffic(run_id, bytes_sent=sent, bytes_recv=received)

    def _cache(self, kind: str, changes: int, store: Callable[[], None]) -> None:
        with self._lock:
            if self._changes[kind] == changes:
                store()


def why_unbound() -> str:
    """Why calls cannot be bound to nodes with the process's arguments; '' if they can."""
    kind = app._parse_args_run_superlink().parse_args().fleet_api_type
    if kind == TRANSPORT_TYPE_GRPC_RERE:
        return ""
    return (
        f"--fleet-api-type {kind}: its calls carry no node's key, so any node could call for "
        f"another. Use {TRANSPORT_TYPE_GRPC_RERE}, the default, or run flower-superlink, which "
        "binds no calls (docs/flower.md)"
    )


def bound_bundles() -> None:
    """Have this process's SuperLink open no bundle that exceeds a bound (`node.bundle`)."""
    from flwr.superlink.servicer.control import control_servicer  # here: imports a SuperLink

    assert hasattr(control_servicer, "get_fab_config")
    setattr(control_servicer, "get_fab_config", app_config)  # noqa: B010


def main() -> None:
    """Run `flower-superlink` with the states above, and calls bound to the nodes that make them."""
    object_store_factory.SqlObjectStore = OneConnectionStore  # type: ignore[attr-defined]
    object_store_factory.InMemoryObjectStore = MemoryObjectStore  # type: ignore[attr-defined]
    linkstate_factory.SqlLinkState = CachingLinkState  # type: ignore[attr-defined]
    linkstate_factory.InMemoryLinkState = MemoryLinkState  # type: ignore[attr-defined]
    app.FleetServicer = BoundServicer  # type: ignore[attr-defined]
    for module, interceptors in ((app, fleet_interceptors), (serverappio_grpc, app_interceptors)):
        make = partial(_server, getattr(module, _MAKE), interceptors)
        setattr(module, _MAKE, make)
    bound_bundles()
    sys.setswitchinterval(SWITCH)
    FLOWER_LOGGER.setLevel(console_handler.level)  # formats no lines only to drop them
    FLOWER_LOGGER.addFilter(_is_no_call)
    app.run_superlink()


def _is_no_call(record: logging.LogRecord) -> bool:
    """Whether Flower writes a line otherwise than at each poll and each reply."""
    return record.levelno != logging.INFO or not str(record.msg).startswith(_OF_CALLS)


def fleet_interceptors(state: WatchingLinkState, servicer: Any, add: Any) -> list[Any]:
    """Interceptors for the Fleet API besides Flower's: polls wait, and calls go in batches."""
    polls = WaitingPolls(state.doorbell, state.acknowledge_node_heartbeat)
    return [polls, BatchedCalls(servicer, add, state.transaction)]


def app_interceptors(state: WatchingLinkState, servicer: Any, add: Any) -> list[Any]:
    """Interceptors for the ServerAppIo API besides Flower's: calls go in batches."""
    return [BatchedCalls(servicer, add, state.transaction)]


def _server(
    make: Callable[..., Any],
    ours: Callable[..., list[Any]],
    servicer_and_add_fn: tuple[Any, Any],
    *arguments: Any,
    interceptors: Sequence[Any] | None = None,
    **named: Any,
) -> Any:
    state = servicer_and_add_fn[0].state_factory.state()
    interceptors = [*(interceptors or ()), *ours(state, *servicer_and_add_fn)]
    named["max_concurrent_workers"] = MOST + CALLS
    return make(servicer_and_add_fn, *arguments, interceptors=interceptors, **named)
