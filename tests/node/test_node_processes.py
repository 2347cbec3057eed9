"""Processes end with the one that started them, and with all that they started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flwr_distill.node.kernel import die_with
from flwr_distill.node.processes import start_bound, stop
from flwr_distill.node.settings import NodeSettings
from flwr_distill.node.supervisor import Node
from tests.waiting import wait_until

PARENT = """
import sys, time
from pathlib import Path
from flwr_distill.node.processes import start_bound
child = start_bound([sys.executable, "-c", "import time; time.sleep(60)"])
Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(60)
"""

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(file)])
    wait_until(lambda: file.exists() and bool(file.read_text()))
    child = int(file.read_text())
    time.sleep(0.5)  # the child binds itself to its parent first
    assert not ended(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until(lambda: ended(child))


def test_a_system_that_cannot_end_processes_with_their_parent_is_no_obstacle_but_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    die_with(os.getppid())
    assert "darwin does not end a process with its parent" in capsys.readouterr().err


def test_what_ignores_sigterm_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start_bound([sys.executable, "-c", STUBBORN], log=log)
    wait_until(lambda: bool(log.read_text().strip()))
    grandchild = int(log.read_text())
    stop([process], grace=0.5)
    assert process.returncode == -signal.SIGKILL
    wait_until(lambda: ended(grandchild))


def test_processes_that_obey_end_together_and_not_one_after_the_other() -> None:
    nap = "import time; time.sleep(60)"
    processes = [start_bound([sys.executable, "-c", nap]) for _ in range(3)]
    time.sleep(0.5)
    start = time.monotonic()
    stop(processes)
    assert time.monotonic() - start < 5
    assert [process.returncode for process in processes] == [-signal.SIGTERM] * 3


def test_nodes_that_end_together_do_not_start_again_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def pauses() -> list[float]:
        seen: list[float] = []

        def sleep(seconds: float) -> None:
            seen.append(seconds)
            if len(seen) == 5:
                raise EOFError

        node = Node(NodeSettings(insecure=True, state_dir=tmp_path))
        monkeypatch.setattr(node, "_start_parts", lambda: None)
        monkeypatch.setattr(node, "_wait_for_an_end", lambda: "the supernode ended")
        monkeypatch.setattr(time, "sleep", sleep)
        with pytest.raises(EOFError):
            node._supervise()
        return seen

    first, second = pauses(), pauses()
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert all(
        0.5 * longest <= a <= longest for a, longest in zip(first, (1, 2, 4, 8, 10), strict=True)
    )
