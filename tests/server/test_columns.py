"""Sums of columns over very many nodes."""

import time
from types import SimpleNamespace

import pytest

from flwr_distill.server.columns import _ask_for_sums


def test_sums_in_which_nobody_answers_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now, granted = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def wait_in_vain(messages: list[object], *, timeout: float) -> list[object]:
        now[0] += timeout
        granted.append(timeout)
        return []

    grid = SimpleNamespace(get_node_ids=lambda: range(1000), send_and_receive=wait_in_vain)
    assert _ask_for_sums(grid, 3, 600.0) is None  # type: ignore[arg-type]
    assert granted == pytest.approx([60.0] * 10)
