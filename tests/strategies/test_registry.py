"""Strategies by name, and what each is made with."""

import pytest
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, Krum

from flwr_distill.protocol.arguments import read_arguments
from flwr_distill.protocol.registry import built_in_methods
from flwr_distill.strategies.common.registry import (
    create_aggregator,
    create_strategy,
    find_strategy,
)
from flwr_distill.strategies.fedhead import FedHEAD
from flwr_distill.strategies.fedhead.method import FedHEADSettings
from flwr_distill.strategies.fedprox.strategy import FedProx
from flwr_distill.strategies.hfldd import HFLDD
from flwr_distill.strategies.hfldd.method import HFLDDSettings
from flwr_distill.strategies.moon.strategy import MOON
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import (
    Block,
)


class MyMOON(MOON):
    pass


class Passing(FedAvg):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)


class OfItsOwn(FedAvg):
    def __init__(self, depth, width=2, **kwargs):
        super().__init__(**kwargs)
        self.size = depth, width


class Plain(FedAvg):
    def __init__(self, note="", fraction_train=1.0):
        super().__init__(fraction_train=fraction_train)


class Deep(Block):
    depth: int = 3


def made(name, run, settings=None, **arguments):
    cls, _ = find_strategy(name)
    return create_strategy(cls, settings, run, arguments)


@pytest.mark.parametrize(
    ("name", "settings", "cls"),
    [
        ("hfldd", HFLDDSettings(), HFLDD),
        ("fedavg", None, FedAvg),
        ("fedprox", None, FedProx),
        ("flwr.serverapp.strategy:FedAdam", None, FedAdam),
        ("flwr.serverapp.strategy:Krum", None, Krum),
        ("flwr.serverapp.strategy:FedMedian", None, FedMedian),
        (f"{__name__}:Passing", None, Passing),
    ],
)
def test_strategies_are_found_and_sample_as_the_run_says(a_run, name, settings, cls):
    strategy = made(name, a_run(), settings)
    assert type(strategy) is cls
    assert (strategy.fraction_train, strategy.fraction_evaluate) == (0.5, 0.25)
    assert (strategy.min_available_nodes, strategy.min_train_nodes) == (1, 1)


@pytest.mark.parametrize("name", sorted(built_in_methods()))
def test_every_method_of_ours_can_be_made(a_run, name):
    cls, method = find_strategy(name)
    assert method is built_in_methods()[name]
    settings = method.settings() if method.settings else None
    assert type(create_strategy(cls, settings, a_run(), {})) is cls
    path = method.strategy.split(":")
    assert [cls.__module__, cls.__qualname__] == path  # by which a class finds its method


def test_each_strategy_takes_from_the_run_what_is_its_own(a_run):
    run = a_run()
    assert made("fedprox", run).proximal_mu == 0.25
    hfldd = made("hfldd", run, HFLDDSettings(groups=4, distilled_size=9))
    assert hfldd.settings == HFLDDSettings(groups=4, distilled_size=9)
    assert (hfldd._exchange.mode, hfldd.phase_timeout) == ("relay", 5.0)
    fedhead = made("fedhead", run, FedHEADSettings(sectors=3, distill_epochs=8))
    assert fedhead.settings == FedHEADSettings(sectors=3, distill_epochs=8)
    assert (fedhead.links, fedhead.seed, fedhead.fraction_evaluate) == ("relay", 7, 0.25)


def test_strategy_args_win_over_settings_and_run(a_run):
    assert made("fedprox", a_run(), proximal_mu=2.0).proximal_mu == 2.0
    assert made("fedavg", a_run(), fraction_train=0.75).fraction_train == 0.75
    assert made("hfldd", a_run(), HFLDDSettings(groups=4), groups=5).settings.groups == 5


def test_another_class_gets_its_methods_settings_by_name_and_nothing_else_of_the_run(a_run):
    strategy = made(f"{__name__}:OfItsOwn", a_run(), Deep(), width=5)
    assert strategy.size == (3, 5)
    assert strategy.fraction_train == 0.5


def test_a_class_that_takes_less_than_all_of_the_sampling_gets_what_it_takes(a_run):
    assert made(f"{__name__}:Plain", a_run(fraction_train=0.25)).fraction_train == 0.25


def test_a_class_named_by_its_path_belongs_to_the_method_of_its_nearest_base():
    assert find_strategy(f"{__name__}:MyMOON") == (MyMOON, built_in_methods()["moon"])
    assert find_strategy("flwr_distill.strategies.hfldd:HFLDD") == (
        HFLDD,
        built_in_methods()["hfldd"],
    )
    assert (
        find_strategy("flwr_distill.strategies.fedhead.plus:FedHEADPlus")[1].name == "fedhead-plus"
    )
    assert find_strategy("flwr.serverapp.strategy:FedAdam")[1].name == "fedavg"
    assert find_strategy("flwr.serverapp.strategy.strategy:Strategy")[1] is None


def test_a_subclass_of_ours_is_made_as_its_base_is(a_run):
    settings = built_in_methods()["moon"].settings(mu=3.0)
    strategy = made(f"{__name__}:MyMOON", a_run(), settings, temperature=0.25)
    assert (strategy.settings.mu, strategy.settings.temperature) == (3.0, 0.25)
    assert isinstance(made("fedhead", a_run(), FedHEADSettings()), FedHEAD)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hfdd", "not one of agreement, analytic, auto"),
        ("hfdd", "nor module:Class, did you mean hfldd?"),
        ("no_such_package:X", "no_such_package"),
        ("flwr.serverapp.strategy:Nope", "Nope"),
        ("json:JSONDecoder", "is not a flwr.serverapp.strategy.Strategy"),
        ("json:loads", "is not a flwr.serverapp.strategy.Strategy"),
    ],
)
def test_a_wrong_strategy_setting_is_named(name, said):
    with pytest.raises(SettingsError, match=f"^strategy = '{name}'") as caught:
        find_strategy(name)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("fedavg", {"colour": 1}),
        ("moon", {"colour": 1}),
        (f"{__name__}:OfItsOwn", {"width": 1}),
        (f"{__name__}:Plain", {"min_train_nodes": 1}),
    ],
)
def test_arguments_that_a_strategy_does_not_take_are_named(a_run, name, arguments):
    settings = built_in_methods()["moon"].settings() if name == "moon" else None
    with pytest.raises(SettingsError, match="strategy-args = ") as caught:
        made(name, a_run(), settings, **arguments)
    assert "argument" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "unknown", "known"),
    [
        ("fedavg", "fracton_train", "fraction_train"),
        ("moon", "muu", "mu"),
        (f"{__name__}:OfItsOwn", "widht", "width"),
        (f"{__name__}:OfItsOwn", "fracton_train", "fraction_train"),
        (f"{__name__}:Plain", "note_", "note"),
    ],
)
def test_a_misspelt_strategy_argument_is_one_line_with_those_that_are_known(
    a_run, name, unknown, known
):
    settings = built_in_methods()["moon"].settings() if name == "moon" else None
    with pytest.raises(SettingsError, match="strategy-args = ") as caught:
        made(name, a_run(), settings, **{unknown: 1})
    assert f"{unknown!r}" in str(caught.value)
    assert f"did you mean {known}?" in str(caught.value)
    assert "__init__" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_argument_of_an_aggregator_is_one_line_too():
    with pytest.raises(SettingsError, match=r"aggregator-args = .*mean num_malicious_nodes\?"):
        create_aggregator("krum", '{"num_malicious_nodess": 1}')


@pytest.mark.parametrize(("text", "said"), [("{", "not JSON"), ("[1]", "must be a JSON object")])
def test_arguments_that_are_no_json_object_are_named(text, said):
    with pytest.raises(SettingsError, match="strategy-args = ") as caught:
        read_arguments(text, "strategy-args")
    assert said in str(caught.value)


def test_no_arguments_are_an_empty_object():
    assert read_arguments("", "strategy-args") == {}
    assert read_arguments('{"mu": 2}', "strategy-args") == {"mu": 2}
