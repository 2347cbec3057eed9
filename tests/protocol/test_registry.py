"""Our methods by name; those of installed packages are in tests/plugins."""

import json
import subprocess
import sys

import pytest
from flwr.serverapp.strategy import Strategy

from flwr_distill.client.terms import LossTerm
from flwr_distill.protocol.meeting import DESCRIBE, requirement_of
from flwr_distill.protocol.method import EVALUATE_PHASE, TRAIN_PHASE
from flwr_distill.protocol.registry import (
    all_methods,
    built_in_methods,
    find_method,
    handlers,
    method_of,
    phase_titles,
    phases_of,
)
from flwr_distill.strategies.hfldd.method import TRAIN_POOL
from flwr_distill.task.plugin import import_object
from flwr_distill.task.settings import Block


@pytest.mark.parametrize("name", sorted(built_in_methods()))
def test_what_a_declaration_of_ours_names_is_there(name):
    method = built_in_methods()[name]
    assert method.name == name
    assert method.summary.endswith(".")
    assert method.package == ""
    assert issubclass(import_object(method.strategy), Strategy)
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


def test_reading_declarations_imports_neither_side_of_a_method_nor_pytorch():
    code = (
        "import sys; from flwr_distill.protocol import registry; registry.built_in_methods();"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "flwr_distill.strategies.hfldd.method" in imported
    assert "torch" not in imported
    rooms = ("client", "server", "node", "fleet", "cli", "strategies.common.registry")
    sides = [name for name in imported if name.endswith((".strategy", ".client"))]
    beyond = [name for name in imported if name in {f"flwr_distill.{room}" for room in rooms}]
    assert [name for name in sides if name.startswith("flwr_distill.")] + beyond == []


def test_a_name_that_no_package_brings_is_no_method():
    assert find_method("colours") is None
    assert "colours" not in all_methods()


@pytest.mark.parametrize("name", sorted(built_in_methods()))
def test_the_method_of_a_class_is_that_of_its_nearest_base(name):
    method = built_in_methods()[name]
    strategy = import_object(method.strategy)
    assert method_of(strategy) is method
    assert method_of(type("Mine", (strategy,), {})) is method


def test_a_class_without_a_base_of_ours_has_no_method():
    assert method_of(type("Mine", (), {})) is None


def test_every_message_of_ours_has_a_title_for_log_and_report():
    titles = phase_titles()
    assert titles["train"] == "nodes train"
    assert {DESCRIBE, TRAIN_POOL, *handlers()} <= titles.keys()
    assert all(titles.values())


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


def test_of_ours_nodes_need_the_code_alone_but_for_distillers_and_files():
    assert requirement_of(None) is None
    needed = {
        name: requirement_of(method, method.settings and method.settings())
        for name, method in built_in_methods().items()
    }
    assert [name for name, requirement in needed.items() if requirement] == ["hfldd"]
    assert json.loads(needed["hfldd"].settings)["distiller"] == "auto"
    assert needed["hfldd"].package == ""


def test_a_methods_table_is_its_own_or_one_that_it_shares():
    methods = built_in_methods()
    assert methods["fedhead-plus"].table_name == methods["feddf"].table_name == "fedhead"
    assert methods["moon"].table_name == "moon"
    for method in methods.values():
        assert method.settings is None or issubclass(method.settings, Block)
