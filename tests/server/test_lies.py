"""What a node may not make the server believe, by what it says of itself and of others."""

import re
from copy import deepcopy

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from torch import nn

from benchmarks.in_process import FIRST_NODE, InProcessGrid
from flwr_distill.links.records import Introduction
from flwr_distill.protocol.arrays import as_record, model_arrays
from flwr_distill.protocol.meeting import DescribeConfig
from flwr_distill.protocol.registry import all_methods, phases_of
from flwr_distill.server.aggregation import Aggregate, aggregate_finite
from flwr_distill.server.record.journal import Journal
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.fedhead.method import AGGREGATE_SECTOR, HAND_OUT
from flwr_distill.strategies.fednova.strategy import FedNova
from flwr_distill.strategies.flower.strategy import QFedAvg
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.strategies.hfldd.method import LABEL_KNOWLEDGE, RECEIVE
from flwr_distill.strategies.scaffold.strategy import SCAFFOLD
from flwr_distill.task.errors import SettingsError
from tests.grids import messages_to, screening_grid
from tests.server.run_folder import journal as journal_of

START = {"weight": np.zeros((1, 2), np.float32), "bias": np.zeros(1, np.float32)}
SAMPLES = {"num-examples": 8, "train-loss": 1.0, "train-accuracy": 0.5, "num-steps": 4}


def trained(step=1.0, **changed):
    """A node's reply to a train message."""
    numbers = {**SAMPLES, **{key.replace("_", "-"): value for key, value in changed.items()}}
    told = MetricRecord({key: value for key, value in numbers.items() if value is not None})
    arrays = as_record({name: w + np.float32(step) for name, w in START.items()})
    return RecordDict({"arrays": arrays, "metrics": told})


def grid_of(answers, method="fedavg", **settings):
    nodes = {
        FIRST_NODE + i: lambda _, answer=answer: deepcopy(answer)
        for i, answer in enumerate(answers)
    }
    phases = phases_of(all_methods()[method])
    return screening_grid(InProcessGrid(nodes), model=START, phases=phases, **settings)


def asked(answers, method="fedavg", kind="train", records=None, **settings):
    """Whether each node's reply is handed on."""
    grid = grid_of(answers, method, **settings)
    records = records or {"arrays": as_record(START)}
    replies = grid.send_and_receive(messages_to(grid.get_node_ids(), kind, **records))
    return [reply.has_content() for reply in replies]


def moved(strategy, answers, method, **config):
    """The weights after a round of a strategy, from 0."""
    grid = grid_of(answers, method)
    told = ConfigRecord({"local-epochs": 2, "batch-size": 4, **config})
    messages = strategy.configure_train(1, as_record(START), told, grid)
    arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    return arrays["weight"].numpy()


def test_a_metric_counts_by_its_name_on_the_wire_alone():
    """Else a reply that says num_examples would pass its schema, and nobody would compare it."""
    other = trained(num_examples=None)
    other["metrics"]["num_examples"] = 8
    assert asked([other, trained(), trained()]) == [False, True, True]


@pytest.mark.parametrize(
    ("method", "key"),
    [("fednova", "num_steps"), ("fedfa", "train_accuracy"), ("qfedavg", "train_loss")],
)
def test_who_omits_what_a_method_needs_is_set_aside_and_not_the_other_of_two(method, key):
    assert asked([trained(**{key: None}), trained()], method) == [False, True]


def test_one_of_two_in_a_sector_does_not_evict_the_other_by_omitting_its_loss():
    def told(**more):
        return RecordDict({"metrics": MetricRecord({**SAMPLES, "update-norm": 1.0, **more})})

    silent = told()
    del silent["metrics"]["train-loss"]
    assert asked([silent, told()], "fedhead", "train.sector") == [False, True]


TRAINING = sorted(
    name
    for name, method in all_methods().items()
    if (phase := phases_of(method).get("train")) and phase.averaged
)


@pytest.mark.parametrize("method", TRAINING)
def test_who_sends_back_what_it_got_is_set_aside_with_any_strategy(method, tmp_path):
    answers = [trained(step) for step in (1.0, 1.5, 0.0, 0.7)]
    for answer in answers:
        if method.endswith("-client"):
            answer["metrics"]["norm_bit"] = 1
        if method == "scaffold":
            answer["control-variate"] = as_record(START)
    journal = Journal(tmp_path / "journal.jsonl")
    assert asked(answers, method, journal=journal) == [True, True, False, True]
    assert journal.set_aside == 1


def test_a_loss_below_0_is_set_aside_where_its_power_weighs_the_node():
    assert asked([trained(train_loss=-1.0)], "qfedavg") == [False]
    assert asked([trained(train_loss=-1.0)]) == [True]


def test_variances_below_0_are_set_aside():
    """The root of a mean of variances would be NaN, in a model whose weights are all finite."""
    model = {"1.running_var": np.ones(2, np.float32)}
    assert model_arrays(as_record(model), model)
    below = {"1.running_var": np.array([1, -1], np.float32)}
    with pytest.raises(ValueError, match="running_var holds a variance below 0"):
        model_arrays(as_record(below), model)


def test_a_control_variate_fits_the_types_of_the_model():
    wide = trained()
    wide["control-variate"] = as_record({"weight": np.full((1, 2), 1e300)})
    assert asked([wide], "scaffold") == [False]


def test_steps_of_fednova_are_those_that_samples_allow():
    """8 samples in minibatches of 4, twice, are 4 steps: more shrink a node's own update alone."""

    def with_claim(steps):
        answers = [trained(num_steps=steps), *[trained()] * 4]
        return moved(FedNova(model=nn.Linear(2, 1)), answers, "fednova")

    np.testing.assert_array_equal(with_claim(1), with_claim(4))
    np.testing.assert_allclose(with_claim(8), with_claim(4) * 4.5 / 5)
    np.testing.assert_allclose(with_claim(10**15), with_claim(4) * 4 / 5, rtol=1e-6)


def after_a_loss(loss, q):
    """The weights after a round of q-FedAvg with a node that claims this loss."""
    strategy = QFedAvg(client_learning_rate=1.0, q=q, train_loss_key="train-loss")
    answers = [trained(-1.0, train_loss=loss), *[trained()] * 4]
    return moved(strategy, answers, "qfedavg")


def test_a_loss_weighs_at_most_ten_times_the_median_in_q_fedavg():
    np.testing.assert_array_equal(after_a_loss(1e15, 1.0), after_a_loss(10.0, 1.0))
    assert (after_a_loss(5.0, 1.0) > after_a_loss(10.0, 1.0)).all()


def test_a_loss_of_0_does_not_keep_q_fedavg_from_learning():
    """The step is divided by ``q loss^(q - 1)`` times a node's squared update, and more."""
    np.testing.assert_array_equal(after_a_loss(0.0, 0.1), after_a_loss(0.1, 0.1))
    assert (after_a_loss(0.0, 0.1) > 0.5 * after_a_loss(1.0, 0.1)).all()


ROUTE = {"token": "0" * 32, "largest": 1000}


@pytest.mark.parametrize(
    ("name", "size", "passes"),
    [("parcel.1", 1000, True), ("parcel.1", 2**62, False), ("parcel.2", 10, False)],
)
def test_a_parcel_counts_where_the_server_gave_a_route_and_up_to_its_bytes(name, size, passes):
    receipt = ConfigRecord({"link": "direct", "token": "0" * 32, "num-bytes": size})
    grid = grid_of([RecordDict({name: receipt})], "fedhead")
    sent = RecordDict({"arrays": as_record(START), "route.1": ConfigRecord(ROUTE)})
    (reply,) = grid.send_and_receive([Message(sent, FIRST_NODE, HAND_OUT)])
    assert reply.has_content() == passes
    assert grid.ledger.link_bytes == passes * size


def test_a_head_rejects_no_more_parcels_than_it_was_sent(tmp_path):
    numbers = {"num-examples": 3, "kept-parcels": [], "rejected": 10**15}
    reply = RecordDict({"metrics": MetricRecord(numbers)})
    journal = Journal(tmp_path / "journal.jsonl")
    records = {"delivery.1": ConfigRecord()}
    assert asked([reply], "hfldd", RECEIVE, records, journal=journal) == [False]
    assert journal.set_aside == 1
    reply["metrics"]["rejected"] = 1
    assert asked([reply], "hfldd", RECEIVE, records) == [True]


@pytest.mark.parametrize(("rank", "passes"), [(0, True), (1, True), (2, False)])
def test_a_leader_rejects_its_own_model_and_those_that_it_was_sent_alone(rank, passes):
    reply = trained()
    del reply["metrics"]
    reply["config"] = ConfigRecord({f"rejected.{rank}": "it holds NaN"})
    records = {"delivery.1": ConfigRecord()}
    assert asked([reply], "fedhead", AGGREGATE_SECTOR, records) == [passes]


def test_log_and_journal_hold_no_control_characters_of_a_node(tmp_path):
    reply, journal = trained(), Journal(tmp_path / "journal.jsonl")
    reply["metrics"]["\n\x1b[31mRound 9 failed"] = 1
    assert asked([reply], journal=journal) == [False]
    (entry,) = journal_of(tmp_path, "set_aside")
    assert entry["reason"].isprintable()


def test_a_reply_of_very_many_keys_is_not_compared_key_by_key():
    content = RecordDict({"metrics": MetricRecord({"num-examples": 3})})
    content["config"] = ConfigRecord({f"k{i}": i for i in range(10_001)})
    assert asked([content], kind="query.describe") == [False]


@pytest.mark.parametrize("name", [str(FIRST_NODE), f"node {FIRST_NODE}", "a\x1b[0m"])
@pytest.mark.parametrize("key", ["name", "dataset"])
def test_nodes_have_no_names_that_the_log_takes_for_another_node(key, name):
    with pytest.raises(SettingsError):
        DescribeConfig.checked({key: name}, "config")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("address", "h" * 301),
        ("certificate", bytes(2**16 + 1)),
        ("signature", bytes(1025)),
        ("permit-key", bytes(65)),
    ],
)
def test_an_introduction_is_small_since_every_peer_gets_it(key, value):
    assert Introduction.checked({"public-key": bytes(32)}, "introduction")
    with pytest.raises(SettingsError, match=re.escape(key)):
        Introduction.checked({"public-key": bytes(32), key: value}, "introduction")


def test_a_node_without_samples_takes_no_part():
    grid = grid_of([RecordDict({"metrics": MetricRecord({"num-examples": 0})})])
    about = Directory().look_up(grid, [FIRST_NODE])
    assert about[FIRST_NODE].missing == ("it has no training samples",)


def test_soft_labels_of_another_form_do_not_decide_which_form_counts():
    def labels(shape):
        chances = np.full(shape, 1 / shape[1], np.float32)
        metrics = MetricRecord({"num-examples": 3, "own-divergence": 0.1})
        return RecordDict({"arrays": as_record({"soft-labels": chances}), "metrics": metrics})

    grid = grid_of([labels((4, 1000)), labels((6, 3))], "hfldd")
    strategy = HFLDD(auxiliary_size=6, num_classes=3)
    strategy.ask_labels(grid.get_node_ids(), grid)
    assert list(strategy.labels) == [FIRST_NODE + 1]
    assert LABEL_KNOWLEDGE in phases_of(all_methods()["hfldd"])


def test_a_round_that_leaves_infinity_in_a_strategys_state_is_forgotten():
    strategy = SCAFFOLD()

    def aggregate(server_round, replies):
        strategy.c = {"weight": np.array([np.inf], np.float32)}
        return as_record(START), MetricRecord()

    result = aggregate_finite(strategy, aggregate, 1, [])
    assert result == Aggregate(None, None, ("the strategy's new state",))
    assert strategy.c == {}


def test_a_strategy_may_keep_the_model_that_it_sent():
    """Flower's server-side differential privacy does; on the wire, arrays hold memory views."""
    strategy = FedAvg()
    strategy.sent = as_record(START)
    for array in strategy.sent.values():
        array.slice_array()
    result = aggregate_finite(strategy, lambda *_: (strategy.sent, MetricRecord()), 1, [])
    assert result.arrays is strategy.sent
