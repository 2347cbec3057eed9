"""Starts a ServerApp of a federation on this machine, forked where a nursery runs.

Flower starts ServerApps by the name of a program, ``flwr-serverapp``. `program` writes one of
that name, which is found before Flower's. A forked ServerApp saves the seconds of importing PyTorch
and matplotlib.
"""

import os
import shlex
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

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
    file.chmod(0o700)
    return file


def main() -> None:
    """Run Flower's program; the nursery calls this."""
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
    """Have a ServerApp forked, and wait for its end; without a nursery, run it here."""
    command = [sys.executable, "-P", "-m", SERVER_APP, *sys.argv[1:]]
    forked = fork(command, os.environ, (), (1, 2))
    if forked is None:
        main()
    else:
        sys.exit(forked.wait())  # it ends with this process, whose socket the nursery watches


if __name__ == "__main__":
    start()
