"""The end of a round, and what is left when the rounds are over."""

import json

import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

import flwr_distill.server.task
from flwr_distill.protocol.meeting import DESCRIBE
from flwr_distill.server import rounds
from flwr_distill.server.grid.pipeline import Pipeline, QuorumError
from flwr_distill.server.record import resume
from flwr_distill.server.record.checkpoint import (
    CheckpointError,
    Checkpoints,
    checkpoints,
    load_checkpoint,
)
from flwr_distill.server.record.recorder import Recorder
from flwr_distill.server.record.resume import lock_run_folder
from flwr_distill.server.roster import Roster
from flwr_distill.strategies.common.waiting import TooFewNodesError
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import TrainSettings
from tests.errors import at
from tests.server.run_folder import journal

NODES = 3
QUICK = {"strategy": "fedavg", "num-rounds": 2, "min-nodes": NODES, "train.local-epochs": 1}


@pytest.fixture
def noted(monkeypatch):
    """Have calls of functions noted, in a list."""
    calls = []

    def note(owner, name, label):
        function = getattr(owner, name)

        def noting(*args, **kwargs):
            calls.append(label)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    def evaluation(*args):
        evaluate = made(*args)
        return lambda *model: calls.append("evaluate") or evaluate(*model)

    made = flwr_distill.server.task.server_evaluation
    monkeypatch.setattr(flwr_distill.server.task, "server_evaluation", evaluation)
    note(Recorder, "on_round_end", "record")
    note(Roster, "meet_new", "meet")
    note(Checkpoints, "on_checkpoint", "checkpoint")
    note(Pipeline, "begin_round", "begin")
    return calls


def test_a_round_ends_with_evaluation_record_new_nodes_and_checkpoint_in_this_order(play, noted):
    play()
    assert noted[:2] == ["begin", "meet"]  # the grid's own, and the first meeting
    assert noted[2:] == ["evaluate", "record", "meet", "checkpoint", "begin"] * 3


def test_a_node_that_came_in_a_round_is_in_its_checkpoint_and_trains_in_the_next(client_grid, play):
    config = {**QUICK, "partition.scheme": "iid"}
    grid = client_grid(NODES + 1, config)
    late = max(grid.nodes)
    answer = grid.nodes.pop(late)
    first, trains = min(grid.nodes), []

    def joined_by_another(message):
        if message.metadata.message_type == "train":
            grid.nodes[late] = answer
            trains.append(message.content["config"]["server-round"])
        return content(message)

    content = grid.nodes[first]
    grid.nodes[first] = joined_by_another
    folder = play(config, grid=grid)
    assert trains == [1, 2]
    checkpoint = load_checkpoint(checkpoints(folder)[1])
    assert list(checkpoint.nodes.values()) == ["0", "1", "2", "3"]
    assert str(late) in json.loads((folder / "about.json").read_text())["nodes"]
    trained = [line for line in journal(folder, "phase") if line["phase"] == "train"]
    assert [line["asked"] for line in trained] == [NODES, NODES + 1]


def test_the_learning_rate_stays_unless_it_is_to_fall():
    assert {rounds.learning_rate(TrainSettings(lr=0.2), i, 9) for i in range(1, 10)} == {0.2}


def test_nodes_train_with_the_learning_rate_of_the_round_also_after_a_resume(client_grid, play):
    config = {**QUICK, "num-rounds": 3, "train.lr": 0.2, "train.lr-schedule": "cosine"}
    grid = client_grid(NODES, config)
    first, rates = min(grid.nodes), []
    answer = grid.nodes[first]

    def noting(message):
        if message.metadata.message_type == "train":
            rates.append(message.content["config"]["lr"])
            if len(rates) == 2:
                raise KeyboardInterrupt
        return answer(message)

    grid.nodes[first] = noting
    with pytest.raises(KeyboardInterrupt):
        play(config, grid=grid)
    play(config, grid=grid, resume="latest")
    del rates[1]  # the round that was interrupted comes again
    assert rates == pytest.approx([0.2, 0.15, 0.05])  # 60 degrees of half a circle a round


def without_data(answer):
    """A node without its data."""
    missing = RecordDict(
        {
            "metrics": MetricRecord({"num-examples": 0, "partition-id": 2}),
            "config": ConfigRecord({"missing": ["data=/scans: is not there"], "name": "ward"}),
        }
    )
    return lambda message: missing if message.metadata.message_type == DESCRIBE else answer(message)


def test_a_node_that_lacks_its_data_ends_the_run_before_any_node_trains(client_grid, play):
    grid = client_grid(NODES, QUICK)
    last = max(grid.nodes)
    grid.nodes[last] = without_data(grid.nodes[last])
    with pytest.raises(TooFewNodesError) as caught:
        play(grid=grid)
    assert str(caught.value).startswith(
        "min-nodes = 3, but only 2 of 3 nodes can take part: ward: data=/scans: is not there ("
    )
    assert {message.metadata.message_type for message in grid.pushed} == {DESCRIBE}


def test_a_run_with_enough_nodes_goes_on_without_it_and_takes_it_when_it_is_repaired(
    client_grid, play
):
    config = {**QUICK, "min-nodes": 2, "partition.classes": 2}
    grid = client_grid(NODES, config)
    first, last = min(grid.nodes), max(grid.nodes)
    works, trains = grid.nodes[last], grid.nodes[first]
    grid.nodes[last] = without_data(works)

    def repairing(message):
        if message.metadata.message_type == "train":
            grid.nodes[last] = works
        return trains(message)

    grid.nodes[first] = repairing
    folder = play(config, grid=grid)
    trained = [line for line in journal(folder, "phase") if line["phase"] == "train"]
    assert [line["asked"] for line in trained] == [2, 3]
    about = json.loads((folder / "about.json").read_text())
    assert [node["name"] for node in about["nodes"].values()] == ["node-0", "node-1", "ward"]
    (warning,) = about["warnings"]
    assert warning.startswith("No node holds classes 6, 7, 8 and 9, so the model")
    assert json.loads((folder / "summary.json").read_text())["warnings"] == [warning]
    page = (folder / "report.html").read_text()
    assert page.index("No node holds classes 6") < page.index("Learning")
    assert "Cannot take part: ward: data=/scans: is not there" in page


def test_results_are_written_while_the_folder_is_locked_and_it_is_free_thereafter(
    play, monkeypatch
):
    refused = []
    monkeypatch.setattr(resume, "ENDS_WITHIN", 0.5)

    def finish(self, end):
        with pytest.raises(CheckpointError), lock_run_folder(self._folder):
            raise AssertionError
        refused.append(self._folder)
        finish_run(self, end)

    finish_run = Recorder.on_run_end
    monkeypatch.setattr(Recorder, "on_run_end", finish)
    folder = play()
    assert refused == [folder]
    assert (folder / "model.safetensors").exists()
    with lock_run_folder(folder) as locked:
        assert locked == folder


def test_a_run_that_breaks_off_has_a_report_so_far_and_leaves_its_folder_free(
    play, client_grid, tmp_path
):
    grid = client_grid(NODES, QUICK)
    messages = []

    def gone_in_round_2(answer):
        def answered(message):
            messages.extend([message] * (message.metadata.message_type == "train"))
            if len(messages) > NODES:
                raise RuntimeError("away")
            return answer(message)

        return answered

    grid.nodes = {node: gone_in_round_2(answer) for node, answer in grid.nodes.items()}
    with pytest.raises(QuorumError, match="round 2, train: 0 of 3", check=at("quorum", value=0.5)):
        play(grid=grid, quorum=0.5)
    with lock_run_folder(tmp_path / "1") as folder:
        assert (
            "3 nodes failed in train: node-0, node-1 and node-2: away"
            in (folder / "report.html").read_text()
        )
        assert (folder / "model.safetensors").exists()  # of round 1
        assert set(checkpoints(folder)) == {0, 1}


def test_a_setting_that_the_nodes_cannot_meet_ends_the_run_before_results_are_begun(play, tmp_path):
    with pytest.raises(SettingsError, check=at("hfldd.groups", value=40)):
        play(strategy="hfldd", hfldd__groups=40)
    assert {file.name for file in (tmp_path / "1").iterdir()} == {
        ".lock",
        "journal.jsonl",
        "phase.json",
    }
