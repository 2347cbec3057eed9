"""Starts the executor's child (`worker`) and talks to it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing import Pipe

from node.nursery import NURSERY, WORKER
from node.packages import installed_packages
from node.processes import kill_group, start_bound


class ChildDiedError(Exception):
    """The child ended, on its own or because it hung."""


class Child:
    """A worker process and the pipe for notes to and from it.

    `bundle` is the hash of the app bundle whose tasks it serves and `run_id` the run of the last
    one, None before the first task; `ready` says whether it is warm; `packages` are those that were
    installed when it started.

    Parameters
    ----------
    arguments : sequence of str
        Of `node.flower.worker`.
    box : sequence of str
        Command that boxes in the one behind it (`node.sandbox`); empty for none.
    forked : bool (default: True)
        Let a nursery fork it, if there is one; such a child has what the nursery had imported.
    """

    def __init__(
        self, arguments: Sequence[str], box: Sequence[str] = (), *, forked: bool = True
    ) -> None:
        self.bundle: str | None = None
        self.run_id: int | None = None
        self.packages = installed_packages()
        self.ready = False
        self._notes, child_notes = Pipe()
        dropped = () if forked else (NURSERY,)
        with child_notes:
            self._process = start_bound(
                [
                    *box,
                    *(sys.executable, "-P", "-m", WORKER),
                    *arguments,
                    *("--notes-fd", str(child_notes.fileno())),
                ],
                env={name: value for name, value in os.environ.items() if name not in dropped},
                pass_fds=[child_notes.fileno()],
            )

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def hand(self, token: str, tree: bytes) -> None:
        """Give the child a task: its token, and its message's serialized object tree."""
        try:
            self._notes.send((token, tree))
        except OSError as error:
            raise ChildDiedError(self._how_it_ended()) from error

    def has_note(self) -> bool:
        """Whether `note` would return or raise without waiting."""
        return self._notes.poll()

    def note(self, timeout: float) -> tuple[str, int, str]:
        """Wait for the child's next note: its kind, an error code, a reason.

        A child that is silent for `timeout` seconds is killed.
        """
        try:
            if not self._notes.poll(timeout):
                self.kill()
                raise ChildDiedError("the ClientApp process hung, and was killed")
            kind, code, reason = self._notes.recv()
        except (EOFError, OSError) as error:
            raise ChildDiedError(self._how_it_ended()) from error
        return kind, code, reason

    def kill(self) -> None:
        """Kill the child's process group."""
        kill_group(self._process)
        self._notes.close()

    def _how_it_ended(self) -> str:
        self.kill()
        code = self._process.returncode
        if code is None:
            return "the ClientApp process cannot be killed"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the ClientApp process died: {how}"
