"""A SuperNode that fails ends at once, so that its supervisor starts it anew."""

import subprocess
import sys
from pathlib import Path

import pytest

from flwr_distill.node.bell import Bell
from flwr_distill.node.notes import Notes

FAILS = """
import threading, time
from flwr_distill.flower import supernode

def refused():
    threading.Thread(target=time.sleep, args=(600,)).start()  # as Flower leaves them
    raise {error}

supernode.flower_supernode = refused
supernode.main()
"""


@pytest.mark.parametrize(
    ("error", "shown"),
    [("RuntimeError('refused')", "RuntimeError: refused"), ("KeyboardInterrupt", "")],
)
def test_it_waits_for_no_thread_that_flower_left_behind(
    error: str, shown: str, tmp_path: Path
) -> None:
    reports, report = Notes.pair()
    with reports, report, Bell.ends() as (_, bell):
        ended = subprocess.run(
            [
                *(sys.executable, "-c", FAILS.format(error=error)),
                *(str(report.fileno()), str(bell), str(tmp_path), "0.05", "20", "", ""),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            pass_fds=[report.fileno(), bell],
        )
    assert ended.returncode == 1
    assert (ended.stderr.splitlines() or [""])[-1] == shown
