"""A run whose results cannot be written ends with one line that names folder and remedy.

Root may write anywhere, so a file in place of a folder stands for missing permission, and a limit
on the size of files for a full disk.
"""

import resource
from contextlib import contextmanager
from errno import ENOSPC
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

from flwr_distill.protocol.method import CHOICE
from flwr_distill.server.export.model import run_to_export, weights_of
from flwr_distill.server.grid.ledger import Ledger
from flwr_distill.server.hooks import RunEnd
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.page.run_page import write_report
from flwr_distill.server.record.recorder import Recorder, write_json
from flwr_distill.server.record.writing import ResultsError, results_in
from flwr_distill.server.settings import RunSettings

KILOBYTES = 1000


@pytest.fixture
def run(play, tmp_path):
    return partial(play, {"runs-dir": str(tmp_path / "runs")}, nodes=2)


@contextmanager
def files_of_at_most(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check_line(error, folder):
    assert str(folder) in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("below", ["runs", "runs/of/mine"])
def test_an_unwritable_runs_dir_is_named_before_any_node_is_asked(run, tmp_path, below):
    (tmp_path / "runs").write_text("a file")
    asked = []
    with pytest.raises(ResultsError, match="runs-dir") as caught:
        run(broken=lambda *message: asked.append(message), runs_dir=str(tmp_path / below))
    check_line(caught.value, tmp_path / below)
    assert asked == []


def test_a_disk_that_is_full_in_mid_run_is_named_and_the_run_can_be_resumed(run, tmp_path):
    trained = []

    def fill(node, message):
        if message.metadata.message_type == "train":
            trained.append(node)
            if len(trained) == 3:  # in the second round
                full.__enter__()
        return False

    full = files_of_at_most(20 * KILOBYTES)
    try:
        with pytest.raises(ResultsError, match='resume = "1"') as caught:
            run(broken=fill)
    finally:
        full.__exit__(None, None, None)
    check_line(caught.value, tmp_path / "runs" / "1")
    run(run_id=2, resume="1")
    assert (tmp_path / "runs" / "1" / "summary.json").exists()


@pytest.mark.parametrize(
    "text",
    [
        'I/O error: IoError(Os { code: 27, kind: FileTooLarge, message: "File too large" })',  # 0.5
        "Error while serializing: I/O error: File too large (os error 27)",
    ],
)
def test_a_full_disk_is_named_as_every_safetensors_describes_it(tmp_path, text):
    resume = 'resume = "7"'
    with pytest.raises(ResultsError, match=resume) as caught, results_in(tmp_path, resume):
        raise SafetensorError(text)
    check_line(caught.value, tmp_path)


def test_where_there_is_no_room_the_files_of_the_last_round_stay_readable(run, tmp_path):
    folder = run()
    before = read_run(folder)
    for name in ("traffic.json", "about.json", "topology.json", "settings.json"):
        with files_of_at_most(100), pytest.raises(OSError, match="too large"):
            write_json(folder / name, {"a": "b" * KILOBYTES})
    with files_of_at_most(KILOBYTES), pytest.raises(OSError, match="too large"):
        write_report(folder)
    assert read_run(folder) == before
    assert (folder / "report.html").read_text().endswith("</html>")
    assert not [*folder.glob(".*.*")]


def test_where_there_is_no_room_a_strategys_file_is_whole_or_not_there(tmp_path):
    """The report reads it: half of one ended that, and hid that the disk was full."""
    history = SimpleNamespace(heads={}, topology={}, ledger=Ledger(), rows=[])
    recorder = Recorder(tmp_path, RunSettings(), history)
    end = RunEnd(None, {}, {CHOICE: b"[" * 10 * KILOBYTES}, (), None)
    with files_of_at_most(5 * KILOBYTES), pytest.raises(OSError, match="too large"):
        recorder.on_run_end(end)
    assert not [*tmp_path.glob(f"*{CHOICE}*")]


@pytest.mark.pictures
def test_where_there_is_no_room_the_picture_of_the_run_before_stays(tmp_path):
    (tmp_path / "accuracy.png").write_bytes(b"whole")
    rows = [SimpleNamespace(round=number, accuracy=0.5) for number in range(3)]
    history = SimpleNamespace(heads={}, topology={}, ledger=Ledger(), rows=rows)
    recorder = Recorder(tmp_path, RunSettings(), history)
    end = RunEnd(None, {}, {}, (), None)
    with files_of_at_most(5 * KILOBYTES), pytest.raises(OSError, match="too large"):
        recorder.on_run_end(end)
    assert [file.read_bytes() for file in tmp_path.glob("*accuracy*")] == [b"whole"]


def test_a_run_that_cannot_record_all_of_a_round_leaves_the_model_of_that_round(
    run, monkeypatch, tmp_path
):
    """The round's row is there already, and an export goes by rows."""
    second = load_file(run(num_rounds=2) / "model.safetensors")

    def fill(recorder, formula_bytes):
        if recorder._history.rows[-1].round == 2:
            raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(Recorder, "_write_traffic", fill)
    with pytest.raises(ResultsError):
        run(num_rounds=3, run_id=2)
    left = read_run(tmp_path / "runs" / "2")
    assert left.rows[-1]["round"] == 2
    weights = weights_of(run_to_export(left))
    assert all(np.array_equal(weights[name], second[name]) for name in second)
