"""Starts processes that never outlive their parent, and stops them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_DIES_WITHIN = 30.0


def start_bound(
    command: Sequence[str],
    *,
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a command in its own process group; it gets SIGTERM if this process dies.

    The kernel ties it to the *thread* that calls this function: call it from one that lives as long
    as the process should. On systems other than Linux it survives a parent killed with -9. Standard
    output and error are appended to `log`; like `env` and `cwd`, None inherits this process's.
    """
    launcher = [sys.executable, "-P", "-m", "node.processes", str(os.getpid())]
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext() if log is None else log.open("ab") as output:
        return subprocess.Popen(
            [*launcher, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            cwd=cwd,
            pass_fds=pass_fds,
            start_new_session=True,
        )


def stop(processes: Sequence[subprocess.Popen[bytes]], *, grace: float = 8.0) -> None:
    """Send SIGTERM to processes from `start_bound`, then SIGKILL to what remains of their groups.

    `grace` is the time in seconds, for all of them together, between the two signals.
    """
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + grace
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        kill_group(process)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process from `start_bound` and its group with SIGKILL.

    One that the kernel does not let go, as with a broken driver, is left behind.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_DIES_WITHIN)


def _become(parent: int, command: Sequence[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the parent process has ended")
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
