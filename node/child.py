"""Starts the executor's child (`worker`) and talks to it."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from flwr_distill.node.log_lines import OutputQuota, titled_output
from flwr_distill.node.notes import Notes, NotesError
from flwr_distill.node.nursery import NURSERY, WORKER
from flwr_distill.node.packages import installed_packages
from flwr_distill.node.payload import PayloadError, PayloadFile
from flwr_distill.node.processes import kill_group, start_bound
from flwr_distill.node.remedies import KILLED

_FIRST_NOTES = frozenset({"ready", "unfit"})
_TASK_NOTES = frozenset({"done", "failed", "lost"})
_MAX_CODE = 1 << 31


class ChildDiedError(Exception):
    """The child ended, on its own or because it was killed: it hung, or broke the protocol."""


class TooMuchKeptError(ChildDiedError):
    """The child was killed because its app keeps too much on disk."""


class Sandbox(Protocol):
    """The sandbox of a run's app, as `node.run_sandbox` makes them."""

    @property
    def command(self) -> Sequence[str]:
        """Runs the command behind it in the sandbox."""

    @property
    def title(self) -> str:
        """Begins each line that is printed in it."""

    @property
    def quota(self) -> OutputQuota:
        """Bounds what of that goes to the log."""

    def excess(self) -> str:
        """Why its app keeps too much on disk; empty if it does not."""


class Child:
    """A worker process and the notes to and from it, which are those of a hostile app.

    `bundle` is the hash of the bundle whose tasks it serves, `run_id` the run of its last task,
    both None before the first; `ready`: it is warm; `packages` were installed when it started.
    Without a sandbox its output is the node's, which it can read and cut, unless the log is JSON.
    With `forked` a nursery forks it if there is one, with its imports.
    """

    def __init__(
        self, arguments: Sequence[str], sandbox: Sandbox | None = None, *, forked: bool = True
    ) -> None:
        self.sandbox = sandbox
        self.bundle: str | None = None
        self.run_id: int | None = None
        self.packages = installed_packages()
        self.ready = False
        self._notes, child_notes = Notes.pair()
        self._tasks, self._replies = PayloadFile.create(), PayloadFile.create()
        passed = {
            "--notes-fd": child_notes.fileno(),
            "--tasks-fd": self._tasks.fileno(),
            "--replies-fd": self._replies.fileno(),
        }
        dropped = () if forked else (NURSERY,)
        with child_notes, _output_of(sandbox) as output:
            self._process = start_bound(
                [
                    *(() if sandbox is None else sandbox.command),
                    *(sys.executable, "-P", "-m", WORKER),
                    *arguments,
                    *(word for name, fd in passed.items() for word in (name, str(fd))),
                ],
                env={name: value for name, value in os.environ.items() if name not in dropped},
                pass_fds=[*passed.values()],
                output=output,
            )

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def hand(self, parts: Iterable[bytes]) -> None:
        """Give the child a task."""
        try:
            self._tasks.put(parts)
        except OSError as error:
            raise self._killed(f"cannot be handed its message ({error})") from error
        try:
            self._notes.send("task")
        except TimeoutError as error:
            raise self._killed("hung") from error
        except OSError as error:
            raise ChildDiedError(self._how_it_ended()) from error

    @contextmanager
    def taking(self) -> Iterator[list[bytes]]:
        """Take its reply; the child is killed if it cannot be read, or if the block raises."""
        try:
            yield self._replies.take()
        except Exception as error:  # of others' errors the kind alone: an app may write the text
            why = error if isinstance(error, PayloadError) else type(error).__name__
            raise self._killed(f"sent its node something malformed ({why})") from error

    def has_note(self, timeout: float = 0.0) -> bool:
        """Whether `note` would return or raise without waiting, at latest after `timeout` s."""
        return self._notes.is_waiting(timeout)

    def note(self, timeout: float) -> tuple[str, int, str]:
        """Wait for the child's next note: its kind, an error code, a reason.

        A child that is silent for `timeout` seconds is killed, and so is one that sends anything
        else than a note of its state: the first one, before it runs an app, and those of tasks.
        """
        try:
            match self._notes.receive(timeout):
                case [str(kind), int(code), str(reason)] if (
                    kind in (_TASK_NOTES if self.ready else _FIRST_NOTES)
                    and 0 <= code < _MAX_CODE
                    and _is_text(reason)
                ):
                    return kind, code, reason
            raise NotesError("a note of no known kind")
        except TimeoutError as error:
            raise self._killed("hung") from error
        except NotesError as error:
            raise self._killed(f"sent its node something malformed ({error})") from error
        except (EOFError, OSError) as error:
            raise ChildDiedError(self._how_it_ended()) from error

    def check_disk(self) -> None:
        """Kill the child and raise `TooMuchKeptError` if its app keeps too much on disk."""
        if self.sandbox is not None and (excess := self.sandbox.excess()):
            self.kill()
            raise TooMuchKeptError(f"the ClientApp process was killed: {excess}")

    def kill(self) -> None:
        """Kill the child's process group."""
        kill_group(self._process)
        for end in (self._notes, self._tasks, self._replies):
            end.close()

    def _killed(self, why: str) -> ChildDiedError:
        self.kill()
        return ChildDiedError(f"the ClientApp process {why}, and was killed")

    def _how_it_ended(self) -> str:
        self.kill()
        code = self._process.returncode
        if code is None:
            return "the ClientApp process cannot be killed"
        how = f"signal {_signal_name(-code)}" if code < 0 else f"exit code {code}"
        remedy = f" ({KILLED})" if code == -signal.SIGKILL else ""
        return f"the ClientApp process died: {how}{remedy}"


def _output_of(sandbox: Sandbox | None) -> AbstractContextManager[int | None]:
    """Where a child prints; None for the node's own output."""
    from flwr_distill.base import json_lines  # here: what a nursery imports, apps cannot bring

    if sandbox is not None:
        return titled_output(sandbox.title, sandbox.quota)
    return titled_output("app", OutputQuota(math.inf)) if json_lines.wanted() else nullcontext()


def _is_text(reason: str) -> bool:
    """Whether UTF-8 can encode a text, as an error reply must."""
    try:
        reason.encode()
    except UnicodeEncodeError:
        return False
    return True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)
