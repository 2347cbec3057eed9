"""A run records what was read, and the server keeps to what it has read."""

import json

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flwr_distill.client.session import Session
from flwr_distill.server.app import main
from flwr_distill.server.export.card import model_card
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.page.run_page import run_page
from flwr_distill.server.record.checkpoint import CheckpointError
from flwr_distill.task.file_state import FilesChangedError

NODES = 2


def write_table(folder, order=(0, 1, 2), seed=0):
    """Three classes in three columns, in this order."""
    draws = np.random.default_rng(seed)
    for part, number in (("train", 120), ("test", 60)):
        labels = draws.integers(0, 3, number)
        rows = draws.normal(size=(number, 3)) * 0.1
        rows[np.arange(number), labels] += 3
        lines = [
            ",".join(f"{row[i]:.3f}" for i in order) + f",k{label}\n"
            for row, label in zip(rows, labels, strict=True)
        ]
        header = ",".join(f"c{i}" for i in order) + ",label\n"
        (folder / f"{part}.csv").write_text(header + "".join(lines))


@pytest.fixture
def table(tmp_path):
    folder = tmp_path / "table"
    folder.mkdir()
    (folder / "split.json").write_text(json.dumps({0: [*range(60)], 1: [*range(60, 120)]}))
    write_table(folder)
    return folder


@pytest.fixture
def play(client_grid, tmp_path, table, without_pictures):
    """Run our ServerApp on the table, with nodes in this process; give the run's folder."""

    def play(run_id=1, broken=lambda node, message: False, node_config=None, **settings):
        config = {
            "strategy": "fedavg",
            "dataset": "csv",
            "data-root": str(table),
            "model": "mlp",
            "partition.scheme": "index-file",
            "partition.index-file": str(table / "split.json"),
            "num-rounds": 2,
            "min-nodes": NODES,
            "train.lr": 0.1,
            "runs-dir": str(tmp_path / "runs"),
            **settings,
        }
        grid = client_grid(NODES, config, broken, node_config)
        main(grid, Context(run_id, 1, {}, RecordDict(), config))
        return tmp_path / "runs" / str(run_id)

    return play


def accuracy(folder):
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"]


def lines(folder):
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_a_table_whose_columns_are_reordered_between_runs_is_learnt_as_well(play, table):
    """On warm nodes; the server's process is new for each run, as its path is here."""
    nodes = {"data-root": str(table)}
    assert accuracy(play(run_id=1, node_config=nodes)) > 0.9
    new = table.parent / "new"
    new.mkdir()
    for folder in (table, new):
        write_table(folder, order=(1, 2, 0))
    assert accuracy(play(run_id=2, node_config=nodes, **{"data-root": str(new)})) > 0.9


def test_a_change_on_the_server_during_a_run_ends_it_with_the_name_of_the_file(play, table):
    """Nodes have a copy of their own, which does not change."""

    def change_after_training(node, message):
        if message.metadata.message_type == "train":
            write_table(table, seed=1)
        return False

    copy = table.parent / "copy"
    copy.mkdir()
    write_table(copy)
    with pytest.raises(FilesChangedError, match=r"train\.csv.*new run"):
        play(broken=change_after_training, node_config={"data-root": str(copy)})


def test_a_run_is_not_resumed_with_other_data_on_the_server(play, table):
    play()
    write_table(table, seed=1)
    with pytest.raises(CheckpointError, match="dataset = 'csv'"):
        play(run_id=2, resume="1", **{"num-rounds": 3})
    write_table(table)
    assert accuracy(play(run_id=3, resume="1", **{"num-rounds": 3}).parent / "1") > 0.9


def test_a_node_whose_data_change_during_a_run_is_left_out_with_the_reason(play, table):
    """The server has another copy."""
    copy = table.parent / "copy"
    copy.mkdir()
    write_table(copy)

    def change_after_the_meeting(node, message):
        if message.metadata.message_type == "train":
            write_table(copy, seed=1)
        return False

    with pytest.raises(Exception, match=str(copy)):
        play(broken=change_after_the_meeting, node_config={"data-root": str(copy)})


def test_a_run_records_what_was_read_in_journal_about_card_and_report(play):
    folder = play()
    about = json.loads((folder / "about.json").read_text())
    nodes = about["nodes"]
    assert {own["samples"] for own in nodes.values()} == {54}
    prints = {own["fingerprint"] for own in nodes.values()}
    assert len(prints) == NODES
    assert all(len(own) == 32 for own in [*prints, about["fingerprint"]])
    (read,) = (line for line in lines(folder) if "read" in line)
    assert read["round"] == 0
    assert {node: own["fingerprint"] for node, own in read["read"].items()} == {
        node: own["fingerprint"] for node, own in nodes.items()
    }
    assert read["read_by_server"] == about["fingerprint"]
    run = read_run(folder)
    assert about["fingerprint"] in model_card(run, "model.onnx")
    assert all(own in run_page(run) for own in [*prints, about["fingerprint"]])


def test_of_two_runs_nobody_can_tell_that_a_node_had_the_same_data(play):
    """Nor can anyone who guesses the data: the key never leaves the node."""
    seen = [
        {own["fingerprint"] for own in json.loads((f / "about.json").read_text())["nodes"].values()}
        for f in (play(run_id=1), play(run_id=2))
    ]
    assert not seen[0] & seen[1]


def test_the_fingerprint_differs_between_runs_and_nodes_though_the_data_do_not(tmp_path, table):
    def fingerprint(state, run_id):
        node = {"dataset": "digits", "state-dir": str(tmp_path / state), "device": "cpu"}
        config = {"dataset": "private", "private.shape": "1x8x8"}
        session = Session.of(Context(run_id, 5, node, RecordDict(), config))
        return session.store.keyed(session.data.fingerprint)

    prints = [fingerprint("a", 1), fingerprint("a", 1), fingerprint("a", 2), fingerprint("b", 1)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
