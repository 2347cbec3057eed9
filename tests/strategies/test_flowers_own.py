"""Every strategy that Flower has, with our nodes, and what Flower's rules do to our models."""

import inspect
import math

import flwr.serverapp.strategy as flower
import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, Strategy

from benchmarks.in_process import run_in_process
from flwr_distill.client.app import app
from flwr_distill.protocol.arrays import as_arrays, as_record
from flwr_distill.protocol.registry import built_in_methods
from flwr_distill.server.settings import RunSettings
from flwr_distill.strategies.common.registry import (
    create_aggregator,
    create_strategy,
    find_strategy,
)
from flwr_distill.strategies.flower import strategy as fitted
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import create_model
from flwr_distill.task.plugin import import_object

FLOWERS = {
    name: cls
    for name, cls in inspect.getmembers(flower, inspect.isclass)
    if issubclass(cls, Strategy) and not inspect.isabstract(cls)
}
OF_TREES = {"FedXgbBagging", "FedXgbCyclic"}
ON_WEIGHTS = ["FedAdagrad", "FedAdam", "FedAvgM", "FedYogi", "QFedAvg"]
NODES = 3


@pytest.fixture(autouse=True)
def no_garbage_is_collected(monkeypatch):
    """Flower does it for each record that it reads, which takes long in a process with torch."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


def name_of(flowers):
    """The method that is a class of Flower's, or that class fitted to our nodes."""
    classes = {name: import_object(m.strategy) for name, m in built_in_methods().items()}
    names = [name for name, cls in classes.items() if flowers in (cls, *cls.__bases__)]
    assert names, f"{flowers.__name__} is new in Flower: declare it in strategies/flower/method.py"
    return names[0]


@pytest.mark.parametrize("flowers", sorted(FLOWERS.keys() - OF_TREES))
def test_every_strategy_of_flowers_that_fits_runs_to_the_end_by_its_name(flowers):
    run_config = {
        "strategy": name_of(FLOWERS[flowers]),
        "num-rounds": 1,
        "partition.scheme": "iid",
        "train.local-epochs": 1,
        "train.batch-size": 64,
        "train.proximal-mu": 0.1,
    }
    rows = run_in_process(run_config, [{"num-partitions": NODES}] * NODES)
    assert [row["set_aside"] for row in rows] == [0, 0]
    losses = [row["loss"] for row in rows]
    assert len(set(losses)) == 2
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("flowers", sorted(OF_TREES))
def test_those_for_trees_are_refused_by_name_and_by_path(flowers):
    for name in (flowers.lower(), f"flwr.serverapp.strategy:{flowers}"):
        with pytest.raises(SettingsError, match=f"strategy = '{name}'.*nodes here train networks"):
            find_strategy(name)


@pytest.mark.parametrize(
    ("flowers", "name"),
    [
        ("QFedAvg", "qfedavg"),
        ("DifferentialPrivacyServerSideFixedClipping", "dp-fixed-server"),
        ("DifferentialPrivacyClientSideAdaptiveClipping", "dp-adaptive-client"),
    ],
)
def test_a_class_that_needs_more_by_its_path_names_the_one_that_does_not(a_run, flowers, name):
    cls, _ = find_strategy(f"flwr.serverapp.strategy:{flowers}")
    with pytest.raises(SettingsError, match=rf"argument.*\(take strategy = '{name}'\)"):
        create_strategy(cls, None, a_run(), {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fedadam.eta", 0.0),
        ("fedtrimmedavg.beta", 0.5),
        ("bulyan.num-malicious-nodes", -1),
        ("dp-fixed.clipping-norm", 0.0),
        ("dp-adaptive.noise-multiplier", 2.0),
    ],
)
def test_what_a_rule_cannot_take_is_refused_before_the_start(key, value):
    with pytest.raises(SettingsError, match=rf"{key.partition('.')[0]}\.[-\w]+ = "):
        RunSettings.from_run_config({key: value})


def replies(models, counts=None):
    """Replies of nodes with these models, trained on these numbers of samples."""
    counts = counts or range(1, len(models) + 1)
    return [
        Message(
            RecordDict(
                {
                    "arrays": as_record(model),
                    "metrics": MetricRecord({"num-examples": n, "train-loss": 0.5}),
                }
            ),
            n,
            "train",
        )
        for n, model in zip(counts, models, strict=True)
    ]


def model(weight, variance=1.0, batches=0):
    """A network of one layer with BatchNorm."""
    return {
        "weight": np.full((2, 2), weight, np.float32),
        "running_var": np.full(2, variance, np.float32),
        "num_batches_tracked": np.array(batches),
    }


def combined(strategy, start, models, rounds=1):
    """Arrays after rounds in which nodes send these models."""
    record = as_record(start)
    for server_round in range(1, rounds + 1):
        strategy.configure_train(server_round, record, ConfigRecord(), OneNode())
        record, _ = strategy.aggregate_train(server_round, replies(models))
    return as_arrays(record)


class OneNode:
    """A grid that a strategy samples from."""

    def get_node_ids(self):
        return [1]


def made(name, **arguments):
    if name == "QFedAvg":
        arguments |= {"client_learning_rate": 0.1, "train_loss_key": "train-loss"}
    return getattr(fitted, name)(min_available_nodes=1, min_train_nodes=1, **arguments)


@pytest.mark.parametrize("name", ON_WEIGHTS)
def test_a_step_of_the_server_moves_weights_and_statistics_are_averaged(name):
    """Momentum or Adam's step would take the small variances below zero."""
    strategy = made(name, trained=["weight"], **({"server_momentum": 0.9} if "M" in name else {}))
    models = [model(0.5, 0.01, 40), model(0.7, 0.02, 60)]
    found = combined(strategy, model(1.0), models, rounds=4)
    np.testing.assert_allclose(found["running_var"], (0.01 + 2 * 0.02) / 3, rtol=1e-5)
    assert found["num_batches_tracked"] == round((40 + 2 * 60) / 3)
    assert (found["weight"] != 1.0).all()
    assert {n: (a.dtype, a.shape) for n, a in found.items()} == {
        n: (a.dtype, a.shape) for n, a in model(0).items()
    }


@pytest.mark.parametrize("name", ON_WEIGHTS)
def test_weights_move_as_flowers_own_class_moves_them(name):
    def only_weights(model):
        return {"weight": model["weight"]}

    more = {"client_learning_rate": 0.1, "train_loss_key": "train-loss"} if name[0] == "Q" else {}
    flowers = getattr(flower, name)(min_available_nodes=1, min_train_nodes=1, **more)
    start, models = model(1.0), [model(0.5, 0.5, 9), model(0.7, 0.1, 4)]
    expected = combined(flowers, only_weights(start), list(map(only_weights, models)), rounds=2)
    found = combined(made(name, trained=["weight"]), start, models, rounds=2)
    np.testing.assert_allclose(found["weight"], expected["weight"], rtol=1e-6)


@pytest.mark.parametrize("name", ["Krum", "MultiKrum", "Bulyan"])
def test_counts_of_batches_do_not_say_which_models_are_near(name):
    """The last is far away, and has as many batches as its neighbours."""
    models = [model(1.0 + i / 10, batches=500 * i) for i in range(6)]
    models.append(model(90.0, batches=2500))
    found = combined(made(name, num_malicious_nodes=1), model(0.0), models)
    assert found["num_batches_tracked"].dtype == np.int64
    assert 1.0 <= found["weight"].max() < 1.6


def test_bulyan_with_too_few_nodes_is_refused_before_they_train():
    strategy = made("Bulyan", num_malicious_nodes=1)
    strategy.check_nodes(7)
    with pytest.raises(SettingsError, match=r"num-malicious-nodes = 1: .* = 7 nodes .*, got 6"):
        strategy.check_nodes(6)


def private(name, a_run, noise=0.0, **changed):
    cls, method = find_strategy(name)
    settings = {"noise_multiplier": noise}
    if "adaptive" in name:
        # The bound of the norm stays: it would move with noise of its own.
        settings |= {
            "initial_clipping_norm": 1.0,
            "clip_norm_lr": 1e-9,
            "clipped_count_stddev": noise,
        }
    return create_strategy(cls, method.settings(**settings), a_run(**changed), {})


def weight(value):
    return {"weight": np.full((20, 50), value, np.float32)}


@pytest.mark.parametrize("name", ["dp-fixed-server", "dp-adaptive-server"])
def test_with_central_privacy_updates_are_clipped_and_nodes_weigh_alike(a_run, name):
    strategy = private(name, a_run)
    models = [weight(1e-3), weight(9.0), weight(0.0)]  # the last has not learnt
    strategy.configure_train(1, as_record(weight(0.0)), ConfigRecord(), OneNode())
    record, _ = strategy.aggregate_train(1, replies(models, counts=[1, 99, 5]))
    clipped = 1.0 / np.sqrt(1000)  # an update of norm 1
    np.testing.assert_allclose(as_arrays(record)["weight"], (1e-3 + clipped) / 2, rtol=1e-4)


@pytest.mark.parametrize("name", ["dp-fixed-server", "dp-adaptive-server"])
def test_noise_is_for_as_many_nodes_as_replied(a_run, name):
    def deviation(num_nodes):
        strategy = private(name, a_run, noise=1.0)
        strategy.configure_train(1, as_record(weight(0.0)), ConfigRecord(), OneNode())
        failed = Message(RecordDict(), 9, "train")
        messages = [*replies([weight(0.1)] * num_nodes), error_to(failed)]
        record, _ = strategy.aggregate_train(1, messages)
        return as_arrays(record)["weight"].std()

    assert deviation(2) == pytest.approx(4 * deviation(8), rel=0.2)


def error_to(message):
    message.metadata.__dict__["_message_id"] = "1"
    return Message(Error(1, "it broke"), reply_to=message)


def test_central_privacy_refuses_a_model_with_statistics(a_run):
    run = a_run()
    resnet = create_model("resnet8", run.spec, seed=0)
    with pytest.raises(SettingsError, match=r"'[\w.]+' is no weight \(take a model without batch"):
        private("dp-fixed-server", a_run, model=resnet)


def test_a_node_clips_its_update_if_it_is_asked_to_and_tells_that_it_had_to(a_run):
    start = as_record({k: v.numpy() for k, v in a_run().model.state_dict().items()})
    config = ConfigRecord({"server-round": 1, "clipping_norm": 0.01})
    message = Message(RecordDict({"arrays": start, "config": config}), 1, "train")
    message.metadata.__dict__["_message_id"] = "1"
    node = {"partition-id": 0, "num-partitions": 20, "device": "cpu"}
    reply = app(message, Context(1, 1, node, RecordDict(), {})).content
    before, after = as_arrays(start), as_arrays(reply["arrays"])
    norm = np.sqrt(sum(np.square(after[k] - before[k]).sum() for k in before))
    assert norm == pytest.approx(0.01, rel=1e-2)
    assert reply["metrics"]["norm_bit"] == 1


def test_losses_that_q_fedavg_needs_are_missed_before_the_start():
    unprotected = built_in_methods()["qfedavg"].unprotected
    assert "do not tell with differential privacy" in unprotected(None, None)


@pytest.mark.parametrize("name", ["fedadam", "qfedavg", "fedprox", "dp-fixed-server", "hfldd"])
def test_a_strategy_that_does_more_than_combine_models_is_no_aggregator(name):
    with pytest.raises(SettingsError, match=f"aggregator = '{name}'.*does more than combine"):
        create_aggregator(name, "")


def test_bulyan_is_an_aggregator():
    assert isinstance(create_aggregator("bulyan", '{"num_malicious_nodes": 1}'), FedAvg)
