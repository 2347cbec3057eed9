"""A run in which nothing is learnt never looks like a success."""

import re
from logging import ERROR

import numpy as np
import pytest
from flwr.app import Array
from safetensors.numpy import load_file

from flwr_distill.protocol.replies import reason_of
from flwr_distill.server.record.checkpoint import checkpoints, load_checkpoint
from flwr_distill.server.rounds import NothingLearntError
from flwr_distill.strategies.flower.strategy import FedAdam
from flwr_distill.strategies.hfldd.method import DISTILL
from tests.errors import at
from tests.server.run_folder import journal

QUICK = {"num-rounds": 4, "partition.scheme": "iid", "train.batch-size": 64}


@pytest.fixture
def fail(play, little_distillation):
    """Run our ServerApp on nodes that fail in the rounds named; give the run's folder."""

    def fail(failing_rounds=(), phase="train", nodes=range(3), **settings):
        def broken(index, message):
            config = message.content.config_records.get("config", {})
            here = message.metadata.message_type.startswith(phase)
            return index in nodes and here and config.get("server-round", 1) in failing_rounds

        return play({**QUICK, **little_distillation}, broken=broken, **settings)

    return fail


def red(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == ERROR]


def test_rounds_without_anything_usable_are_said_with_the_nodes_reasons_and_end_the_run(
    fail, caplog, tmp_path
):
    with pytest.raises(NothingLearntError, check=at("patience-failed", value=2)) as error:
        fail((1, 2, 3, 4))
    reasons = (
        "no node sent anything usable for train: node-0, node-1 and node-2: this node is broken"
    )
    assert red(caplog) == [f"Round {number} failed: {reasons}" for number in (1, 2)]
    assert error.value.problem == f"2 failed rounds: {reasons}"
    assert 'resume = "1"' in error.value.remedy
    assert "\n" not in str(error.value)
    assert set(checkpoints(tmp_path / "1")) == {0, 1, 2}
    assert not (tmp_path / "1" / "model.safetensors").exists()


def test_the_report_of_such_a_run_opens_with_it(fail, tmp_path):
    with pytest.raises(NothingLearntError):
        fail((1, 2))
    page = (tmp_path / "1" / "report.html").read_text()
    opening = page[page.index("</h1>") : page.index('<dl class="numbers">')]
    assert "What went wrong" in opening
    why, first = "The run failed. NothingLearntError: patience-failed", "Round 1 failed: no node"
    assert opening.index(why) < opening.index(first)


def test_a_model_with_infinity_is_left_out_and_the_strategy_forgets_the_round(
    fail, caplog, monkeypatch
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
    folder = fail(strategy="fedadam", num_rounds=3, keep_checkpoints=4)
    (said,) = red(caplog)
    assert re.fullmatch("Round 2 failed: the new model's .* had NaN or infinity, .*", said)
    np.testing.assert_equal(moments[2], moments[1])
    model = load_file(folder / "model.safetensors")
    assert all(np.isfinite(array).all() for array in model.values())
    first, second = (load_checkpoint(checkpoints(folder)[n]).arrays for n in (1, 2))
    for name in first:
        np.testing.assert_array_equal(first[name].numpy(), second[name].numpy())


def test_a_run_of_one_failed_round_is_no_success(fail):
    with pytest.raises(NothingLearntError, match=r"^nothing was learnt in 1 round: no node sent"):
        fail((1,), num_rounds=1)


def test_a_resumed_run_that_learns_nothing_more_ends_as_the_whole_one(fail):
    folder = fail((2,), num_rounds=1)
    learnt = load_file(folder / "model.safetensors")
    fail((2,), num_rounds=2, resume="latest")
    assert (folder / "summary.json").exists()
    model = load_file(folder / "model.safetensors")
    assert all((learnt[name] == array).all() for name, array in model.items())


def test_a_resumed_run_of_which_no_round_ever_learnt_is_no_success(fail):
    with pytest.raises(NothingLearntError):
        fail((1, 2), num_rounds=1)
    with pytest.raises(NothingLearntError):
        fail((1, 2), num_rounds=2, patience_failed=3, resume="latest")


def test_what_was_learnt_before_is_exported_and_stays_resumable(fail, tmp_path):
    with pytest.raises(NothingLearntError, check=at("patience-failed", value=1)):
        fail((2,), patience_failed=1)
    model = load_file(tmp_path / "1" / "model.safetensors")
    learnt = load_checkpoint(checkpoints(tmp_path / "1")[1]).arrays
    assert all((learnt[name].numpy() == array).all() for name, array in model.items())


def test_a_round_that_learns_begins_the_count_anew_and_the_report_still_tells(fail, caplog):
    folder = fail((1, 3))
    assert (folder / "summary.json").exists()
    assert [text.partition(":")[0] for text in red(caplog)] == ["Round 1 failed", "Round 3 failed"]
    assert "What went wrong" in (folder / "report.html").read_text()


def test_a_node_that_fails_under_flowers_own_strategy_is_a_warning_by_its_name(fail):
    folder = fail((1,), nodes=(1,), num_rounds=1)
    assert [line["warning"] for line in journal(folder, "warning")] == [
        "1 node failed in train: node-1: this node is broken"
    ]


def test_virtual_data_that_no_node_can_make_end_the_run_before_its_first_round(fail, tmp_path):
    with pytest.raises(NothingLearntError, match=r"data .*: node-\d and node-\d: this node"):
        fail((1,), DISTILL, strategy="hfldd", hfldd__groups=3)
    assert set(checkpoints(tmp_path / "1")) == {0}


def test_ensembles_that_no_leader_can_distil_are_failed_rounds(fail, caplog):
    with pytest.raises(NothingLearntError, match=r"usable for train\.distill_sector: node-\d: "):
        fail((1, 2), "train.distill_sector", strategy="fedhead", fedhead__sectors=1)
    assert len(red(caplog)) == 2


def test_a_round_whose_only_group_rejects_its_model_has_failed(
    play, little_distillation, monkeypatch, caplog
):
    def unreadable(*parcel):
        raise ValueError("no model of this run")

    monkeypatch.setattr("flwr_distill_baselines.common.passing.client.received_model", unreadable)
    with pytest.raises(NothingLearntError, match="2 failed rounds"):
        play({**QUICK, **little_distillation}, nodes=2, strategy="fedseq-zaccone")
    why = "the strategy could use nothing that nodes sent: the log says why"
    assert red(caplog) == [f"Round {number} failed: {why}" for number in (1, 2)]


def test_a_round_whose_replies_the_strategy_sets_aside_has_failed_and_says_why(
    fail, monkeypatch, caplog
):
    monkeypatch.setattr(
        "flwr_distill.distill.virtual_data.VirtualData.to_bytes", lambda data: b"junk"
    )
    with pytest.raises(NothingLearntError):
        fail(strategy="feddm", num_rounds=1)
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
        ("x" * 10**7, f"{'x' * 296} ..."),
        (" \n ", "no reason given"),
    ],
)
def test_a_reason_is_one_short_line_that_cannot_drive_a_terminal(said, told):
    assert reason_of(said) == told
