"""A run whose results cannot be written ends with one line that names folder and remedy.

Root may write anywhere, so a file in place of a folder stands for missing permission, and a limit
on the size of files for a full disk.
"""

import resource
from contextlib import contextmanager

import pytest
from flwr.app import Context, RecordDict
from safetensors import SafetensorError

from flwr_distill.server.app import main
from flwr_distill.server.record.resume import find_run_to_resume
from flwr_distill.server.record.writing import ResultsError, results_in
from flwr_distill.server.settings import RunSettings

KILOBYTES = 1000


@pytest.fixture
def play(client_grid, tmp_path, without_pictures):
    def play(run_id=1, broken=lambda node, message: False, **settings):
        config = {
            "strategy": "fedavg",
            "num-rounds": 2,
            "min-nodes": 2,
            "runs-dir": str(tmp_path / "runs"),
            **settings,
        }
        main(client_grid(2, config, broken), Context(run_id, 1, {}, RecordDict(), config))

    return play


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
def test_an_unwritable_runs_dir_is_named_before_any_node_is_asked(play, tmp_path, below):
    (tmp_path / "runs").write_text("a file")
    asked = []
    with pytest.raises(ResultsError, match="runs-dir") as caught:
        play(broken=lambda *message: asked.append(message), **{"runs-dir": str(tmp_path / below)})
    check_line(caught.value, tmp_path / below)
    assert asked == []


def test_a_disk_that_is_full_in_mid_run_is_named_and_the_run_can_be_resumed(play, tmp_path):
    settings = {"resume": "1"}
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
            play(broken=fill)
    finally:
        full.__exit__(None, None, None)
    check_line(caught.value, tmp_path / "runs" / "1")
    play(run_id=2, **settings)
    folder = find_run_to_resume(RunSettings(runs_dir=str(tmp_path / "runs"), **settings), 2)
    assert (folder / "summary.json").exists()


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
