"""Run a part as a process with a time limit."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.parts import Part, Place

PASSED = "passed"
GRACE = 5.0
"""Seconds between a request to end and the end."""


@dataclass(frozen=True)
class Outcome:
    """How a part ended.

    Parameters
    ----------
    result : str
        ``passed``, or what went wrong.
    seconds : float
        That it took.
    figures : dict[str, Any]
        What it wrote, also if it failed later.
    """

    result: str
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)


def run_part(part: Part, place: Place, out: Path) -> Outcome:
    """Run a part, print its output with its name and keep it in `out`."""
    prefix = f"{part.name} | " if place.gpu else f"{part.name}, small version on the CPU | "
    print(f"{prefix}starts, limit {part.limit:.0f} s", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures"
        result = _result(part, [sys.executable, *part.command(place, file)], prefix, out)
        seconds = time.monotonic() - start
        figures: dict[str, Any] = {}
        try:
            if file.exists():
                figures = part.read(file)
        except Exception as error:  # of a part that was stopped while it wrote, for instance
            result = f"{result}; its results cannot be read: {error!r}"
    if not figures and result == PASSED:
        result = "failed: it wrote no results"
    print(f"{prefix}{result}, {seconds:.0f} s", flush=True)
    return Outcome(result, seconds, figures)


def _result(part: Part, command: list[str], prefix: str, out: Path) -> str:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "120"},
        start_new_session=True,
        # Else it ignores Ctrl-C where this process does: in the background, under nohup.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        _end(process)

    timer = threading.Timer(part.limit, stop)
    timer.start()
    try:
        assert process.stdout is not None
        with (out / f"{part.name}.log").open("w", encoding="utf-8") as log:
            for line in process.stdout:
                log.write(line)
                print(prefix + line.rstrip("\n"), flush=True)
        code = process.wait()
    finally:
        timer.cancel()
        _end(process)
    if stopped.is_set():
        return f"stopped at its limit of {part.limit:.0f} s"
    return PASSED if code == 0 else f"failed with exit code {code}"


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and those that it started: as Ctrl-C does, so that it writes what it has."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
