"""`flwr-distill queue`: the list in a terminal."""

import time

import flwr_distill.cli.queue
from flwr_distill.fleet.queue.entry import QueuedRun

from .commands import command


def queued(number, state, *, run_id="0", why="", position=0):
    fields = {"priority": 0, "after": None, "timeout": 60.0, "submitted": 0.0, "started": None}
    since = time.time()
    return QueuedRun(
        id=number,
        user="alexandra",
        state=state,
        position=position,
        since=since,
        run_id=run_id,
        why=why,
        **fields,
    )


def test_a_list_fits_80_columns_and_no_reason_is_broken_within_a_word(monkeypatch):
    why = "took over 3600 s, its timeout"
    runs = [
        queued(7, "running", run_id="16120037219058242387"),
        queued(8, "waiting", why="for run 7 to end", position=1),
        queued(6, "stopped", run_id="9982003721905824238", why=why),
    ]
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(flwr_distill.cli.queue, "listed_runs", lambda *_, **__: runs)
    lines = command("queue").output.splitlines()
    assert max(map(len, lines)) <= 80
    assert "161200" in lines[1]
    assert lines[2].rstrip().endswith("for run 7 to end")
    assert set(why.split()) <= set(" ".join(lines).split())
