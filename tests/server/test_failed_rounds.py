"""A run in which nothing is learnt never looks like a success."""

import json
import re
from logging import ERROR

import numpy as np
import pytest
from flwr.app import Array, Context, RecordDict
from safetensors.numpy import load_file

from flwr_distill.server.app import main
from flwr_distill.server.grid.failures import reason_of
from flwr_distill.server.record.checkpoint import checkpoints, load_checkpoint
from flwr_distill.server.rounds import NothingLearntError
from flwr_distill.strategies.flower.strategy import FedAdam
from flwr_distill.strategies.hfldd.method import DISTILL

NODES = 3
QUICK = {
    "strategy": "fedavg",
    "num-rounds": 4,
    "min-nodes": NODES,
    "partition.scheme": "iid",
    "train.local-epochs": 1,
    "train.batch-size": 64,
}


@pytest.fixture
def play(client_grid, tmp_path, little_distillation):
    """Run our ServerApp on nodes that fail in the rounds named; give the run's folder."""

    def play(failing_rounds=(), phase="train", nodes=range(NODES), **settings):
        config = {**QUICK, **little_distillation, "runs-dir": str(tmp_path), **settings}

        def broken(index, message):
            told = message.content.config_records.get("config", {})
            here = message.metadata.message_type.startswith(phase)
            return index in nodes and here and told.get("server-round", 1) in failing_rounds

        main(client_grid(NODES, config, broken), Context(1, 1, {}, RecordDict(), config))
        return tmp_path / "1"

    return play


def red(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == ERROR]


def test_rounds_without_anything_usable_are_said_with_the_nodes_reasons_and_end_the_run(
    play, caplog, tmp_path
):
    with pytest.raises(NothingLearntError) as error:
        play((1, 2, 3, 4))
    reasons = (
        "no node sent anything usable for train: node-0, node-1 and node-2: this node is broken"
    )
    assert red(caplog) == [f"Round {number} failed: {reasons}" for number in (1, 2)]
    assert str(error.value).startswith(f"2 failed rounds, and patience-failed = 2: {reasons} (")
    assert 'resume = "1", or raise patience-failed' in str(error.value)
    assert "\n" not in str(error.value)
    assert set(checkpoints(tmp_path / "1")) == {0, 1, 2}
    assert not (tmp_path / "1" / "model.safetensors").exists()


def test_the_report_of_such_a_run_opens_with_it(play, tmp_path):
    with pytest.raises(NothingLearntError):
        play((1, 2))
    page = (tmp_path / "1" / "report.html").read_text()
    opening = page[page.index("</h1>") : page.index('<dl class="numbers">')]
    assert "What went wrong" in opening
    assert opening.index("The run failed. NothingLearntError: 2 failed rounds") < opening.index(
        "Round 1 failed: no node"
    )


def test_a_model_with_infinity_is_left_out_and_the_strategy_forgets_the_round(
    play, caplog, monkeypatch
):
    moments, aggregate = [], FedAdam.aggregate_train

    def broken_in_round_2(self, server_round, replies):
        moments.append(None if self.m_t is None else {k: v.copy() for k, v in self.m_t.items()})
        arrays, metrics = aggregate(self, server_round, replies)
        if server_round == 2:
            for name, array in arrays.items():
                arrays[name] = Array(array.numpy() * np.float32("inf"))
        return arrays, metrics

    monkeypatch.setattr(FedAdam, "aggregate_train", broken_in_round_2)
    folder = play(strategy="fedadam", **{"num-rounds": 3, "keep-checkpoints": 4})
    (said,) = red(caplog)
    assert re.fullmatch("Round 2 failed: the new model's .* held NaN or infinity, .*", said)
    np.testing.assert_equal(moments[2], moments[1])
    model = load_file(folder / "model.safetensors")
    assert all(np.isfinite(array).all() for array in model.values())
    first, second = (load_checkpoint(checkpoints(folder)[n]).arrays for n in (1, 2))
    for name in first:
        np.testing.assert_array_equal(first[name].numpy(), second[name].numpy())


def test_a_run_of_one_failed_round_is_no_success(play):
    with pytest.raises(NothingLearntError, match=r"^nothing was learnt in 1 round: no node sent"):
        play((1,), **{"num-rounds": 1})


def test_what_was_learnt_before_is_exported_and_stays_resumable(play, tmp_path):
    with pytest.raises(NothingLearntError, match="1 failed round, and patience-failed = 1"):
        play((2,), **{"patience-failed": 1})
    model = load_file(tmp_path / "1" / "model.safetensors")
    learnt = load_checkpoint(checkpoints(tmp_path / "1")[1]).arrays
    assert all((learnt[name].numpy() == array).all() for name, array in model.items())


def test_a_round_that_learns_begins_the_count_anew_and_the_report_still_tells(play, caplog):
    folder = play((1, 3))
    assert (folder / "summary.json").exists()
    assert [text.partition(":")[0] for text in red(caplog)] == ["Round 1 failed", "Round 3 failed"]
    assert "What went wrong" in (folder / "report.html").read_text()


def test_a_node_that_fails_under_flowers_own_strategy_is_a_warning_by_its_name(play):
    folder = play((1,), nodes=(1,), **{"num-rounds": 1})
    lines = [json.loads(line) for line in (folder / "journal.jsonl").open()]
    assert [line["warning"] for line in lines if "warning" in line] == [
        "1 node failed in train: node-1: this node is broken"
    ]


def test_virtual_data_that_no_node_can_make_end_the_run_before_its_first_round(play, tmp_path):
    with pytest.raises(NothingLearntError, match=r"data .*: node-\d and node-\d: this node"):
        play((1,), DISTILL, strategy="hfldd", **{"hfldd.groups": 3})
    assert set(checkpoints(tmp_path / "1")) == {0}


def test_ensembles_that_no_leader_can_distil_are_failed_rounds(play, caplog):
    config = {"strategy": "fedhead", "fedhead.sectors": 1}
    with pytest.raises(NothingLearntError, match=r"usable for train\.distill_sector: node-\d: "):
        play((1, 2), "train.distill_sector", **config)
    assert len(red(caplog)) == 2


def test_a_round_whose_only_superclient_rejects_its_model_has_failed(
    client_grid, little_distillation, tmp_path, monkeypatch, caplog
):
    def unreadable(*parcel):
        raise ValueError("no model of this run")

    monkeypatch.setattr("flwr_distill_baselines.fedseq.client.receive", unreadable)
    own = {"strategy": "fedseq", "min-nodes": 2, "runs-dir": str(tmp_path)}
    config = {**QUICK, **little_distillation, **own}
    with pytest.raises(NothingLearntError, match="2 failed rounds"):
        main(client_grid(2, config), Context(1, 1, {}, RecordDict(), config))
    why = "the strategy could use nothing that nodes sent: the log says why"
    assert red(caplog) == [f"Round {number} failed: {why}" for number in (1, 2)]


def test_a_round_whose_replies_the_strategy_sets_aside_has_failed_and_says_why(
    play, monkeypatch, caplog
):
    monkeypatch.setattr(
        "flwr_distill.distill.virtual_data.VirtualData.to_bytes", lambda data: b"junk"
    )
    with pytest.raises(NothingLearntError):
        play(strategy="feddm", **{"num-rounds": 1})
    (said,) = red(caplog)
    assert "nothing that nodes sent: node-0, node-1 and node-2: " in said


SHARED = "RuntimeError: Some tensors share memory"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "<class 'flwr_distill.task.errors.SettingsError'>:<'no such file'>",
            "SettingsError: no such file",
        ),
        ("<class 'ValueError'>:<'one\ntwo'>", "ValueError: one two"),
        ("<class 'RuntimeError'>:<'\n    Some tensors share memory'>", SHARED),
        ("out of memory\nTraceback", "out of memory Traceback"),
        ("a\x1b[31mred\x07", "a?[31mred?"),
        ("x" * 1000, f"{'x' * 296} ..."),
        (" \n ", "no reason given"),
    ],
)
def test_a_reason_is_one_short_line_that_cannot_drive_a_terminal(said, told):
    assert reason_of(said) == told
