"""A run in the queue, and the order in which a user puts one there."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from flwr_distill.task.errors import ReportedError
from flwr_distill.task.settings import RunConfigValue

TOKEN = "queue-id"
"""Setting by which the queue finds a run that it has started."""
DAY = 86400.0
MAX_TIMEOUT = 30 * DAY
MAX_PRIORITY = 100
MAX_CONFIG = 256
"""Settings of a run, and characters of a setting's name."""
MAX_VALUE = 4096
"""Characters of a setting's value."""


class QueueError(ReportedError):
    """The queue refuses, or no queue is served here."""


class State(StrEnum):
    """Where a run in the queue is; after the first three it has ended."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"

    @property
    def ended(self) -> bool:
        """Whether nothing will happen to the run any more."""
        return self not in UNFINISHED


UNFINISHED = (State.WAITING, State.STARTING, State.RUNNING)
Name = Annotated[str, Field(min_length=1, max_length=MAX_CONFIG)]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Value = bool | Integer | float | Annotated[str, Field(max_length=MAX_VALUE)]


class Order(BaseModel):
    """What a user asks for, beside the app bundle.

    Parameters
    ----------
    run_config : dict[str, bool | int | float | str]
        Overrides of the app's settings, by dotted key.
    priority : int (default: 0)
        Runs of higher priority start first, those of equal priority in order of submission.
    after : int | None (default: None)
        Id, in the queue, of a run that must be completed first.
    timeout : float (default: a day)
        Seconds from its start after which the run is stopped.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    run_config: Annotated[dict[Name, Value], Field(max_length=MAX_CONFIG)]
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    after: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT)] = DAY


class QueuedRun(BaseModel):
    """A run in the queue, as everyone may see it; times are in seconds since 1970.

    `position` is 1 for the run that starts next, and 0 once a run has left the line. `since` is
    when its `state` began. `why` says what it waits for, or why it ended as it did.
    """

    id: int
    user: str
    state: State
    position: int
    priority: int
    after: int | None
    timeout: float
    submitted: float
    since: float
    started: float | None
    run_id: str
    why: str


class Entry(BaseModel):
    """A run as its scheduler needs it.

    `stopping` is how it will have ended, once it is stopped. `stopping_since` is when the SuperLink
    was first asked to stop it; 0 before.
    """

    id: int
    state: State
    token: str
    bundle: str
    run_config: dict[str, RunConfigValue]
    timeout: float
    attempts: int
    tried: float
    started: float
    run_id: int
    stopping: State | None
    stopping_since: float
    reason: str
