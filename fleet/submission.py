"""Submits a run to a SuperLink and follows it to its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from flwr_distill.flower.control import Control, OutageError, RunStatus, SuperLinkError
from flwr_distill.task.errors import ReportedError
from flwr_distill.task.settings import RunConfigValue

_STREAM_SECONDS = 60.0
"""A log's stream is renewed after this time, so that a dead connection is noticed."""
_LAST_SECONDS = 10.0
"""For the rest of the log of a run that is over."""

_PAUSE = 0.5
_AWAY = (
    "WARNING :     The SuperLink does not answer: waiting for it (start it again if it has ended)"
)

KILLED = (
    "its ServerApp ended without a word: was it killed, or out of memory? (see that machine's log, "
    'and continue with resume = "latest")'
)
_NO_REASON = ("No heartbeat received", "Task failed with unknown error")
"""Begin what Flower says of a run whose process ended without a word."""


def gave_no_reason(details: str) -> bool:
    """Whether Flower's text on a failed run says nothing of its cause; `KILLED` then says more."""
    return details.startswith(_NO_REASON)


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended (``finished:completed``, ``:failed`` or ``:stopped``), why, and its log."""

    run_id: int
    status: str
    lines: list[str] = field(repr=False)
    details: str = ""

    @property
    def completed(self) -> bool:
        """Whether the run finished without an error."""
        return self.status == "finished:completed"


class RunError(ReportedError):
    """A run could not be submitted, or did not end in time."""


def submit(
    app_dir: Path,
    run_config: Mapping[str, RunConfigValue],
    *,
    control: Callable[[], Control],
    on_line: Callable[[str], None] | None = None,
    timeout: float = math.inf,
) -> RunOutcome:
    """Submit a Flower app, pass every line of its log to `on_line`, and return how it ended.

    The first line is ours and has the run's id. `control` opens the SuperLink's Control API; it is
    called again after an outage, so it should wait. A run that takes over `timeout` seconds is
    stopped.

    Raises
    ------
    RunError
        If the run is refused, or takes too long.
    SuperLinkError
        From `control`, if the SuperLink does not answer.
    """
    from flwr_distill.flower.bundle import app_bundle  # here: imports Flower

    try:
        bundle = app_bundle(app_dir, run_config)
        with control() as link:
            run_id = link.start_run(bundle, run_config)
    except (ValueError, SuperLinkError) as error:
        raise RunError(str(error)) from error
    lines: list[str] = []

    def add(line: str) -> None:
        lines.append(line)
        if on_line is not None:
            on_line(line)

    add(f"started run {run_id}")
    status = follow(run_id, control, add, timeout)
    return RunOutcome(run_id, status.status, lines, status.details)


def follow(
    run_id: int,
    control: Callable[[], Control],
    add: Callable[[str], None],
    timeout: float = math.inf,
) -> RunStatus:
    """Pass on the lines of a run's log until the run is over; raises as `submit`."""
    deadline = time.monotonic() + timeout
    latest, unfinished = 0.0, ""

    def read(link: Control, seconds: float) -> None:
        nonlocal latest, unfinished
        for text, mark in link.log(run_id, latest, seconds):
            latest = mark
            *lines, unfinished = (unfinished + text).split("\n")
            for line in lines:
                add(line)

    is_away = False
    while True:
        with _opened(control, run_id) as link:
            try:
                read(link, max(0.1, min(_STREAM_SECONDS, deadline - time.monotonic())))
                status = link.run_status(run_id)
            except OutageError:
                if not is_away:
                    add(_AWAY)
                is_away = True
                time.sleep(_PAUSE)
                continue
            is_away = False
            if status.finished:
                with suppress(SuperLinkError):  # what came between the end of the stream and this
                    read(link, _LAST_SECONDS)
                break
            if time.monotonic() > deadline:
                link.stop_run(run_id)
                raise RunError(
                    f"was stopped after {timeout:.0f} s",
                    where=f"run {run_id}",
                    remedy="see the SuperLink's log, or allow more with timeout=",
                )
    if unfinished:
        add(unfinished)
    return status


def _opened(control: Callable[[], Control], run_id: int) -> Control:
    try:
        return control()
    except SuperLinkError as error:
        raise SuperLinkError(
            "its SuperLink is gone",
            where=f"run {run_id}",
            remedy="start it again with the same --database, if it has one: the run continues, and "
            f"`flwr-distill logs {run_id}` follows it",
        ) from error
