"""The executor's hold on its child, `node.worker`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe

from node.processes import kill_group, start_bound


class ChildDiedError(Exception):
    """The child ended on its own; the text says how."""


class Child:
    """A worker process and the notes that go to and fro.

    Parameters
    ----------
    arguments : Sequence[str]
        Arguments of `node.worker`, but for the notes' file descriptor.
    env : Mapping[str, str] | None (default: None)
        More environment variables.

    Attributes
    ----------
    bundle : str | None
        Hash of the app bundle that the child has been given work of, if any.
    ready : bool
        Whether the child has said that it is warm.
    """

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.bundle: str | None = None
        self.ready = False
        self._notes, theirs = Pipe()
        with theirs:
            self._process = start_bound(
                [
                    *(sys.executable, "-P", "-m", "node.worker"),
                    *arguments,
                    *("--notes-fd", str(theirs.fileno())),
                ],
                env={**os.environ, **(env or {})},
                pass_fds=[theirs.fileno()],
            )

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def hand(self, token: str, tree: bytes) -> None:
        """Give the child a task: its token, and its message's serialized object tree.

        Raises
        ------
        ChildDiedError
            If the child has ended.
        """
        try:
            self._notes.send((token, tree))
        except OSError as error:
            raise ChildDiedError(self._how_it_ended()) from error

    def has_note(self) -> bool:
        """Whether `note` would return, or raise, at once."""
        return self._notes.poll()

    def note(self) -> tuple[str, int, str]:
        """Wait for the child's next note: its kind, an error code, a reason.

        Raises
        ------
        ChildDiedError
            If the child has ended.
        """
        try:
            kind, code, reason = self._notes.recv()
        except (EOFError, OSError) as error:
            raise ChildDiedError(self._how_it_ended()) from error
        return kind, code, reason

    def kill(self) -> None:
        """Kill the child and whatever it started."""
        kill_group(self._process)
        self._notes.close()

    def _how_it_ended(self) -> str:
        self.kill()
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the ClientApp process died: {how}"
