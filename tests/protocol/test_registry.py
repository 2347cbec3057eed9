"""Methods by name: ours and those of installed packages, whole ones and broken ones."""

import logging
import subprocess
import sys

import pytest
from flwr.serverapp.strategy import FedAvg

from client.terms import LossTerm
from protocol.hfldd import TRAIN_POOL
from protocol.meeting import DESCRIBE, Requirement, requirement_of
from protocol.method import EVALUATE_PHASE, TRAIN_PHASE, Method
from protocol.registry import (
    all_methods,
    built_in_methods,
    find_method,
    handlers,
    method_of,
    phase_titles,
    phases_of,
)
from strategies.common.registry import find_strategy
from strategies.moon import MOON
from task.plugin import import_object
from task.settings import Block, SettingsError

COLOURS = """
from flwr.serverapp.strategy import FedAvg

from protocol.method import Method, Phase
from protocol.schema import TRAIN, Reply
from task.settings import Block


class Settings(Block):
    depth: int = 3


class Strategy(FedAvg):
    def __init__(self, *, depth, **kwargs):
        super().__init__(**kwargs)
        self.depth = depth


def paint(message, context):
    return message


METHOD = Method(
    name="colours",
    strategy=f"{__name__}:Strategy",
    settings=Settings,
    phases=(Phase("train.paint", "nodes paint", (TRAIN,), f"{__name__}:paint", compared=True),),
)
"""


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.WARNING, "flwr")
    return caplog


def test_our_methods_have_their_names():
    assert sorted(built_in_methods()) == [
        "cadis",
        "fedavg",
        "feddf",
        "feddyn",
        "fedfa",
        "fedhead",
        "fedhead-plus",
        "fedlgd",
        "fedmedian",
        "fednova",
        "fedprox",
        "fedtrimmedavg",
        "hfldd",
        "krum",
        "moon",
        "multikrum",
        "scaffold",
    ]


@pytest.mark.parametrize("name", sorted(built_in_methods()))
def test_what_a_declaration_of_ours_names_is_there(name):
    method = built_in_methods()[name]
    assert method.name == name
    assert method.summary.endswith(".")
    assert method.package == ""
    assert issubclass(import_object(method.strategy), FedAvg)
    assert method.settings is None or method.settings()
    for phase in method.phases:
        assert phase.title
        assert phase.replies
        assert not phase.handler or callable(import_object(phase.handler))
        assert bool(phase.handler) == ("." in phase.message_type)
    assert all(issubclass(import_object(path), LossTerm) for path in method.terms.values())
    assert all(callable(import_object(path)) for path in method.panels)
    assert not method.formulas or callable(import_object(method.formulas))


def test_a_message_type_is_of_one_handler():
    declared = {
        (phase.message_type, phase.handler)
        for method in built_in_methods().values()
        for phase in method.phases
        if phase.handler
    }
    assert len(declared) == len({message_type for message_type, _ in declared})


def test_reading_declarations_imports_neither_server_nor_nodes():
    code = (
        "import sys; from protocol.registry import built_in_methods; built_in_methods();"
        "rooms = {name.partition('.')[0] for name in sys.modules};"
        "print(sorted(rooms & {'server', 'client', 'strategies', 'node', 'fleet', 'cli'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_installed_package_brings_a_method(plug_in):
    module = plug_in(COLOURS, {"colours": "METHOD"})
    method = find_method("colours")
    assert method == all_methods()["colours"]
    assert method.package == "colours==1.2"
    assert handlers()["train.paint"] == f"{module}:paint"
    assert phase_titles()["train.paint"] == "nodes paint"
    strategy, found = find_strategy("colours")
    assert (strategy.__name__, found) == ("Strategy", method)
    assert requirement_of(method) == Requirement(method="colours", package="colours==1.2")
    assert built_in_methods().keys() == all_methods().keys() - {"colours"}


def test_without_the_package_the_method_is_not_known():
    assert find_method("colours") is None
    assert "train.paint" not in handlers()


def test_a_strategy_class_alone_is_a_method_without_anything_else(plug_in):
    module = plug_in(COLOURS, {"plain": "Strategy"})
    method = find_method("plain")
    assert method == Method("plain", f"{module}:Strategy", package="colours==1.2")
    assert find_strategy("plain")[0] is import_object(f"{module}:Strategy")


def test_a_package_may_bring_several_methods(plug_in):
    plug_in(COLOURS, {"colours": "METHOD", "plain": "Strategy"})
    assert {"colours", "plain"} < all_methods().keys()


def test_two_packages_cannot_bring_a_method_of_one_name(plug_in, warnings):
    plug_in(COLOURS, {"colours": "METHOD"})
    plug_in(COLOURS, {"colours": "METHOD"}, package="paints", version="3")
    with pytest.raises(SettingsError, match="only one can have the name") as caught:
        find_method("colours")
    assert "colours==1.2" in str(caught.value)
    assert "paints==3" in str(caught.value)
    assert all_methods() == built_in_methods()
    assert warnings.messages == [str(caught.value)]


@pytest.mark.parametrize("ours", [TRAIN_POOL, DESCRIBE, "train", "evaluate"])
def test_a_message_type_of_ours_cannot_have_another_handler(plug_in, ours):
    plug_in(COLOURS.replace("train.paint", ours), {"colours": "METHOD"})
    with pytest.raises(SettingsError, match=f"'{ours}' is taken by flwr-distill"):
        find_method("colours")
    assert handlers().keys() >= {DESCRIBE, TRAIN_POOL}


@pytest.mark.parametrize("ours", ["kd-lambda", "model-contrast"])
def test_what_asks_for_a_loss_term_of_ours_cannot_ask_for_another(plug_in, ours):
    terms = f"settings=Settings, terms={{'{ours}': 'json:loads'}},"
    plug_in(COLOURS.replace("settings=Settings,", terms), {"colours": "METHOD"})
    with pytest.raises(SettingsError, match=f"'{ours}' is taken by flwr-distill"):
        find_method("colours")


def test_a_method_may_declare_replies_of_its_own_to_a_message_of_ours(plug_in):
    """As one that extends HFLDD does: what handles the message on nodes stays."""
    ours = f'"{TRAIN_POOL}", "heads paint", (TRAIN,), "client.hfldd:train_pool"'
    source = COLOURS.replace('"train.paint", "nodes paint", (TRAIN,), f"{__name__}:paint"', ours)
    plug_in(source, {"colours": "METHOD"})
    assert phases_of(find_method("colours"))[TRAIN_POOL].title == "heads paint"


BROKEN = {
    "hfldd": ("METHOD", "the name is taken by a method of flwr-distill (rename it)"),
    "missing": ("NONE", "missing' of colours==1.2: "),
    "number": ("__name__", "is a str, need a protocol.method.Method or a strategy class"),
    "paint": ("METHOD", "it declares itself as 'colours' (name both alike)"),
}


@pytest.mark.parametrize(("name", "value", "said"), [(n, *rest) for n, rest in BROKEN.items()])
def test_a_method_that_cannot_be_used_is_named_and_the_others_stay(
    plug_in, warnings, name, value, said
):
    plug_in(COLOURS, {name: value})
    with pytest.raises(SettingsError, match=f"method '{name}' of colours==1.2") as caught:
        find_method(name)
    assert said in str(caught.value)
    assert all_methods() == built_in_methods()
    assert str(caught.value) in warnings.messages


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module_of_colours", "No module named 'no_such_module_of_colours'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def", "SyntaxError"),
        ("raise SystemError('of mine')", "of mine"),
    ],
)
def test_a_package_that_fails_as_it_is_loaded_is_named_with_the_line(plug_in, source, said):
    module = plug_in(f"{source}\n", {"colours": "METHOD"})
    with pytest.raises(SettingsError, match="method 'colours'") as caught:
        find_method("colours")
    assert "of colours==1.2" in str(caught.value)
    assert said in str(caught.value)
    assert module in str(caught.value)
    assert all_methods() == built_in_methods()
    assert handlers().keys() >= {DESCRIBE, TRAIN_POOL}


def test_the_method_of_a_class_is_that_of_its_nearest_base(plug_in):
    module = plug_in(COLOURS, {"colours": "METHOD"})
    strategy = import_object(f"{module}:Strategy")
    assert method_of(strategy) == find_method("colours")
    assert method_of(type("Mine", (strategy,), {})) == find_method("colours")
    assert method_of(type("Mine", (MOON,), {})).name == "moon"
    assert method_of(type("Mine", (), {})) is None


def test_phases_of_a_run_are_those_of_all_and_the_methods_own():
    plain = phases_of(None)
    assert plain["train"] is TRAIN_PHASE
    assert plain["evaluate"] is EVALUATE_PHASE
    assert DESCRIBE in plain
    scaffold = phases_of(built_in_methods()["scaffold"])
    assert scaffold.keys() == plain.keys()
    assert scaffold["train"] is built_in_methods()["scaffold"].phases[0]
    hfldd = phases_of(built_in_methods()["hfldd"])
    assert hfldd["train"] is TRAIN_PHASE
    assert hfldd[TRAIN_POOL].quorum


def test_ours_need_nothing_of_nodes():
    assert requirement_of(None) is None
    assert all(requirement_of(method) is None for method in built_in_methods().values())


def test_a_methods_table_is_its_own_or_one_that_it_shares():
    methods = built_in_methods()
    assert methods["fedhead-plus"].table_name == methods["feddf"].table_name == "fedhead"
    assert methods["moon"].table_name == "moon"
    for method in methods.values():
        assert method.settings is None or issubclass(method.settings, Block)
