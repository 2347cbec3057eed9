"""A robust strategy of Flower's in place of the weighted mean."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedMedian, FedTrimmedAvg, Krum, Strategy

from flwr_distill.protocol.arrays import as_record
from flwr_distill.protocol.registry import all_methods
from flwr_distill.strategies.agreement.strategy import UNCLEAR, Agreement
from flwr_distill.strategies.common.checked import RobustFedAvg
from flwr_distill.strategies.common.registry import (
    create_aggregator,
    create_strategy,
    find_strategy,
)
from flwr_distill.strategies.common.robust import robust_mean
from flwr_distill.strategies.fedlgd.strategy import FedLGD
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.strategies.moon.strategy import MOON
from flwr_distill.task.errors import SettingsError

NODES = 7
START = {"w": np.zeros((2, 3), np.float32), "n": np.array(0)}


def models():
    generator = np.random.default_rng(0)
    return [
        {"w": generator.normal(size=(2, 3)).astype(np.float32), "n": np.array(7 * i)}
        for i in range(NODES)
    ]


@pytest.fixture
def combined(memory_grid):
    """The model after a round in which nodes send `models`, and the replies."""

    def combine(aggregator):
        def node(i):
            numbers = {"num-examples": 10 + i, "train-loss": 1.0, "of-mine": [1.0] * i}
            content = {"arrays": as_record(models()[i]), "metrics": MetricRecord(numbers)}
            content["another"] = as_record({"x": np.ones(i)})
            return lambda message: RecordDict(content)

        strategy = RobustFedAvg(aggregator=aggregator, fraction_evaluate=0.0)
        grid = memory_grid({i: node(i) for i in range(NODES)})
        messages = strategy.configure_train(1, as_record(START), ConfigRecord(), grid)
        replies = grid.send_and_receive(messages)
        arrays, metrics = strategy.aggregate_train(1, replies)
        assert metrics == MetricRecord({"train-loss": 1.0})
        assert all(set(reply.content["arrays"]) == set(START) for reply in replies)
        return {name: array.numpy() for name, array in arrays.items()}

    return combine


def test_the_median_is_that_of_each_weight(combined):
    found = combined(FedMedian())
    for place in np.ndindex(2, 3):
        values = sorted(float(model["w"][place]) for model in models())
        assert found["w"][place] == pytest.approx(values[NODES // 2])
    assert found["n"] == 21


def test_the_trimmed_mean_leaves_out_the_ends(combined):
    found = combined(FedTrimmedAvg(beta=0.3))
    for place in np.ndindex(2, 3):
        values = sorted(float(model["w"][place]) for model in models())[2:-2]
        assert found["w"][place] == pytest.approx(sum(values) / 3)


def test_krum_gives_one_of_the_models(combined):
    found = combined(Krum(num_malicious_nodes=1))
    assert any(np.allclose(found["w"], model["w"]) for model in models())


def test_without_an_aggregator_it_is_the_mean_by_samples(combined):
    found = combined(None)
    total = sum(10 + i for i in range(NODES))
    for place in np.ndindex(2, 3):
        mean = sum((10 + i) / total * float(m["w"][place]) for i, m in enumerate(models()))
        assert found["w"][place] == pytest.approx(mean)


def test_agreement_is_the_robust_mean_beside_the_start_of_the_round(combined):
    found = combined(create_aggregator("agreement", ""))
    weights = [10 + i for i in range(NODES)]
    expected, _ = robust_mean("agreement", weights, models(), START)
    plain, _ = robust_mean("mean", weights, models(), START)
    np.testing.assert_array_equal(found["w"], expected["w"])
    assert not np.allclose(found["w"], plain["w"])


def test_agreement_by_itself_names_whom_it_sets_aside(memory_grid, caplog):
    def node(i):
        moved = np.full((2, 3), -1.0 if i == 3 else 1.0, np.float32)
        content = {"arrays": as_record({"w": moved, "n": np.array(0)})}
        content["metrics"] = MetricRecord({"num-examples": 10})
        return lambda message: RecordDict(content)

    grid, strategy = memory_grid({i: node(i) for i in range(NODES)}), Agreement()
    messages = strategy.configure_train(1, as_record(START), ConfigRecord(), grid)
    arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    np.testing.assert_array_equal(arrays["w"].numpy(), np.ones((2, 3)))
    assert [m for m in caplog.messages if "rejected" in m] == [
        "Reply of node 3 to train rejected: its model is out of line with most"
    ]


def test_where_models_point_everywhere_agreement_counts_them_all_and_says_so_once(
    memory_grid, caplog
):
    def node(i):
        moved = np.zeros(6, np.float32)
        moved[i] = 1
        content = {"arrays": as_record({"w": moved.reshape(2, 3), "n": np.array(0)})}
        content["metrics"] = MetricRecord({"num-examples": 10})
        return lambda message: RecordDict(content)

    grid, strategy = memory_grid({i: node(i) for i in range(6)}), Agreement(fraction_evaluate=0.0)
    for server_round in (1, 2):
        messages = strategy.configure_train(server_round, as_record(START), ConfigRecord(), grid)
        arrays, _ = strategy.aggregate_train(server_round, grid.send_and_receive(messages))
        np.testing.assert_allclose(arrays["w"].numpy(), np.full((2, 3), 1 / 6), rtol=1e-6)
    assert [m for m in caplog.messages if "hostile" in m] == [UNCLEAR % "model"]


@pytest.mark.parametrize("aggregator", [None, FedMedian(), FedTrimmedAvg(), Krum(), Agreement()])
def test_names_shapes_and_types_stay(combined, aggregator):
    found = combined(aggregator)
    assert {name: (a.dtype, a.shape) for name, a in found.items()} == {
        name: (a.dtype, a.shape) for name, a in START.items()
    }


def test_an_aggregator_that_makes_nothing_leaves_the_model(combined):
    class Idle(FedMedian):
        def aggregate_train(self, server_round, replies):
            return None, None

    np.testing.assert_array_equal(combined(Idle())["w"], START["w"])


def made(name, run):
    """The strategy of this name, with the defaults of its method."""
    cls, method = find_strategy(name)
    return create_strategy(cls, method.settings() if method.settings else None, run, {})


@pytest.mark.parametrize(("name", "cls"), [("hfldd", HFLDD), ("fedlgd", FedLGD), ("moon", MOON)])
def test_strategies_that_average_models_take_an_aggregator(a_run, name, cls):
    median = create_aggregator("fedmedian", "")
    assert type(median) is FedMedian
    strategy = made(name, a_run(aggregator=median))
    assert type(strategy) is cls
    assert strategy.aggregator is median


@pytest.mark.parametrize("name", sorted(all_methods().keys() - {"hfldd", "fedlgd", "moon"}))
def test_an_aggregator_that_would_not_be_used_is_an_error(a_run, name):
    cls, _ = find_strategy(name)
    with pytest.raises(SettingsError, match=f"{cls.__name__} combines models by its own rule"):
        made(name, a_run(aggregator=FedMedian()))
    assert isinstance(made(name, a_run()), Strategy)


def test_without_a_name_there_is_no_aggregator():
    assert create_aggregator("", "") is None


def test_an_aggregator_gets_its_own_arguments():
    krum = create_aggregator("krum", '{"num_malicious_nodes": 3}')
    assert isinstance(krum, Krum)
    assert krum.num_malicious_nodes == 3


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("fednova", "", "FedNova does more than combine"),
        ("krumm", "", "aggregator = 'krumm': not one of"),
        ("krum", "{", "aggregator-args = '{': not JSON"),
        ("krum", "[3]", "aggregator-args = '[3]': must be a JSON object"),
        ("krum", '{"colour": 1}', "aggregator = 'krum', aggregator-args = {'colour': 1}"),
    ],
)
def test_a_wrong_aggregator_is_named_by_its_own_setting(name, arguments, said):
    with pytest.raises(SettingsError) as caught:
        create_aggregator(name, arguments)
    assert said in str(caught.value)


def test_a_message_of_an_update_brings_nothing_but_model_and_samples(combined):
    class Noting(FedMedian):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            assert server_round == 1
            assert all(isinstance(reply, Message) for reply in replies)
            assert all(isinstance(r.content["arrays"], ArrayRecord) for r in replies)
            assert all(set(reply.content) == {"arrays", "metrics"} for reply in replies)
            told = [dict(reply.content["metrics"]) for reply in replies]
            told.sort(key=lambda numbers: numbers["num-examples"])  # nodes are sampled
            assert told == [{"num-examples": 10 + i} for i in range(NODES)]
            return super().aggregate_train(server_round, replies)

    combined(Noting())
