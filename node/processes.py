"""Starts processes that never outlive their parent, and stops them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from flwr_distill.node.kernel import die_with
from flwr_distill.node.nursery import ForkedProcess, fork
from flwr_distill.node.proxies import exempt_loopback

_KILL_TIMEOUT = 30.0


Process = subprocess.Popen[bytes] | ForkedProcess
"""A process from `start_bound`."""


def start_bound(
    command: Sequence[str],
    *,
    log: Path | None = None,
    output: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> Process:
    """Start a command in its own process group; it gets SIGTERM if this process dies.

    The kernel ties it to the *thread* that calls this function: call it from one that lives as long
    as the process should. On systems other than Linux it survives a parent killed with -9. Standard
    output and error are appended to `log`, or go to the file descriptor `output`; None inherits, as
    for `env` and `cwd`. Loopback is exempt from proxies. A nursery forks the process if it can.
    """
    given = os.environ if env is None else env
    environment = {**given, **exempt_loopback(given)}
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext() if log is None else log.open("ab") as file:
        if file is not None:
            output = file.fileno()
        if cwd is None:
            outputs = (1, 2) if output is None else (output, output)
            forked = fork(command, environment, pass_fds, outputs)
            if forked is not None:
                return forked
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "flwr_distill.node.processes", str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=cwd,
            pass_fds=pass_fds,
            start_new_session=True,
        )


def start_nursery(
    folder: Path,
    name: str,
    modules: Sequence[str] = (),
    *,
    log: Path | None = None,
    env: Mapping[str, str],
    cwd: Path | None = None,
) -> Process:
    """Start one of `node.nursery.NURSERIES`, which imports more modules too.

    Its socket is in `folder`, which only this user may enter. `log`, `env`, `cwd`: `start_bound`'s.
    """
    from flwr_distill.protocol.socket_path import short_path  # here: a nursery imports this file

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        with short_path(folder / name) as path:
            listener.bind(path)
        listener.listen(socket.SOMAXCONN)
        number = listener.fileno()
        program = [sys.executable, "-P", "-m", "flwr_distill.node.nursery"]
        command = [*program, name, str(number), *modules]
        return start_bound(command, log=log, env=env, cwd=cwd, pass_fds=[number])


def stop(processes: Sequence[Process], *, grace: float = 8.0) -> None:
    """Send SIGTERM to processes, and after `grace` seconds SIGKILL to the rest of their groups."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + grace
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        kill_group(process)


def kill_group(process: Process) -> None:
    """Kill a process and its group with SIGKILL; one that a broken driver keeps is left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_KILL_TIMEOUT)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
