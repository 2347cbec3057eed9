"""What of Flower's private modules is imported stands in its folders, and in docs/flower.md."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = {"app", "clientapp", "common", "serverapp", "simulation"}
"""Packages of Flower whose names are for users; modules within them are not."""
PUBLIC_WITHIN = {"flwr.clientapp.mod", "flwr.serverapp.strategy"}


def imported(tree):
    """Modules of Flower's that a file imports, but not for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr."):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("flwr."))
        yield from imported(node)


def is_private(module):
    _, *path = module.split(".")
    return module not in PUBLIC_WITHIN and (len(path) > 1 or path[0] not in PUBLIC)


@pytest.fixture(scope="module")
def found():
    """Files that import each private module of Flower's."""
    found = defaultdict(set)
    rooms = {file.parent for file in ROOT.glob("*/__init__.py")} - {ROOT / "benchmarks"}
    for file in (file for room in rooms for file in room.rglob("*.py")):
        for module in imported(ast.parse(file.read_text(encoding="utf-8"))):
            if is_private(module):
                found[module].add(file.relative_to(ROOT))
    return found


def test_the_docs_name_every_private_module_of_flowers_and_the_rooms_that_import_it(found):
    text = Path(ROOT, "docs/flower.md").read_text()
    rows = re.findall(r"^\| `(flwr\.[\w.]+)` \| (.+) \|$", text, re.M)
    told = {module: set(re.findall(r"`(\w+)`", rooms)) for module, rooms in rows}
    assert told == {module: {file.parts[0] for file in files} for module, files in found.items()}


def test_private_modules_are_imported_in_folders_for_a_flower_alone(found):
    folders = {file.parent for files in found.values() for file in files}
    assert {folder.name for folder in folders} == {"flower", "flower_1_32", "flower_1_41"}
    assert {len(folder.parts) for folder in folders} == {2}
