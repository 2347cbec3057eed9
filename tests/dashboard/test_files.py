"""What a run's ServerApp wrote into its folder is read within bounds, whatever it is."""

import json
import os

import pytest

from flwr_distill.fleet.dashboard import files
from flwr_distill.fleet.dashboard.files import Lines, parts_of, read_bytes, read_json
from flwr_distill.fleet.dashboard.runs import RunFolder, run_of

HOSTILE = [None, True, -1, 1e300, "x" * 10_000, "<script>", [], [[]], {}, {"a": {}}, "\x1b[2J\n"]


def write(folder, **contents):
    folder.mkdir(exist_ok=True)
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
        read_bytes(tmp_path / "linked" / "settings.json")
    (run / "export").symlink_to(secret)
    with pytest.raises(OSError, match="export"):
        list(parts_of(run / "export" / "settings.json", 3))


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
def test_no_content_of_a_run_ends_the_dashboard(tmp_path, value):
    line = dict.fromkeys(("round", "time", "accuracy", "node_accuracy", "server_bytes"), value)
    line |= {"link_bytes": value, "seconds": value}
    folder = write(
        tmp_path / "run",
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
        phase_json={"phase": "nodes train", "time": value, "awaited": value, "asked": value},
    )
    run = RunFolder(folder)
    run.update()
    shown = run_of(run, None)
    assert shown.round >= 0
    assert all(0 <= y <= 1 for _, y in (*shown.server_curve, *shown.node_curve))
    texts = [shown.title, shown.why, *(p.text for p in shown.problems), *shown.warnings]
    assert all(len(text) < 1200 and text.isprintable() for text in texts)
