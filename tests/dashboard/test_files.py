"""What a run's ServerApp wrote into its folder is read within bounds, whatever it is."""

import json
import os
import time

import pytest

from flwr_distill.fleet.dashboard import files
from flwr_distill.fleet.dashboard.files import (
    Lines,
    copy_run,
    names_in,
    open_file,
    read_json,
    read_run,
)
from flwr_distill.fleet.dashboard.nodes import read_local
from flwr_distill.fleet.dashboard.pages import parts, run_parts
from flwr_distill.fleet.dashboard.run_log import shown_line
from flwr_distill.fleet.dashboard.watch import Place, Watch
from flwr_distill.flower.control import KnownNode

from .superlink import FakeControl, known_run

HOSTILE = [None, True, -1, 1e17, 1e300, "x" * 10_000, "<script>", [], [[]], {}, {"a": {}}]
HOSTILE += ["\x1b[2J\n", "\ud800", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00"]


def fake_place(folder, known):
    answers = {"nodes": [KnownNode(1, "online", 1.0)], "runs": [known_run(5)]} if known else {}
    control = FakeControl(**answers)
    return Place("here:9093", lambda: control, folder / "runs", folder / "state")


def write(folder, **contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        name = name.replace("_", ".", 1)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    return folder


def test_pipes_links_and_large_files_are_not_read(tmp_path):
    run = write(tmp_path / "run", settings_json={"strategy": "fedavg"})
    secret = write(tmp_path / "other", settings_json={"strategy": "secret"})
    os.mkfifo(run / "about.json")
    (run / "metrics.jsonl").symlink_to(secret / "settings.json")
    (tmp_path / "linked").symlink_to(secret)
    assert read_json(run / "about.json") == {}
    assert Lines(run / "metrics.jsonl").new() == (False, [])
    assert read_json(tmp_path / "linked" / "settings.json") == {}
    assert read_json(run / "settings.json", 5) == {}
    assert read_json(run / "settings.json") == {"strategy": "fedavg"}
    with pytest.raises(OSError, match="linked"):
        open_file(tmp_path / "linked" / "settings.json")
    (run / "export").symlink_to(secret)
    assert names_in(run / "export") == []
    assert read_run(run).rows == []


def test_a_log_of_a_local_node_that_is_a_pipe_or_a_link_is_not_read(tmp_path):
    """Another user of the machine may be its owner."""
    log, secret = tmp_path / "ward" / "node.log", tmp_path / "secret"
    log.parent.mkdir()
    secret.write_text("a secret\n")
    log.symlink_to(secret)
    assert [node.last_line for node in read_local([log.parent])] == [""]
    log.unlink()
    os.mkfifo(log)
    assert [node.last_line for node in read_local([log.parent])] == [""]
    log.unlink()
    log.write_text("a line\n")
    assert [node.last_line for node in read_local([log.parent])] == ["a line"]


def test_an_export_reads_no_link_and_waits_for_no_pipe(tmp_path):
    secret = write(tmp_path / "other", model_safetensors="secret")
    run = write(
        tmp_path / "run", settings_json={}, about_json={}, metrics_jsonl="", journal_jsonl=""
    )
    copy_run(run, tmp_path / "copy")
    (run / "model.safetensors").symlink_to(secret / "model.safetensors")
    with pytest.raises(OSError, match="symbolic"):
        copy_run(run, tmp_path / "again")
    (run / "model.safetensors").unlink()
    (run / "journal.jsonl").unlink()
    os.mkfifo(run / "journal.jsonl")
    with pytest.raises(OSError, match="no regular file"):
        copy_run(run, tmp_path / "third")


def test_a_growing_file_gives_each_line_once_and_a_cut_one_gives_all_again(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE", 100)
    file = tmp_path / "journal.jsonl"
    lines = Lines(file)
    file.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert lines.new() == (True, [{"a": 1}, {"a": 2}])
    with file.open("a") as more:
        more.write(': 3}\nno json\n[1]\n{"long": "' + 500 * "x" + '"}\n{"a": 4}\n' + 300 * "y")
    assert lines.new() == (False, [{"a": 3}, {"a": 4}])
    with file.open("a") as more:
        more.write('end of a line that was too long\n{"a": 5}\n')
    assert lines.new() == (False, [{"a": 5}])
    file.write_text('{"a": 6}\n')
    assert lines.new() == (True, [{"a": 6}])


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("known", [True, False], ids=["live", "unknown"])
def test_no_content_of_a_run_ends_the_dashboard(tmp_path, value, known):
    line = dict.fromkeys(("round", "time", "accuracy", "node_accuracy", "server_bytes"), value)
    line |= {"link_bytes": value, "seconds": value}
    write(
        tmp_path / "runs" / "5",
        settings_json={"strategy": value, "dataset": value, "num-rounds": value, "evaluate": value},
        about_json={
            "started": value,
            "warnings": value,
            "nodes": {"1": value, "2": {"name": value}},
        },
        metrics_jsonl=2 * f"{json.dumps(line)}\n",
        journal_jsonl="".join(
            json.dumps({"round": value, "time": value, key: value, "reason": value}) + "\n"
            for key in ("error", "warning", "failed", "set_aside", "phase")
        ),
        phase_json={"phase": "nodes train", "time": time.time(), "since": value, "until": value}
        | {"awaited": value, "asked": value, "others": value, "run": value},
    )
    watched = Watch(fake_place(tmp_path, known))
    for _ in range(2):
        snapshot = watched.read()
        (shown,) = snapshot.runs
        assert shown.folder is not None
        assert shown.round >= 0
        assert all(0 <= y <= 1 for _, y in (*shown.server_curve, *shown.node_curve))
        log = [shown_line(str(value)), shown_line(json.dumps({"text": value}))], ""
        for text in (*parts(snapshot).values(), *run_parts(shown, log, "").values()):
            assert "<script>" not in text
            text.encode()
            assert len(text) < 100_000
