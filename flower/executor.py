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
import sys
import time
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from flwr_distill.flower.encoding import encoded_bytes
from flwr_distill.flower.lines import module_of_line
from flwr_distill.flower.payload import Payload
from flwr_distill.flower.task import Task, TaskEndedError, UnanswerableError, Work
from flwr_distill.node import log_lines
from flwr_distill.node.bell import Bell
from flwr_distill.node.child import Child, ChildDiedError, Sandbox, TooMuchKeptError
from flwr_distill.node.device import UnfitError
from flwr_distill.node.kernel import trim_heap
from flwr_distill.node.notes import Notes, shortened
from flwr_distill.node.packages import installed_packages

appio: Any = module_of_line("node", "appio")
GRACE = 30.0
"""Seconds beyond a message's time-to-live until its child is killed; a late child reports it."""

_MAX_TTL = 86_400.0
_CHECK_EVERY = 1.0
"""Seconds between checks of the task and the app's disk use; the disk is measured less often."""
_POLL = 0.1
"""Seconds between polls for a task without a bell, and for the note that a child is ready."""


class Executor:
    """Claims a SuperNode's tasks, one after the other, and has the child run them.

    `api` is an `AppIo` of the installed line, `guarding` a `flower.guarding.Guarding`, `codec` a
    `node.codec.NodeCodec`, and `sandboxes` a `node.run_sandbox.RunSandboxes`.
    Reports are ``("worker", pid)`` when a child starts; ``("device", name)`` and ``("ready", pid)``
    when it is warm; ``("released", pid)`` when it was ended after `release_after` idle seconds.
    At its `bell` the SuperNode rings for each task; without one it polls.
    """

    def __init__(
        self,
        api: Any,
        child_arguments: list[str],
        guarding: Any,
        codec: Any,
        *,
        sandboxes: Any = None,
        report: Notes | None = None,
        bell: Bell | None = None,
        release_after: float = 120.0,
        keep_warm: bool = False,
    ) -> None:
        self._api = api
        self._child_arguments = child_arguments
        self._guarding = guarding
        self._codec = codec
        self._sandboxes = sandboxes
        self._report = report
        self._bell = bell
        self._release_after = release_after
        self._keep_warm = keep_warm
        self._packages = installed_packages()
        self._last_work = time.monotonic()
        # Started at once, even if not kept warm: it shows whether the node's device works.
        self._child: Child | None = self._start_child(self._sandbox_of_no_run())

    def serve(self) -> None:
        """Serve tasks until one cannot be answered, or a child cannot start."""
        while True:
            self._check_idle_child()
            if (token := self._api.claim()) is None:
                self._wait()
                continue
            self._serve_task(token)
            trim_heap()  # of the message and its reply
            self._last_work = time.monotonic()

    def _wait(self) -> None:
        """Wait for a task, or until it is time to see after the child."""
        if self._bell is None:
            time.sleep(_POLL)
        else:
            starts = self._child is not None and not self._child.ready
            self._bell.wait(_POLL if starts else _CHECK_EVERY)

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
        if time.monotonic() - self._last_work <= self._release_after:
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

    def _serve_task(self, token: str) -> None:
        from flwr_distill.base import json_lines  # here: as in `main`

        task = Task(self._api, token)
        try:
            with task.heartbeats():
                work = task.pull()
                context = work.context
                json_lines.work_on(context.run_id, work.header.metadata.message_id)
                with suppress(TaskEndedError):
                    reply, num_bytes = self._reply(task, work)
                    if coded := self._codec.encode(reply):
                        leaving = RecordDict({**reply.content, **coded})
                        num_bytes = encoded_bytes(Message(leaving, reply_to=work.header))
                    released = self._guarding.release(reply, num_bytes)
                    task.push(self._codec.finish(released, coded, work.header), context)
        except appio.REFUSED as error:
            if not task.has_ended():
                reason = f"the SuperNode refused to serve a task: {error}"
                raise UnanswerableError(reason) from error

    def _reply(self, task: Task, work: Work) -> tuple[Message, int]:
        """The guard's reply to a message, or the app's, and the bytes of its objects."""
        self._codec.forget()
        try:
            payload = work.payload(task.pull_contents(work))
            message = payload.message()
            heard = self._guarding.hear(message)
            if self._codec.receive(message) or heard:
                payload = payload.replaced(message)
        except appio.REFUSED:
            raise
        except Exception as error:  # hostile objects may raise any
            return self._guarding.refuse_unreadable(work.header, error), 0
        if refusal := self._guarding.admit(message, work.run, work.bundle):
            return refusal, 0
        parts = payload.parts()
        del message, payload  # the child has them in a moment
        try:
            return self._run(task, work, parts)
        except _FailedError as failure:
            return Message(Error(failure.code, failure.reason), reply_to=work.header), 0

    def _child_for(self, work: Work) -> Child:
        """The child, or a fresh one where it cannot do the work; OSError without a sandbox."""
        child, run_id, bundle = self._child, work.context.run_id, work.bundle.hash_str
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

    def _run(self, task: Task, work: Work, parts: Iterable[bytes]) -> tuple[Message, int]:
        """Have a child do the work; its reply, and its objects' bytes."""
        deadline = time.monotonic() + min(work.header.metadata.ttl, _MAX_TTL) + GRACE
        try:
            child = self._child_for(work)
        except OSError as error:
            raise _FailedError(f"the app gets no sandbox: {error}") from error
        try:
            child.hand(parts)
            while True:
                _watch(child, task, deadline)
                left = max(0.0, deadline - time.monotonic())
                kind, code, reason = child.note(timeout=left)
                if kind == "done":
                    return _decoded(child, work.context)
                if kind == "lost":
                    self._replace_child(child.sandbox)
                if kind in ("failed", "lost"):
                    raise _FailedError(reason, code)
                self._handle_note(child, kind, code, reason)
        except TaskEndedError:
            self._replace_child(self._sandbox_of_no_run())  # before the next run needs one
            raise
        except TooMuchKeptError as excess:
            self._release_child(child)
            raise _FailedError(str(excess)) from excess
        except ChildDiedError as death:
            self._child = self._start_child(child.sandbox)
            raise _FailedError(str(death)) from death


class _FailedError(Exception):
    """A child has not replied to a message."""

    def __init__(self, reason: str, code: int = ErrorCode.CLIENT_APP_CRASHED) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


def _decoded(child: Child, context: Context) -> tuple[Message, int]:
    """A child's reply; its app's state goes into the context."""
    with child.taking() as parts:
        payload = Payload.from_parts(parts)
        parts.clear()
        num_bytes = payload.num_bytes
        reply = payload.message(keep=False)
        context.state = payload.context.state
        return reply, num_bytes


def _watch(child: Child, task: Task, deadline: float) -> None:
    """Wait for a child's note, while its task continues and its app keeps within its disk space."""
    child.check_disk()
    while (left := deadline - time.monotonic()) > 0 and not child.has_note(min(left, _CHECK_EVERY)):
        child.check_disk()
        if task.has_ended():
            raise TaskEndedError


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
    parser.add_argument("--bell-fd", type=int, help="where the SuperNode rings for each task")
    parser.add_argument("--state-dir", type=Path, required=True, help="the node's, with its config")
    parser.add_argument("--loopback", action="store_true", help="the node's SuperLink is on it")
    parser.add_argument("--policy", required=True, help="the node's, as JSON")
    parser.add_argument("--sandbox", type=json.loads, help="node.sandbox.sandbox_command, as JSON")
    parser.add_argument("--most-disk", type=int, help="with --sandbox: bytes that an app may keep")
    args = parser.parse_args()
    # Here: these import other rooms, and workers are forked from a process with this module.
    from flwr_distill.flower.app_config import run_config_of
    from flwr_distill.flower.guarding import Guarding
    from flwr_distill.node.codec import NodeCodec
    from flwr_distill.node.guard import Guard
    from flwr_distill.node.policy import Policy
    from flwr_distill.node.run_sandbox import RunSandboxes
    from flwr_distill.node.settings import NODE_CONFIG
    from flwr_distill.storage.store import DURABLE

    policy = Policy.model_validate_json(args.policy, by_alias=True)
    settings = tomllib.loads((args.state_dir / NODE_CONFIG).read_text(encoding="utf-8"))
    log_lines.begin("executor")
    sandboxes = args.sandbox and RunSandboxes(args.sandbox, args.state_dir, args.most_disk)
    child_arguments = ["--device", args.device, "--place", str(args.place)]
    child_arguments += [f"--preload={module}" for module in args.preload]
    report = Notes.of(args.report_fd) if args.report_fd is not None else None
    executor = Executor(
        appio.AppIo(
            args.appio_address,
            args.root_certificates.read_bytes() if args.root_certificates else None,
            args.secret_file.read_bytes() if args.secret_file else None,
        ),
        child_arguments,
        Guarding(Guard(policy, args.state_dir, settings, run_config_of)),
        NodeCodec(
            args.state_dir,
            durable=bool(settings.get(DURABLE, True)),
            loopback=args.loopback,
        ),
        sandboxes=sandboxes,
        report=report,
        bell=Bell(args.bell_fd) if args.bell_fd is not None else None,
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
