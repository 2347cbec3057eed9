"""Strategies of others with a loop, an evaluation or a demand for nodes of their own."""

import errno
from itertools import pairwise

import pytest
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg, FedProx, Result
from safetensors.numpy import load_file

from flwr_distill.protocol.meeting import DESCRIBE
from flwr_distill.server.export.model import export_model, run_to_export
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.record.checkpoint import checkpoints
from flwr_distill.server.record.writing import ResultsError
from flwr_distill.server.roster import TooFewNodesError
from flwr_distill.server.rounds import NothingLearntError
from flwr_distill.task.errors import SettingsError
from tests.server.run_folder import journal, rows

ROUNDS = 3
QUICK = {"num-rounds": ROUNDS, "partition.scheme": "iid", "train.batch-size": 64}


class OwnEvaluation(FedAvg):
    """Flower's loop, with an evaluation in place of the ServerApp's."""

    def start(self, *args, **kwargs):
        evaluate = {"evaluate_fn": lambda number, arrays: MetricRecord({"size": len(arrays)})}
        result = super().start(*args, **{**kwargs, **evaluate})
        assert result.evaluate_metrics_serverapp.keys() == {*range(ROUNDS + 1)}
        return result


class OwnLoop(FedAvg):
    """A loop with Flower's hooks, and no evaluation."""

    def start(self, grid, initial_arrays, num_rounds, timeout, train_config, **_):
        result = Result(arrays=initial_arrays)
        for number in range(1, num_rounds + 1):
            messages = self.configure_train(number, result.arrays, train_config, grid)
            replies = grid.send_and_receive(messages, timeout=timeout)
            arrays, _ = self.aggregate_train(number, replies)
            result.arrays = arrays or result.arrays
        return result


class SomeEvaluations(FedAvg):
    """A loop that has every second round evaluated."""

    def start(self, grid, initial_arrays, num_rounds, evaluate_fn, train_config, **_):
        result = Result(arrays=initial_arrays)
        for number in range(1, num_rounds + 1):
            messages = self.configure_train(number, result.arrays, train_config, grid)
            result.arrays, _ = self.aggregate_train(number, grid.send_and_receive(messages))
            if number % 2 == 0:
                assert evaluate_fn(number, result.arrays)["accuracy"] > 0
        return result


class NoHooks(FedAvg):
    """A loop of which the ServerApp sees the messages alone."""

    def start(self, grid, initial_arrays, num_rounds, train_config, **_):
        arrays, inner = initial_arrays, FedAvg()
        for number in range(1, num_rounds + 1):
            messages = inner.configure_train(number, arrays, ConfigRecord({**train_config}), grid)
            arrays, _ = inner.aggregate_train(number, grid.send_and_receive(messages))
        return Result(arrays=arrays)


class EndsEarly(OwnLoop):
    def start(self, *args, **kwargs):
        return super().start(*args, **{**kwargs, "num_rounds": 2})


class NoResult(OwnLoop):
    def start(self, *args, **kwargs):
        super().start(*args, **kwargs)


class OwnParameters(FedAvg):
    def start(self, grid, initial_arrays, num_rounds=3):
        raise AssertionError


class OwnKey(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        own = ConfigRecord({**config, "temperature": 2.0})
        return super().configure_train(server_round, arrays, own, grid)


class OwnEvaluateKey(FedAvg):
    def configure_evaluate(self, server_round, arrays, config, grid):
        own = ConfigRecord({**config, "temperature": 2.0})
        return super().configure_evaluate(server_round, arrays, own, grid)


class KnownKeys(FedProx):
    def configure_train(self, server_round, arrays, config, grid):
        own = ConfigRecord({**config, "lr": 0.01, "local-epochs": 2})
        return super().configure_train(server_round, arrays, own, grid)


@pytest.fixture
def run(play):
    """Run our ServerApp with a strategy class of this file; give the run's folder."""

    def run(strategy, **settings):
        return play(QUICK, strategy=f"{strategy.__module__}:{strategy.__qualname__}", **settings)

    return run


@pytest.mark.parametrize("strategy", [OwnEvaluation, OwnLoop, SomeEvaluations])
def test_a_run_with_a_loop_of_its_own_has_all_rounds_report_checkpoints_and_export(
    run, strategy, tmp_path
):
    folder = run(strategy)
    assert [row["round"] for row in rows(folder)] == [0, 1, 2, 3]
    losses = [row["loss"] for row in rows(folder)]
    assert all(after < before for before, after in pairwise(losses))
    assert [line["round"] for line in journal(folder, "phase") if line["phase"] == "train"] == [
        1,
        2,
        3,
    ]
    assert 3 in checkpoints(folder)
    assert (folder / "report.html").exists()
    assert (folder / "summary.json").exists()
    assert export_model(run_to_export(read_run(folder)), "onnx", tmp_path / "out").exists()


def test_such_a_run_learns_what_the_same_run_with_flowers_loop_learns(run):
    own = load_file(run(OwnLoop) / "model.safetensors")
    flowers = load_file(run(FedAvg) / "model.safetensors")
    assert own.keys() == flowers.keys()
    assert all((own[name] == array).all() for name, array in flowers.items())


def test_a_loop_without_flowers_hooks_has_its_result_as_the_last_round(run):
    folder = run(NoHooks)
    first, last = rows(folder)
    assert (first["round"], last["round"]) == (0, ROUNDS)
    assert last["loss"] < first["loss"]
    assert (folder / "model.safetensors").exists()


def test_a_loop_may_end_before_the_last_round(run):
    assert [row["round"] for row in rows(run(EndsEarly))] == [0, 1, 2]


def test_a_failed_round_of_a_loop_of_its_own_is_one_and_no_resumption_is_offered(
    run, tmp_path, caplog
):
    def broken(node, message):
        return message.metadata.message_type == "train"

    with pytest.raises(NothingLearntError, match=r"2 failed rounds.*this node is broken") as error:
        run(OwnLoop, broken=broken)
    assert "resume" not in str(error.value) + caplog.text
    assert [row["round"] for row in rows(tmp_path / "1")] == [0, 1, 2]
    assert (tmp_path / "1" / "report.html").exists()


def test_a_full_disk_offers_no_resumption_of_a_loop_of_its_own(run, monkeypatch):
    def full(*rest, **named):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("flwr_distill.server.record.checkpoint.save_file", full)
    with pytest.raises(ResultsError, match="make room") as error:
        run(OwnLoop)
    assert "resume" not in str(error.value)


def test_a_loop_that_returns_no_result_leaves_report_and_model(run, tmp_path):
    with pytest.raises(SettingsError, match=r"NoResult\.start returned NoneType"):
        run(NoResult)
    assert [row["round"] for row in rows(tmp_path / "1")] == [0, 1, 2, 3]
    assert (tmp_path / "1" / "report.html").exists()
    assert (tmp_path / "1" / "model.safetensors").exists()


def test_a_start_that_does_not_take_flowers_arguments_is_refused_before_any_node_is_asked(
    run, play
):
    with pytest.raises(SettingsError, match=r"OwnParameters\.start .*timeout"):
        run(OwnParameters)
    assert play.grid.pushed == []


def test_a_train_config_key_that_no_node_reads_is_refused_before_any_node_trains(run, play):
    with pytest.raises(SettingsError, match=r"'temperature'.*local-epochs"):
        run(OwnKey)
    assert {message.metadata.message_type for message in play.grid.pushed} == {DESCRIBE}


def test_an_evaluate_config_key_that_no_node_reads_is_refused_before_any_node_evaluates(run, play):
    with pytest.raises(SettingsError, match=r"evaluate.*'temperature'.*server-round"):
        run(OwnEvaluateKey, fraction_evaluate=1.0)
    assert "evaluate" not in {message.metadata.message_type for message in play.grid.pushed}


def test_keys_of_train_settings_and_of_flowers_strategies_are_read(run):
    folder = run(KnownKeys)
    assert rows(folder)[-1]["set_aside"] == 0


@pytest.mark.slow
def test_a_strategy_that_wants_more_nodes_than_there_are_ends_with_an_error_that_names_it(
    run, tmp_path
):
    with pytest.raises(TooFewNodesError, match=r"phase-timeout = 5 s .*min_available_nodes = 5"):
        run(FedAvg, phase_timeout=5.0, strategy_args='{"min_available_nodes": 5}')
    assert (tmp_path / "1" / "report.html").exists()
