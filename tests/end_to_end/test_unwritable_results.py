"""A run whose results cannot be written, with real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from flwr_distill.fleet.local_federation import LocalFederation

COMMAND = str(Path(sys.executable).parent / "flwr-distill")


@pytest.mark.slow
def test_a_run_with_an_unwritable_runs_dir_ends_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file, since root may write to any folder")
    with LocalFederation(1, tmp_path / "federation"):
        settings = f'strategy="fedavg" num-rounds=1 runs-dir="{tmp_path / "runs"}"'
        where = ("--state-dir", str(tmp_path / "federation"))
        run = subprocess.run(
            [COMMAND, "run", "-c", settings, *where], capture_output=True, text=True, timeout=200
        )
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert str(tmp_path / "runs") in line
    assert "runs-dir" in line
    assert "Traceback" not in run.stdout
