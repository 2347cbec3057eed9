"""Processes that a nursery forks behave as if they had been started."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flwr_distill.node import child, nursery, processes, supervisor
from flwr_distill.node.child import Child, ChildDiedError
from flwr_distill.node.nursery import NURSERY, ForkedProcess
from flwr_distill.node.processes import Process, kill_group, start_bound, stop
from flwr_distill.node.settings import NodeSettings
from flwr_distill.node.supervisor import Node
from tests.node.supernodes import wait_until_gone

CHILD = """
import os, random, sys, time

import numpy as np

from flwr_distill.node import nursery

np.random.random()  # it is imported at its first use
fork = os.fork

def fork_if_there_is_room():
    if os.path.exists(os.path.join(os.path.dirname(__file__), "full")):
        raise BlockingIOError("no more processes")
    return fork()

os.fork = fork_if_there_is_room

nursery.NURSERIES = {"forklings": ("forkling",)}

def main():
    what, *rest = sys.argv[1:]
    print(what, os.getpid(), os.environ["MARK"], flush=True)
    if what == "write":
        os.write(int(rest[0]), b"through the pipe")
    if what == "draw":
        print("drawn", np.random.random(), random.random(), flush=True)
    if what == "fail":
        sys.exit("there is a reason")
    if what == "raise":
        1 / 0
    if what == "start":
        from flwr_distill.node.processes import start_bound
        command = [sys.executable, "-P", "-m", "forkling", "sleep"]
        child = start_bound(command)
        print("child", child.pid, flush=True)
    if what in ("start", "sleep"):
        time.sleep(60)
"""
SERVER = "import socket, sys; from flwr_distill.node.nursery import Nursery; import forkling; \
Nursery(socket.socket(fileno=int(sys.argv[1]))).serve()"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    """A nursery that forks the module above."""
    (tmp_path / "forkling.py").write_text(CHILD)
    monkeypatch.setattr(nursery, "NURSERIES", {"forklings": ("forkling",)})
    root = str(Path(nursery.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), root]))
    monkeypatch.setenv("MARK", "before")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "forklings"))
        listener.listen()
        command = [sys.executable, "-c", SERVER, str(listener.fileno())]
        process = start_bound(command, pass_fds=[listener.fileno()], log=tmp_path / "nursery.log")
    monkeypatch.setenv(NURSERY, str(tmp_path))
    monkeypatch.setenv("MARK", "after")
    yield process
    stop([process])


def start(folder: Path, *arguments: str, pass_fds: tuple[int, ...] = ()) -> Process:
    return start_bound(
        [sys.executable, "-P", "-m", "forkling", *arguments],
        log=folder / "log",
        pass_fds=pass_fds,
    )


def lines(folder: Path, number: int = 1) -> list[str]:
    """The first lines of the log, once they are there."""
    deadline = time.monotonic() + 20
    while len(results := (folder / "log").read_text().splitlines()) < number:
        assert time.monotonic() < deadline, results
        time.sleep(0.02)
    return results


def test_a_process_has_its_environment_its_log_and_the_pipes_that_it_is_given(
    server: Process, tmp_path: Path
) -> None:
    reader, writer = os.pipe()
    process = start(tmp_path, "write", str(writer), pass_fds=(writer,))
    os.close(writer)
    assert isinstance(process, ForkedProcess)
    assert os.read(reader, 100) == b"through the pipe"
    assert os.read(reader, 100) == b""  # no copy is left open
    assert process.wait(timeout=10) == 0
    assert lines(tmp_path) == [f"write {process.pid} after"]
    os.close(reader)


@pytest.mark.parametrize(
    ("what", "text"), [("fail", "there is a reason"), ("raise", "ZeroDivisionError")]
)
def test_a_process_that_fails_says_why_and_ends_with_1(
    what: str, text: str, server: Process, tmp_path: Path
) -> None:
    process = start(tmp_path, what)
    assert process.wait(timeout=10) == 1
    assert text in (tmp_path / "log").read_text()


def test_processes_draw_other_random_numbers_as_those_that_are_started_do(
    server: Process, tmp_path: Path
) -> None:
    for _ in range(2):
        assert start(tmp_path, "draw").wait(timeout=10) == 0
    first, second = [line.split()[1:] for line in lines(tmp_path, 4) if line.startswith("drawn")]
    assert first[0] != second[0]  # NumPy's
    assert first[1] != second[1]


def test_a_process_is_stopped_and_killed_like_any_other(server: Process, tmp_path: Path) -> None:
    first, second = start(tmp_path, "sleep"), start(tmp_path, "sleep")
    lines(tmp_path, 2)
    assert first.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(timeout=0.05)
    stop([first])
    assert first.returncode == -signal.SIGTERM
    kill_group(second)
    assert second.returncode == -signal.SIGKILL
    assert not psutil.pid_exists(first.pid)
    assert not psutil.pid_exists(second.pid)


def test_a_process_ends_with_the_one_that_asked_for_it(server: Process, tmp_path: Path) -> None:
    process = start(tmp_path, "start")
    printed = re.search(r"child (\d+)", "\n".join(lines(tmp_path, 3)))  # two processes write there
    assert printed
    child = int(printed[1])
    kill_group(process)
    wait_until_gone(child)


@pytest.fixture
def worker(server: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    """An executor's child, forked, that says nothing."""

    def fork(command: list[str], *, pass_fds: list[int], **_: object) -> Process:
        return start(tmp_path, "sleep", pass_fds=tuple(pass_fds))

    monkeypatch.setattr(child, "start_bound", fork)
    worker = Child([])
    lines(tmp_path)
    return worker


def test_a_hung_worker_is_killed_at_its_deadline_and_one_that_died_says_how(worker: Child) -> None:
    with pytest.raises(ChildDiedError, match="hung, and was killed"):
        worker.note(timeout=0.1)
    wait_until_gone(worker.pid)
    other = Child([])
    os.kill(other.pid, signal.SIGKILL)
    with pytest.raises(ChildDiedError, match="died: signal SIGKILL"):
        other.note(timeout=10)


def test_a_kill_that_nobody_confirms_is_not_waited_for(
    server: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_KILL_TIMEOUT", 0.1)
    process = start(tmp_path, "sleep")
    lines(tmp_path)
    os.kill(server.pid, signal.SIGSTOP)
    kill_group(process)
    assert process.returncode is None
    os.kill(server.pid, signal.SIGCONT)
    assert process.wait(timeout=10) == -signal.SIGKILL


def test_a_worker_that_is_not_to_be_forked_is_started_though_there_is_a_nursery(
    server: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_nursery: list[bool] = []

    def start_nothing(command: list[str], *, env: dict[str, str], **_: object) -> Process:
        with_nursery.append(NURSERY in env)
        return start(tmp_path, "sleep")

    monkeypatch.setattr(child, "start_bound", start_nothing)
    for forked in (True, False):
        Child([], forked=forked).kill()
    assert with_nursery == [True, False]


def test_a_nodes_nursery_has_neither_pytorch_nor_any_module_that_an_app_may_bring() -> None:
    code = """
import sys
from flwr_distill.node import nursery
nursery._import(nursery._FOR_ALL_PARTS)
print(*sys.modules)
"""
    results = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    imported = set(results.stdout.split())
    assert {"flwr", "grpc", "numpy"} <= imported
    assert "torch" not in imported
    ours = [name.split(".") for name in imported if name.startswith("flwr_distill.")]
    assert {room for _, room, *_ in ours} == {"flower", "node"}


def test_a_nodes_supervisor_does_without_flower_numpy_and_pytorch() -> None:
    code = "import sys, flwr_distill.cli.main; print(*sys.modules)"
    results = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"flwr", "grpc", "numpy", "torch"} & set(results.stdout.split())


def test_a_nursery_that_dies_takes_its_processes_along_and_programs_take_over(
    server: Process, tmp_path: Path
) -> None:
    process = start(tmp_path, "sleep")
    lines(tmp_path)
    kill_group(server)
    assert process.wait(timeout=10) == -signal.SIGTERM
    wait_until_gone(process.pid)
    after = start(tmp_path, "fail")
    assert isinstance(after, subprocess.Popen)
    assert after.wait(timeout=10) == 0  # run as a program, that file defines a function and ends
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_fork_that_fails_ends_no_other_process(server: Process, tmp_path: Path) -> None:
    """As where an app has started as many processes as this user may have."""
    first = start(tmp_path, "sleep")
    lines(tmp_path)
    (tmp_path / "full").touch()
    second = start(tmp_path, "sleep")
    assert not isinstance(second, ForkedProcess)
    assert (server.poll(), first.poll()) == (None, None)
    (tmp_path / "full").unlink()
    third = start(tmp_path, "sleep")
    assert isinstance(third, ForkedProcess)
    stop([first, second, third])


def test_more_processes_than_a_nursery_may_have_open_files_end_no_other_one(
    server: Process, tmp_path: Path
) -> None:
    """It has a socket for each."""
    processes = [start(tmp_path, "sleep")]
    lines(tmp_path)
    open_files = len(os.listdir(f"/proc/{server.pid}/fd"))
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (open_files + 8,) * 2)
    processes += [start(tmp_path, "sleep") for _ in range(10)]
    forked = [process for process in processes if isinstance(process, ForkedProcess)]
    lines(tmp_path, len(forked))
    assert 2 < len(forked) < len(processes)
    assert [server.poll(), *(process.poll() for process in forked)] == [None] * (len(forked) + 1)
    stop(processes)


def test_parts_are_not_forked_from_a_nursery_that_is_older_than_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = {("pillow-12.0.dist-info", 1)}
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.delenv(NURSERY, raising=False)
    monkeypatch.setattr(supervisor, "installed_packages", lambda: frozenset(results))
    monkeypatch.setattr(supervisor, "start_nursery", lambda *_, **__: start_bound(sleep))
    node = Node(NodeSettings(insecure=True, state_dir=tmp_path))
    try:
        node._start_nursery()
        first, folder = node._nursery, node._nursery_folder
        assert first is not None
        node._start_nursery()
        assert node._nursery is first
        results.add(("numpy-2.4.dist-info", 2))
        node._start_nursery()
        assert node._nursery not in (None, first)
        assert first.poll() is not None
        assert not folder.exists()
    finally:
        node._stop_nursery()
