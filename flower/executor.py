"""Executes ClientApp tasks in one warm process; Flower would start a process for every message.

The executor speaks a SuperNode's API for apps, with ``--isolation process``. It imports no
torch, so its heartbeats continue whatever its child (`worker`) does.

It starts another child for another app bundle, for a new run in a sandbox, after packages were
installed, and after an error that CUDA does not recover from. If it cannot answer a task, it exits.
Its supervisor must then restart the SuperNode too: Flower waits for the answer forever.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.task_pb2 import Task as PendingTask
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from flwr_distill.flower.lines import module_of_line
from flwr_distill.node.child import Child, ChildDiedError, Sandbox, TooMuchKeptError
from flwr_distill.node.device import UnfitError
from flwr_distill.node.door import DOOR, door_from_inside, open_door
from flwr_distill.node.notes import Notes, shortened
from flwr_distill.node.pace import Pace
from flwr_distill.node.packages import installed_packages

appio: Any = module_of_line("node", "appio")
GRACE = 30.0
"""Seconds beyond a message's time-to-live until its child is killed; a late child reports it."""

_MAX_TTL = 86_400.0
_CHECK_EVERY = 1.0
"""Seconds between checks of the task and the app's disk use; the disk is measured less often."""
_MESSAGE_TIMEOUT = 10.0
"""Seconds that a task's message may arrive after the task."""


class TaskEndedError(Exception):
    """The run of a task has ended."""


class UnanswerableError(Exception):
    """A task can be neither finished nor answered with an error."""


class Executor:
    """Claims a SuperNode's tasks, one after the other, and has the child run them.

    `api` is an `AppIo` of the installed line, `sandboxes` a `node.run_sandbox.RunSandboxes`.
    Reports are ``("worker", pid)`` when a child starts; ``("device", name)`` and ``("ready", pid)``
    when it is warm; ``("released", pid)`` when it was ended after `release_after` idle seconds.
    """

    def __init__(
        self,
        api: Any,
        child_arguments: list[str],
        *,
        sandboxes: Any = None,
        report: Notes | None = None,
        release_after: float = 120.0,
        keep_warm: bool = False,
    ) -> None:
        self._api = api
        self._child_arguments = child_arguments
        self._sandboxes = sandboxes
        self._report = report
        self._release_after = release_after
        self._keep_warm = keep_warm
        self._packages = installed_packages()
        self._pace = Pace(busy=0.02, idle=0.25, generator=random.Random())
        # Started at once, even if not kept warm: it shows whether the node's device works.
        self._child: Child | None = self._start_child(self._sandbox_of_no_run())

    def serve(self) -> None:
        """Serve tasks until one cannot be answered, or a child cannot start."""
        while True:
            self._check_idle_child()
            if (claim := self._api.claim()) is None:
                time.sleep(self._pace.draw())
                continue
            self._serve_task(*claim)
            self._pace.worked()

    def close(self) -> None:
        """Kill the child."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _sandbox_of_no_run(self) -> Sandbox | None:
        return None if self._sandboxes is None else self._sandboxes.of_no_run()

    def _start_child(self, sandbox: Sandbox | None) -> Child:
        # A nursery has imported modules from before the latest installation.
        forked = installed_packages() == self._packages
        child = Child(self._child_arguments, sandbox, forked=forked)
        self._send_report("worker", child.pid)
        return child

    def _replace_child(self, sandbox: Sandbox | None) -> Child:
        self.close()
        self._child = self._start_child(sandbox)
        return self._child

    def _release_child(self, child: Child) -> None:
        self.close()
        self._send_report("released", child.pid)

    def _send_report(self, kind: str, value: int | str) -> None:
        if self._report is not None:
            self._report.send(kind, value)

    def _check_idle_child(self) -> None:
        if (child := self._child) is None:
            return
        try:
            while child.has_note():
                self._handle_note(child, *child.note(timeout=GRACE))
            child.check_disk()
        except TooMuchKeptError:
            self._release_child(child)
            return
        except ChildDiedError:
            if not child.ready:
                raise
            child = self._child = self._start_child(child.sandbox)
        if self._pace.idle_for <= self._release_after:
            return
        if not self._keep_warm and child.ready:
            self._release_child(child)
        elif self._keep_warm and child.bundle is not None:
            self._replace_child(self._sandbox_of_no_run())

    def _handle_note(self, child: Child, kind: str, code: int, reason: str) -> None:
        if kind == "unfit":
            raise UnfitError(reason)
        if kind == "ready":
            child.ready = True
            self._send_report("device", reason)
            self._send_report("ready", child.pid)

    def _serve_task(self, token: str, pending: PendingTask) -> None:
        task = _Task(self._api, token)
        try:
            with task.heartbeats():
                message, tree = task.pull_header()
                if error := self._run(pending, task, tree, message.metadata.ttl):
                    task.answer(message, error)
        except appio.REFUSED as error:
            if not task.has_ended():
                reason = f"the SuperNode refused to serve a task: {error}"
                raise UnanswerableError(reason) from error

    def _child_for(self, pending: PendingTask) -> Child:
        """The child, or a fresh one where it cannot serve the task; OSError without a sandbox."""
        child, run_id, bundle = self._child, pending.run_id, pending.fab_hash
        sandbox = None if self._sandboxes is None else self._sandboxes.of_run(run_id, bundle)
        if (
            child is None
            or child.bundle not in (None, bundle)
            or child.sandbox != sandbox
            or (child.run_id != run_id and child.packages != installed_packages())
        ):
            child = self._replace_child(sandbox)
        child.bundle, child.run_id = bundle, run_id
        return child

    def _run(self, pending: PendingTask, task: _Task, tree: ObjectTree, ttl: float) -> Error | None:
        """Have a child run a task; return the error to answer if it failed."""
        pushing = False
        deadline = time.monotonic() + min(ttl, _MAX_TTL) + GRACE
        try:
            child = self._child_for(pending)
        except OSError as error:
            return Error(ErrorCode.CLIENT_APP_CRASHED, f"the app gets no sandbox: {error}")
        try:
            child.hand(task.token, tree.SerializeToString())
            while True:
                if not pushing:  # ending it then would leave its reply half sent
                    _watch(child, task, deadline)
                left = max(0.0, deadline - time.monotonic())
                kind, code, reason = child.note(timeout=left)
                if kind == "done":
                    return None
                if kind == "lost":
                    self._replace_child(child.sandbox)
                if kind in ("failed", "lost"):
                    return Error(code, reason)
                pushing = pushing or kind == "pushing"
                self._handle_note(child, kind, code, reason)
        except TaskEndedError:
            self._replace_child(self._sandbox_of_no_run())  # before the next run needs one
            return None
        except TooMuchKeptError as excess:
            self._release_child(child)
            return Error(ErrorCode.CLIENT_APP_CRASHED, str(excess))
        except ChildDiedError as death:
            if pushing:
                raise UnanswerableError(f"{death}, with its reply half sent") from death
            self._child = self._start_child(child.sandbox)
            return Error(ErrorCode.CLIENT_APP_CRASHED, str(death))


def _watch(child: Child, task: _Task, deadline: float) -> None:
    """Wait for a child's note, while its task continues and its app keeps within its disk space."""
    child.check_disk()
    while (left := deadline - time.monotonic()) > 0 and not child.has_note(min(left, _CHECK_EVERY)):
        child.check_disk()
        if task.has_ended():
            raise TaskEndedError


class _Task:
    def __init__(self, api: Any, token: str) -> None:
        self.token = token
        self._calls = api.calls(token)

    def has_ended(self) -> bool:
        return bool(appio.has_ended(self._calls))

    @contextmanager
    def heartbeats(self) -> Iterator[None]:
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

    def pull_header(self) -> tuple[Message, ObjectTree]:
        """Pull the task's message without content, and the content's object tree."""
        # A SuperNode creates the task first and stores its message after that.
        deadline = time.monotonic() + _MESSAGE_TIMEOUT
        while (response := appio.pull_message(self._calls)) is None:
            if time.monotonic() > deadline:
                reason = "the SuperNode refused to serve a task: its message is gone"
                raise UnanswerableError(reason)
            time.sleep(0.02)
        return message_from_proto(response.messages_list[0]), response.message_object_trees[0]

    def answer(self, message: Message, error: Error) -> None:
        reply = Message(error, reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        request = appio.messages.PushAppMessagesRequest(
            messages_list=[message_to_proto(reply)], message_object_trees=[get_object_tree(reply)]
        )
        response = self._calls.PushMessages(request)
        objects = get_all_nested_objects(reply)
        for object_id in response.objects_to_push:
            content = objects[object_id].deflate()
            part = PushObjectRequest(
                run_id=message.metadata.run_id, object_id=object_id, object_content=content
            )
            if hasattr(response, "session_id"):  # newer Flowers bind an object to its sender
                part.session_id = response.session_id
            self._calls.PushObject(part)
        output = appio.messages.PushTaskOutputRequest(
            sub_status=SubStatus.FAILED, details=error.reason or ""
        )
        self._calls.PushTaskOutput(output)


def main() -> None:
    """Run an executor beside a SuperNode that was started with `--isolation process`."""
    parser = argparse.ArgumentParser(prog="flwr_distill.flower.executor", description=main.__doc__)
    parser.add_argument("--appio-address", required=True, help="the SuperNode's API for apps")
    parser.add_argument("--root-certificates", type=Path, help="for TLS on this API")
    parser.add_argument("--secret-file", type=Path, help="what claims of tasks are signed with")
    parser.add_argument("--preload", action="append", default=[], help="module to import early")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--place", type=int, default=0, help="of GPUs used alike, which to take")
    parser.add_argument("--release-after", type=float, default=120.0, help="seconds")
    parser.add_argument("--keep-warm", action="store_true", help="never be without a child")
    parser.add_argument("--report-fd", type=int, help="used by flwr-distill node")
    parser.add_argument("--sandbox", type=json.loads, help="node.sandbox.sandbox_command, as JSON")
    parser.add_argument("--state-dir", type=Path, help="with --sandbox: the node's")
    parser.add_argument("--most-disk", type=int, help="with --sandbox: bytes that an app may keep")
    args = parser.parse_args()
    child_address, sandboxes = args.appio_address, None
    if args.sandbox is not None:
        from flwr_distill.node.run_sandbox import (
            RunSandboxes,  # here: imports `links`, and workers are forked
        )

        sandboxes = RunSandboxes(args.sandbox, args.state_dir, args.most_disk)
        open_door(args.state_dir / DOOR, args.appio_address)
        child_address = door_from_inside()
    child_arguments = ["--appio-address", child_address, "--device", args.device]
    child_arguments += ["--place", str(args.place)]
    child_arguments += [f"--preload={module}" for module in args.preload]
    certificates: bytes | None = None
    if args.root_certificates is not None:
        child_arguments += ["--root-certificates", str(args.root_certificates)]
        certificates = args.root_certificates.read_bytes()
    report = Notes.of(args.report_fd) if args.report_fd is not None else None
    executor = Executor(
        appio.AppIo(
            args.appio_address,
            certificates,
            args.secret_file.read_bytes() if args.secret_file else None,
        ),
        child_arguments,
        sandboxes=sandboxes,
        report=report,
        release_after=args.release_after,
        keep_warm=args.keep_warm,
    )
    try:
        executor.serve()
    except UnfitError as error:
        if report is not None:
            report.send("unfit", shortened(str(error)))
        sys.exit(str(error))
    except (UnanswerableError, ChildDiedError) as error:
        sys.exit(f"executor: {error}")
    finally:
        executor.close()


if __name__ == "__main__":
    main()
