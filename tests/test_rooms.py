"""The rooms of the house: imports point downwards, and never in a circle."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = [
    {"cli"},
    {"fleet", "simulation"},
    {"flower"},
    {"server", "node"},
    {"strategies"},
    {"client"},
    {"protocol"},
    {"links"},
    {"storage"},
    {"distill"},
    {"task"},
    {"base"},
]
"""From top to bottom. Rooms on one floor do not know each other.

`flower` stands above server and node, whose interfaces its transports implement. They find it by
name (`server.line`, `node.stock`). The fleet composes it: its tools speak to a SuperLink.
"""
ROOMS = set().union(*FLOORS)
PRIVATE = re.compile(r"\bflwr[./](supercore|supernode|superlink|proto)\b")
"""Flower's private modules, in imports, in names of modules, and in comments."""
PUBLIC = {"flwr.app", "flwr.common", "flwr.serverapp"}
"""What Flower keeps for users, as far as the node and what it knows of methods need it."""


def modules():
    """Module name and file of all that is in the rooms."""
    for room in sorted(ROOMS):
        for file in sorted((ROOT / room).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            yield (
                ".".join(("flwr_distill", *(parts[:-1] if parts[-1] == "__init__" else parts))),
                file,
            )


def imports_of(tree):
    """Modules that are imported, inside functions too, but not for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imports_of(node)


@pytest.fixture(scope="module")
def graph():
    """Modules of ours that each module imports."""
    known = dict(modules())

    def module_of(name):
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name

    graph = {}
    for module, file in known.items():
        imported = {module_of(name) for name in imports_of(ast.parse(file.read_text()))}
        graph[module] = imported - {"", module}
    return graph


def reached_from(graph, ahead):
    """Modules that these import, and those that they import, and so on."""
    reached = set()
    while ahead:
        reached |= ahead
        ahead = set().union(*(graph[module] for module in ahead)) - reached
    return reached


def room(module):
    return module.split(".")[1]


def test_imports_point_downwards(graph):
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    upwards = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if room(module) != room(other) and floor[room(other)] <= floor[room(module)]
    ]
    assert upwards == []


def test_imports_lead_to_modules_that_are_there():
    """Mypy does not tell: it takes a missing module for one of another package."""
    known = {module for module, _ in modules()}
    missing = [
        f"{module} imports {node.module}"
        for module, file in modules()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr_distill.")
        if node.module not in known
    ]
    assert missing == []


def test_imports_form_no_circle(graph):
    packages = {m for m in graph if any(n.startswith(f"{m}.") for n in graph)}
    without_reexports = {m: others - packages for m, others in graph.items()}
    order = list(TopologicalSorter(without_reexports).static_order())  # CycleError names a circle
    assert set(order) >= set(graph)


def test_distillation_and_task_know_nothing_of_flower(graph):
    for module, file in modules():
        if room(module) in ("distill", "task", "base"):
            names = set(imports_of(ast.parse(file.read_text())))
            assert not any(name.partition(".")[0] == "flwr" for name in names), module


def test_the_node_knows_nothing_of_methods(graph):
    """It reads their declarations, by name, and nothing else of them."""
    used = {other for module in graph if room(module) == "node" for other in graph[module]}
    below = {"links", "protocol", "storage", "distill", "task", "base"}
    assert set(map(room, used)) <= {"node", *below}


def test_only_the_room_flower_names_flowers_private_modules():
    outside = [file for module, file in modules() if room(module) != "flower"]
    outside += [*ROOT.glob("flwr_distill/*.py"), *ROOT.glob("benchmarks/*.py")]
    outside += ROOT.glob("examples/**/*.py")
    named = {file.relative_to(ROOT).as_posix() for file in outside if PRIVATE.search(_text(file))}
    assert named == {"benchmarks/light_nodes.py"}  # stands in for SuperNodes


def _text(file):
    return file.read_text(encoding="utf-8")


def test_a_worker_leaves_all_names_but_node_and_flower_to_the_app(graph):
    """The bundle's own packages are found first, and those beside them never."""
    started = {
        "flwr_distill.flower.worker",
        "flwr_distill.flower.line_1_32.node.appio",
        "flwr_distill.flower.line_1_35.node.appio",
        "flwr_distill.flower.line_1_39.node.appio",
    }
    assert set(map(room, reached_from(graph, started))) == {"flower", "node"}


def test_the_guard_of_a_node_knows_no_transport(graph):
    """Its verdicts are for any: of Flower it reaches records and names alone."""
    files = dict(modules())
    imported = {
        name
        for module in reached_from(graph, {"flwr_distill.node.guard"})
        for name in imports_of(ast.parse(_text(files[module])))
    }
    assert not {name for name in imported if re.match(r"(grpc|httpx)\b", name)}
    flowers = {name for name in imported if name.partition(".")[0] == "flwr"}
    assert {".".join(name.split(".")[:2]) for name in flowers} == PUBLIC


def method_of(module):
    """The method in whose folder a module lies, if any."""
    _, room, *rest = module.split(".")
    return rest[0] if room == "strategies" and rest and rest[0] != "common" else None


def test_server_and_nodes_find_methods_through_the_registry_only(graph):
    """Grid, report, common code and the ClientApp are composed from declarations."""
    named = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if room(module) != "cli" and not method_of(module) and method_of(other)
    ]
    assert named == []


def test_a_methods_server_and_client_sides_never_import_each_other(graph):
    """Nor does its declaration import either: a node's policy reads it without PyTorch."""
    sides = {"strategy": {"client"}, "client": {"strategy"}, "method": {"strategy", "client"}}
    crossing = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if method_of(module) and method_of(other)
        if other.split(".")[-1] in sides.get(module.split(".")[-1], ())
    ]
    assert crossing == []
