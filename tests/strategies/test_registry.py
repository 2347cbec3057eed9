"""Strategies by name."""

import pytest
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, FedProx, Krum

from strategies.common.registry import create_strategy, find_strategy
from strategies.hfldd import HFLDD
from task.settings import SettingsError

OFFERED = {
    "fraction_train": 0.5,
    "min_train_nodes": 1,
    "min_available_nodes": 3,
    "proximal_mu": 0.25,
    "groups": 4,
    "seed": 7,
}


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("hfldd", HFLDD),
        ("fedavg", FedAvg),
        ("fedprox", FedProx),
        ("flwr.serverapp.strategy:FedAdam", FedAdam),
        ("flwr.serverapp.strategy:Krum", Krum),
        ("flwr.serverapp.strategy:FedMedian", FedMedian),
    ],
)
def test_strategies_are_found_and_take_the_settings_they_know(name, cls):
    strategy = create_strategy(name, OFFERED)
    assert type(strategy) is cls
    assert strategy.min_available_nodes == 3


def test_each_strategy_gets_only_its_own_arguments():
    assert create_strategy("fedprox", OFFERED).proximal_mu == 0.25
    assert create_strategy("hfldd", OFFERED).groups == 4
    assert not hasattr(create_strategy("fedavg", OFFERED), "groups")


def test_strategy_args_win_over_settings():
    strategy = create_strategy("fedprox", OFFERED, '{"proximal_mu": 2.0}')
    assert strategy.proximal_mu == 2.0


def test_arguments_pass_through_a_subclass_that_takes_any():
    strategy = create_strategy(f"{__name__}:Passing", OFFERED)
    assert strategy.fraction_train == 0.5


class Passing(FedAvg):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("hfdd", "", "not one of cadis, fedavg"),
        ("no_such_package:X", "", "no_such_package"),
        ("flwr.serverapp.strategy:Nope", "", "Nope"),
        ("json:JSONDecoder", "", "is not a flwr.serverapp.strategy.Strategy"),
        ("fedavg", "{", "strategy-args"),
        ("fedavg", "[1]", "must be a JSON object"),
        ("fedavg", '{"colour": 1}', "colour"),
    ],
)
def test_a_wrong_strategy_setting_is_named(name, arguments, said):
    with pytest.raises(SettingsError, match="strategy") as caught:
        create_strategy(name, {}, arguments)
    assert said in str(caught.value)


def test_find_strategy_returns_the_class():
    assert find_strategy("hfldd") is HFLDD
