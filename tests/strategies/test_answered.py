"""A strategy of ours in someone's ServerApp ends with the reason where no node answers it."""

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_distill.protocol.arrays import as_record
from flwr_distill.protocol.replies import NothingUsableError
from flwr_distill.strategies.cadis import CADIS
from flwr_distill.strategies.common.answered import MissingHandlerError, UnansweredError
from flwr_distill.strategies.common.checked import CheckedFedAvg
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.fedhead import FedHEAD
from flwr_distill.strategies.flower.strategy import FedAdam
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.strategies.moon.strategy import MOON
from flwr_distill.strategies.scaffold.strategy import SCAFFOLD
from tests.grids import screening_grid

START = {"last.weight": np.zeros((4, 5), np.float32)}
NODES = 4


def reply(message):
    arrays = as_record({"last.weight": np.ones((4, 5), np.float32)})
    metrics = MetricRecord({"num-examples": 10, "train-loss": 0.5})
    return RecordDict({"arrays": arrays, "metrics": metrics})


def foreign_app(train=True):
    """Someone's ClientApp, which knows nothing of ours."""
    app = ClientApp()
    if train:
        app.train()(lambda message, context: Message(reply(message), reply_to=message))
    context = Context(1, 1, {}, RecordDict(), {})
    return lambda message: app(message, context).content


@pytest.fixture
def start(memory_grid):
    """Run a strategy on nodes, in Flower's loop."""

    def run(strategy, *nodes, rounds=6):
        run.grid = memory_grid({10 + place: node for place, node in enumerate(nodes)})
        return strategy.start(grid=run.grid, initial_arrays=as_record(START), num_rounds=rounds)

    return run


@pytest.mark.parametrize(
    ("strategy", "message_type", "method"),
    [
        (HFLDD, "query.label_knowledge", "hfldd"),
        (FedHEAD, "query.describe", "fedhead"),
    ],
)
def test_a_missing_handler_is_named_with_the_strategy_and_the_line_that_adds_it(
    start, strategy, message_type, method
):
    with pytest.raises(MissingHandlerError, match=rf'add_methods\(app, "{method}"') as raised:
        start(strategy(), *[foreign_app()] * NODES)
    assert (raised.value.where, raised.value.message_type) == (strategy.__name__, message_type)
    assert len(start.grid.pushed) == NODES  # nobody was asked twice


@pytest.mark.parametrize("strategy", [CADIS, MOON, SCAFFOLD])
def test_another_train_that_would_ignore_a_methods_loss_term_ends_the_run(start, strategy):
    with pytest.raises(MissingHandlerError, match="add_methods") as raised:
        start(strategy(), *[foreign_app()] * NODES)
    assert (raised.value.where, raised.value.message_type) == (strategy.__name__, "train")


@pytest.mark.parametrize("strategy", [CheckedFedAvg, FedAdam])
def test_strategies_that_need_flowers_contract_alone_train_with_any_client_app(start, strategy):
    assert start(strategy(fraction_evaluate=0.0), *[foreign_app()] * NODES).arrays
    assert {message.metadata.message_type for message in start.grid.pushed} == {"train"}


@pytest.mark.parametrize("strategy", [CheckedFedAvg, FedAdam])
def test_without_a_train_function_the_run_ends_at_once(start, strategy):
    with pytest.raises(MissingHandlerError) as raised:
        start(strategy(), *[foreign_app(train=False)] * NODES)
    assert raised.value.message_type == "train"


def broken(message):
    raise RuntimeError("the disk is full")


@pytest.mark.parametrize("strategy", [CheckedFedAvg, FedAdam])
def test_where_all_replies_are_errors_the_run_ends_with_the_nodes_reason(start, strategy):
    with pytest.raises(UnansweredError, match="the disk is full") as raised:
        start(strategy(), *[broken] * NODES)
    assert raised.value.where == strategy.__name__
    assert len(start.grid.pushed) == 2 * NODES  # not to the last round
    with pytest.raises(UnansweredError, match="the disk is full"):
        start(strategy(), *[broken] * NODES, rounds=1)


def test_nodes_that_do_not_answer_in_time_end_the_run_too(start):
    with pytest.raises(UnansweredError, match="in time"):
        start(CheckedFedAvg(), *[lambda message: None] * NODES)


def test_where_a_strategy_ends_the_run_itself_the_nodes_reasons_are_there(start):
    with pytest.raises(NothingUsableError, match="the disk is full"):
        start(HFLDD(), *[broken] * NODES)


@pytest.mark.parametrize("fault", [broken, foreign_app(train=False)])
def test_a_node_that_answers_keeps_the_run_going(start, fault):
    assert start(CheckedFedAvg(fraction_evaluate=0.0), reply, *[fault] * 3).arrays


def test_one_bad_round_does_not_end_a_run(start):
    rounds = []

    def once(message):
        number = message.content.config_records["config"]["server-round"]
        rounds.append(number)
        if number == 2:
            raise RuntimeError("away")
        return reply(message)

    start(CheckedFedAvg(fraction_evaluate=0.0), *[once] * NODES, rounds=4)
    assert set(rounds) == {1, 2, 3, 4}


def test_in_our_server_app_failed_rounds_are_its_own_to_count(memory_grid):
    grid = screening_grid(memory_grid({10 + place: broken for place in range(NODES)}), deadline=60)
    result = CheckedFedAvg().start(grid=grid, initial_arrays=as_record(START), num_rounds=3)
    assert not result.arrays


def test_our_server_app_names_the_remedy_for_another_client_app(memory_grid):
    grid = memory_grid({10: foreign_app(), 11: foreign_app()})
    about = Directory().look_up(grid, [10, 11])
    assert all("add_methods" in description.missing[0] for description in about.values())
