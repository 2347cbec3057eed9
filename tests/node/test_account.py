"""What has been spent of a node's privacy budget outlasts a power cut."""

import os
from pathlib import Path

import pytest

from flwr_distill.node.account import LifetimeAccount


def test_a_booking_that_a_power_cut_breaks_off_leaves_what_was_spent_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lifetime-epsilon.json"
    account = LifetimeAccount(file)
    account.book("digits", "1", 2.0)
    events = list[str]()
    fsync = os.fsync

    def noting(number: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    def cut(source: Path, target: Path) -> None:
        events.append("named")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", noting)
        patch.setattr(os, "replace", cut)
        with pytest.raises(KeyboardInterrupt):
            account.book("digits", "1", 3.0)
    written, named = events
    assert (written != str(file), named) == (True, "named")  # all of it is on disk first
    assert LifetimeAccount(file).left("digits") == 2.0
    assert list(tmp_path.iterdir()) == [file]
    account.book("digits", "1", 3.0)
    assert LifetimeAccount(file).left("digits") == 3.0
