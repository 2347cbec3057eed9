"""A run records what was read, and the server keeps to what it has read."""

import json
from functools import partial

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flwr_distill.client.session import Session
from flwr_distill.server.export.card import model_card
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.page.run_page import run_page
from flwr_distill.server.record.checkpoint import CheckpointError
from flwr_distill.task.file_state import FilesChangedError
from tests.errors import at
from tests.server.run_folder import journal, rows


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
def train(play, tmp_path, table):
    """Run our ServerApp on the table, by two nodes."""
    config = {
        "dataset": "csv",
        "data-root": str(table),
        "model": "mlp",
        "partition.scheme": "index-file",
        "partition.index-file": str(table / "split.json"),
        "train.local-epochs": 2,
        "train.lr": 0.1,
        "runs-dir": str(tmp_path / "runs"),
    }
    return partial(play, config, nodes=2)


def copy_of(table):
    """Another copy, which does not change with the table."""
    folder = table.parent / "copy"
    folder.mkdir()
    write_table(folder)
    return folder


def change_at_training(folder):
    def change(node, message):
        if message.metadata.message_type == "train":
            write_table(folder, seed=1)
        return False

    return change


def accuracy(folder):
    return rows(folder)[-1]["accuracy"]


def fingerprints(folder):
    about = json.loads((folder / "about.json").read_text())
    return {node: own["fingerprint"] for node, own in about["nodes"].items()}


def test_a_table_whose_columns_are_reordered_between_runs_is_learnt_as_well(train, table):
    """On warm nodes; the server's process is new for each run, as its path is here."""
    nodes = {"data-root": str(table)}
    assert accuracy(train(node_config=nodes)) > 0.9
    new = table.parent / "new"
    new.mkdir()
    for folder in (table, new):
        write_table(folder, order=(1, 2, 0))
    assert accuracy(train(run_id=2, node_config=nodes, data_root=str(new))) > 0.9


def test_a_change_on_the_server_during_a_run_ends_it_with_the_name_of_the_file(train, table):
    copy = copy_of(table)
    with pytest.raises(FilesChangedError, match=r"train\.csv", check=at("dataset", value="csv")):
        train(broken=change_at_training(table), node_config={"data-root": str(copy)})


def test_a_run_is_not_resumed_with_other_data_on_the_server(train, table):
    train()
    write_table(table, seed=1)
    with pytest.raises(CheckpointError, match="dataset = 'csv'", check=at("resume", value="1")):
        train(run_id=2, resume="1", num_rounds=3)
    write_table(table)
    assert accuracy(train(run_id=3, resume="1", num_rounds=3).parent / "1") > 0.9


def test_a_node_whose_data_change_during_a_run_is_left_out_with_the_reason(train, table):
    copy = copy_of(table)
    with pytest.raises(Exception, match=str(copy)):
        train(broken=change_at_training(copy), node_config={"data-root": str(copy)})


def test_a_run_records_what_was_read_in_journal_about_card_and_report(train):
    folder = train()
    about = json.loads((folder / "about.json").read_text())
    assert {own["samples"] for own in about["nodes"].values()} == {54}
    prints = {*fingerprints(folder).values()}
    assert len(prints) == 2
    assert all(len(own) == 32 for own in [*prints, about["fingerprint"]])
    (read,) = journal(folder, "read")
    assert read["round"] == 0
    assert {node: own["fingerprint"] for node, own in read["read"].items()} == fingerprints(folder)
    assert read["read_by_server"] == about["fingerprint"]
    run = read_run(folder)
    assert about["fingerprint"] in model_card(run, "model.onnx")
    assert all(own in run_page(run) for own in [*prints, about["fingerprint"]])


def test_of_two_runs_nobody_can_tell_that_a_node_had_the_same_data(train):
    """Nor can anyone who guesses the data: the key never leaves the node."""
    first, second = ({*fingerprints(train(run_id=run_id)).values()} for run_id in (1, 2))
    assert not first & second


def test_the_fingerprint_differs_between_runs_and_nodes_though_the_data_do_not(tmp_path, table):
    def fingerprint(state, run_id):
        node = {"dataset": "digits", "state-dir": str(tmp_path / state), "device": "cpu"}
        config = {"dataset": "private", "private.shape": "1x8x8"}
        session = Session.of(Context(run_id, 5, node, RecordDict(), config))
        return session.store.keyed(session.data.fingerprint)

    prints = [fingerprint("a", 1), fingerprint("a", 1), fingerprint("a", 2), fingerprint("b", 1)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
