"""A federation where TMPDIR is long: paths of Unix sockets have 107 bytes at most."""

import os
import tempfile
from pathlib import Path

import pytest

from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.node.nursery import can_fork

from .runs import complete

LENGTH = 85


@pytest.mark.slow
def test_a_federation_trains_with_a_tmpdir_of_85_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(f"{tmp_path}/".ljust(LENGTH, "x"))
    folder.mkdir()
    assert len(os.fsencode(folder)) >= LENGTH
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it is read again
    with LocalFederation(2, tmp_path / "federation") as federation:
        assert not can_fork() or len(federation.nursery_pids) == 3
        complete(federation, tmp_path / "runs", {"strategy": "fedavg", "num-rounds": 1})
    monkeypatch.setattr(tempfile, "tempdir", None)
