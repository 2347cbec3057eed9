"""The ServerApps of a federation on this machine are Flower's, forked where a nursery runs."""

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flwr_distill.fleet.serverapp import NAME, program
from flwr_distill.node.nursery import NURSERY, SERVER_APPS, can_fork
from flwr_distill.node.processes import start_bound, stop


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Path]:
    """The folder of a nursery of ServerApps, without what it would import first."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / SERVER_APPS))
        listener.listen()
        command = [
            sys.executable,
            "-P",
            "-m",
            "flwr_distill.node.nursery",
            SERVER_APPS,
            str(listener.fileno()),
        ]
        process = start_bound(
            command, pass_fds=[listener.fileno()], log=tmp_path / "nursery.log", cwd=tmp_path
        )
    yield tmp_path
    stop([process])


def called(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program at work, for a nursery in this folder."""
    return subprocess.run(
        [program(folder), *arguments],
        env={**os.environ, NURSERY: str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.skipif(not can_fork(), reason="nothing is forked on this machine")
def test_it_is_flowers_program_with_its_arguments_output_and_exit_code(nursery: Path) -> None:
    refused = called(nursery, "--nonsense")
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"usage: {NAME}")
    assert called(nursery, "--help").returncode == 0


def test_without_a_nursery_it_is_the_same_program(tmp_path: Path) -> None:
    refused = called(tmp_path, "--nonsense")
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"usage: {NAME}")


EVALUATES = """
import resource, sys
import torch
from flwr_distill.fleet import serverapp

class Program:
    def load(self):
        return evaluate

def evaluate():
    for _ in range(2):  # the first time, memory is new in any case
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            torch.ones(10_000_000)  # 40 MB
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    weight = torch.nn.Parameter(torch.ones(1))
    torch.optim.SGD([weight], lr=0.1).step()
    print("torch._dynamo.eval_frame" in sys.modules)

serverapp._flowers = Program
serverapp.main()
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc: nothing to keep"
)
def test_it_uses_freed_memory_again_and_trains_without_the_compiler() -> None:
    faults, compiler = subprocess.check_output(
        [sys.executable, "-c", EVALUATES], text=True, timeout=60
    ).split()
    assert int(faults) < 1_000  # of 97,660 pages
    assert compiler == "False"
