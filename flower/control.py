"""A SuperLink's Control API, through which runs start and nodes register, on any line of Flower."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, Self

from flwr_distill.flower.lines import module_of_line
from flwr_distill.task.errors import ReportedError
from flwr_distill.task.settings import RunConfigValue


class SuperLinkError(ReportedError):
    """The SuperLink does not answer, or refuses."""


class OutageError(SuperLinkError):
    """The SuperLink stopped during a call; it may come back."""


class UnknownRunError(SuperLinkError):
    """The SuperLink does not know a run."""


@dataclass(frozen=True)
class RunStatus:
    """Status of a run, ``finished:completed`` for instance, and Flower's text on a failure."""

    status: str
    details: str = ""

    @property
    def finished(self) -> bool:
        """Whether the run is over: completed, failed or stopped."""
        return self.status.startswith("finished")


@dataclass(frozen=True)
class KnownRun:
    """A run that a SuperLink knows; times are in seconds since 1970, 0 before they have come.

    `resumes` is its setting ``resume``, empty without one; None if the line shows no settings.
    """

    run_id: int
    status: RunStatus
    submitted: float
    ended: float = 0.0
    resumes: str | None = None


@dataclass(frozen=True)
class KnownNode:
    """A node that a SuperLink knows: its status, ``online`` for instance, and since when.

    `public_key` is as for OpenSSH; empty where nodes have no keys, or the line does not show them.
    """

    node_id: int
    status: str
    since: float
    public_key: str = ""


@dataclass(frozen=True)
class User:
    """Files (PEM) with which a gate in front of a Control API identifies the caller."""

    certificate: Path
    key: Path


class Control(Protocol):
    """A connection to the Control API of a SuperLink."""

    def __enter__(self) -> Self:
        """Use the connection within the block."""

    def __exit__(self, *error: object) -> None:
        """Close it."""

    def wait(self, timeout: float, *, is_up: Callable[[], bool] = ...) -> None:
        """Wait until the SuperLink answers, for `timeout` seconds at most and while `is_up`."""

    def nodes(self) -> list[KnownNode]:
        """All nodes; those that were unregistered only if the line shows them.

        Raises `OutageError` if no answer comes.
        """

    def start_run(self, bundle: bytes, run_config: Mapping[str, RunConfigValue]) -> int:
        """Start a run of an app bundle with these overrides of its run config; return its id.

        Raises `SuperLinkError` if it is refused, and `OutageError` if no answer comes: the run may
        have started all the same.
        """

    def log(self, run_id: int, after: float, seconds: float) -> Iterator[tuple[str, float]]:
        """Parts of a run's log later than the mark `after`, each with its own mark.

        It ends when the run is over, or after so many seconds; raises as `run_status`.
        """

    def run_status(self, run_id: int, *, settle: float = 0.0) -> RunStatus:
        """Return a run's status; wait up to `settle` seconds for the run to finish.

        Raises `OutageError` if the SuperLink stops, `UnknownRunError` if it does not know the run.
        """

    def runs_with(self, setting: str, value: str) -> list[int]:
        """Ids of the runs that were started with this value of a setting, the latest last.

        Raises `SuperLinkError`; Flower's own command shows no settings.
        """

    def runs(self) -> list[KnownRun]:
        """All runs, the latest last. Raises `OutageError` if no answer comes."""

    def stop_run(self, run_id: int) -> None:
        """Stop a run; raises as `run_status`, and `SuperLinkError` if it is over."""

    def register(self, public_key: str) -> tuple[int, bool]:
        """Register a node's key (OpenSSH); return Flower's node id and whether the key is new."""

    def unregister(self, node_id: int) -> None:
        """Unregister a node: the SuperLink no longer admits its key."""

    def node_id(self, public_key: str) -> int | None:
        """Return Flower's id of the node with this key, if it is registered."""


def open_control(
    address: str,
    root_certificates: Path | None = None,
    user: User | None = None,
    noted: Mapping[str, int] | None = None,
) -> Control:
    """Open a SuperLink's Control API at ``host:port``; without root certificates, without TLS.

    A `user` is for a gate in front of it. Where no folder serves the installed Flower's line,
    Flower's own command does the calls. It shows no keys of nodes: `noted` are the ids of those
    that are registered, by key.
    """
    module: Any = module_of_line("fleet", "superlink")
    control: Control
    if module is not None:
        control = module.Control(address, root_certificates, user)
    else:
        command: Any = import_module("flwr_distill.flower.flwr_command")
        control = command.Control(address, root_certificates, user, noted)
    return control
