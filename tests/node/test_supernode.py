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


UNKNOWN = """
from flwr_distill.flower import overrides, supernode

overrides.FLOWER_VERSIONS = ()
supernode.main()
"""


def run(code: str, folder: Path, *limits: str) -> tuple[subprocess.CompletedProcess[str], Notes]:
    """A SuperNode that ended, and what it reported."""
    reports, report = Notes.pair()
    with report, Bell.ends() as (_, bell):
        ended = subprocess.run(
            [
                *(sys.executable, "-c", code),
                *(str(report.fileno()), str(bell), str(folder), "0.05", "20", *limits),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            pass_fds=[report.fileno(), bell],
        )
    assert ended.returncode == 1
    return ended, reports


@pytest.mark.parametrize(
    ("error", "shown"),
    [("RuntimeError('refused')", "RuntimeError: refused"), ("KeyboardInterrupt", "")],
)
def test_it_waits_for_no_thread_that_flower_left_behind(
    error: str, shown: str, tmp_path: Path
) -> None:
    ended, reports = run(FAILS.format(error=error), tmp_path, "", "")
    reports.close()
    assert (ended.stderr.splitlines() or [""])[-1] == shown


def test_where_its_link_cannot_be_limited_it_does_not_start(tmp_path: Path) -> None:
    _, reports = run(UNKNOWN, tmp_path, "5.0", "")
    with reports:
        kind, reason = reports.receive(1.0)
    assert kind == "unfit"
    assert "max-rate" in reason
    assert "install flwr==1.32.1" in reason
