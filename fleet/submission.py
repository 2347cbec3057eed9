"""Submits a run with ``flwr run`` and follows it to its end."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleet.superlink import Control

_STARTED_RUN = re.compile(r"Successfully started run (\d+)")


@dataclass(frozen=True)
class RunOutcome:
    """Final status of a run (``finished:completed``, ``:failed`` or ``:stopped``) and its log."""

    run_id: int
    status: str
    lines: list[str] = field(repr=False)

    @property
    def completed(self) -> bool:
        """Whether the run finished without an error."""
        return self.status == "finished:completed"


class RunError(RuntimeError):
    """A run could not be submitted, or did not end in time."""


def submit(
    app_dir: Path,
    connection: str,
    run_config: str,
    *,
    env: Mapping[str, str],
    control: Callable[[], Control],
    on_line: Callable[[str], None] | None,
    timeout: float,
) -> RunOutcome:
    """Submit an app, pass every line of its log to `on_line`, and return how it ended.

    `run_config` is as for ``flwr run --run-config``, `env` must let ``flwr`` find the connection,
    `control` opens the SuperLink's Control API. A run that takes longer than `timeout` seconds is
    stopped, with a `RunError`.
    """
    command = ["flwr", "run", str(app_dir), connection, "--stream"]
    if run_config:
        command += ["--run-config", run_config]
    lines: list[str] = []
    timed_out = threading.Event()
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )

    def give_up() -> None:
        timed_out.set()
        process.kill()

    timer = threading.Timer(timeout, give_up)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if on_line is not None:
                on_line(lines[-1])
        process.wait()
    finally:
        timer.cancel()
        process.kill()
        process.wait()

    run_ids = [int(match[1]) for line in lines if (match := _STARTED_RUN.search(line))]
    if not run_ids:
        raise RunError("the run was not accepted: " + "\n".join(lines[-20:]))
    with control() as link:
        if timed_out.is_set():
            link.stop_run(run_ids[0])
            raise RunError(
                f"run {run_ids[0]} was stopped after {timeout:.0f} s: see the SuperLink's log, "
                "or allow more with timeout="
            )
        return RunOutcome(run_ids[0], link.run_status(run_ids[0]), lines)
