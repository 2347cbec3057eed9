"""A task of a SuperNode: a message for an app, and its reply, over the SuperNode's API for apps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from flwr.app import Context, Message
from flwr.common.constant import SubStatus
from flwr.common.serde import (
    context_from_proto,
    fab_from_proto,
    message_from_proto,
    run_from_proto,
)
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.run import Run
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

from flwr_distill.flower.app_config import run_config_of
from flwr_distill.flower.lines import module_of_line
from flwr_distill.flower.payload import Payload
from flwr_distill.flower.task_identity import identify
from flwr_distill.node.bundle import BundleError

appio: Any = module_of_line("node", "appio")
_MESSAGE_TIMEOUT = 10.0
"""Seconds that a task's message may arrive after the task."""


class TaskEndedError(Exception):
    """The run of a task has ended."""


class UnanswerableError(Exception):
    """A task can be neither finished nor answered with an error."""


@dataclass(frozen=True)
class Work:
    """What a task asks for: a message, without its content, of a run of an app bundle."""

    header: Message
    tree: ObjectTree
    context: Context
    run: Run
    bundle: Fab
    task_id: int

    def payload(self, contents: dict[str, bytes]) -> Payload:
        """What the worker gets, with the message's objects."""
        app = [self.run.fab_id, self.run.fab_version, self.bundle.hash_str]
        about = {"app": app, "task": self.task_id}
        return Payload(self.tree.object_id, contents, self.context, about)


class Task:
    """A claimed task; `api` is an `AppIo` of the installed line."""

    def __init__(self, api: Any, token: str) -> None:
        self._calls = api.calls(token)

    def has_ended(self) -> bool:
        """Whether its run has ended."""
        return bool(appio.has_ended(self._calls))

    @contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Send heartbeats within the block."""

        def beat() -> bool:
            try:
                self._calls.SendTaskHeartbeat(appio.messages.SendTaskHeartbeatRequest())
            except appio.REFUSED:
                return False
            return True

        sender = HeartbeatSender(beat)
        sender.start()
        try:
            yield
        finally:
            sender.stop()

    def pull(self) -> Work:
        """Pull all but the message's objects."""
        # A SuperNode creates the task first and stores its message after that.
        deadline = time.monotonic() + _MESSAGE_TIMEOUT
        while (response := appio.pull_message(self._calls)) is None:
            if time.monotonic() > deadline:
                reason = "the SuperNode refused to serve a task: its message is gone"
                raise UnanswerableError(reason)
            time.sleep(0.02)
        given = appio.pull_task_input(self._calls)
        run, bundle = run_from_proto(given.run), fab_from_proto(given.fab)
        context = _context_of(run, bundle, context_from_proto(given.context))
        task_id = getattr(given, "task_id", 0)
        identify(task_id, context.run_id, context.node_id)
        header = message_from_proto(response.messages_list[0])
        tree = response.message_object_trees[0]
        return Work(header, tree, context, run, bundle, task_id)

    def pull_contents(self, work: Work) -> dict[str, bytes]:
        """Pull the message's objects, by id; the SuperNode then forgets them."""
        node, run_id = Node(node_id=work.context.node_id), work.context.run_id
        names = list(dict.fromkeys(part.object_id for part in iterate_object_tree(work.tree)))
        pull = make_pull_object_fn_protobuf(self._calls.PullObject, node, run_id)
        confirm = make_confirm_message_received_fn_protobuf(
            self._calls.ConfirmMessageReceived, node, run_id
        )
        contents = pull_objects(names, pull)
        confirm(work.tree.object_id)
        return contents

    def push(self, reply: Message, context: Context) -> None:
        """Push the reply, and the context for the run's next message."""
        # If the SuperLink has some of the objects already, the SuperNode may send the reply and
        # delete it before the others arrive there.
        with suppress(appio.TOO_LATE):
            push_message(self._calls, reply, context)
        failed = reply.error.reason or "" if reply.has_error() else None
        push_task_output(
            self._calls,
            context=context,
            sub_status=SubStatus.COMPLETED if failed is None else SubStatus.FAILED,
            details=failed or "",
        )


def _context_of(run: Run, bundle: Fab, context: Context) -> Context:
    """The context with the run's own id and config.

    A SuperNode keeps one for all runs of a series, that of the run which was new last, and the
    SuperLink says which run is of which series.
    """
    if context.run_id != run.run_id:
        context.run_id = run.run_id
        try:
            context.run_config = run_config_of(bundle.content, run.override_config)
        except BundleError:  # the guard refuses it
            context.run_config = {}
    return context
