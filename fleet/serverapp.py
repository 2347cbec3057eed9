"""Starts a ServerApp of a federation on this machine, and reports its end if it was killed.

Flower starts ServerApps by the name of a program, ``flwr-serverapp``. `program` writes one of
that name, which is found before Flower's. Where a nursery runs, the ServerApp is forked from it,
which saves the seconds of importing PyTorch and matplotlib. This process stays small and waits: a
system whose memory is used up kills the ServerApp, and Flower would notice within a minute.
"""

import os
import shlex
import signal
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from flwr_distill.flower.lines import module_of_line
from flwr_distill.node.compiler import put_off_compiler
from flwr_distill.node.kernel import die_with, keep_freed
from flwr_distill.node.nursery import SERVER_APP, fork

NAME = "flwr-serverapp"


def preloaded() -> list[str]:
    """Modules for a nursery; none of ours: a run's code is that of its app bundle."""
    return ["torch", "torch.utils.tensorboard", "matplotlib.figure", _flowers().module]


def program(folder: Path) -> Path:
    """Write the program into a folder, and return the file."""
    file = folder / NAME
    command = shlex.join([sys.executable, "-P", "-m", SERVER_APP])
    file.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    file.chmod(0o755)  # an image's is run by another user than wrote it
    return file


def main() -> None:
    """Run Flower's program; the nursery calls this."""
    keep_freed()
    put_off_compiler()
    for name in list(sys.modules):  # the run's code is that of its app bundle
        if name.partition(".")[0] == "flwr_distill":
            del sys.modules[name]
    sys.argv[0] = NAME
    _flowers().load()()


def _flowers() -> EntryPoint:
    """Flower's own program, wherever its line has it."""
    (flowers,) = entry_points(group="console_scripts", name=NAME)
    return flowers


def start() -> None:
    """Run a ServerApp in another process; tell the SuperLink if a signal ended it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the ServerApp gets it, too
    command = [sys.executable, "-P", "-m", SERVER_APP, *sys.argv[1:]]
    forked = fork(command, os.environ, (), (1, 2))
    code = _run_here() if forked is None else forked.wait()
    if code < 0 and (killed := module_of_line("server", "killed")):  # imports Flower: only now
        killed.report(sys.argv[1:], _reason(-code))
    sys.exit(code if code >= 0 else 128 - code)


def _reason(number: int) -> str:
    known = {sent.value: sent.name for sent in signal.Signals}  # not all real-time signals
    memory = ": was it out of memory?" if number == signal.SIGKILL else ""
    remedy = 'see that machine\'s log, and continue with resume = "latest"'
    return f"its ServerApp was ended by {known.get(number, f'signal {number}')}{memory} ({remedy})"


def _run_here() -> int:
    """Run Flower's program in a child of this process; return its exit code."""
    parent = os.getpid()
    if (child := os.fork()) == 0:
        die_with(parent)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        main()
        sys.exit()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    start()
