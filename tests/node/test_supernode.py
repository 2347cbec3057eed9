"""A SuperNode that fails ends at once, so that its supervisor starts it anew."""

import subprocess
import sys
from pathlib import Path

import pytest

FAILS = """
import threading, time
from node import supernode

def refused():
    threading.Thread(target=time.sleep, args=(600,)).start()  # as Flower leaves them
    raise {error}

supernode.flower_supernode = refused
supernode.main()
"""


@pytest.mark.parametrize(
    ("error", "told"),
    [("RuntimeError('refused')", "RuntimeError: refused"), ("KeyboardInterrupt", "")],
)
def test_it_waits_for_no_thread_that_flower_left_behind(
    error: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "node-config.toml").touch()
    ended = subprocess.run(
        # reports would go to stdout
        [
            *(sys.executable, "-c", FAILS.format(error=error)),
            *("1", str(tmp_path), "0.05", "20", "{}"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert (ended.stderr.splitlines() or [""])[-1] == told
