"""docs/flower.md lists the private modules of Flower that are imported."""

import ast
import re
from collections import defaultdict
from pathlib import Path

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


def test_the_docs_name_every_private_module_of_flowers_and_the_folders_that_import_it():
    findings = defaultdict(set)
    rooms = {file.parent for file in ROOT.glob("*/__init__.py")} - {ROOT / "benchmarks"}
    for file in (file for room in rooms for file in room.rglob("*.py")):
        for module in imported(ast.parse(file.read_text(encoding="utf-8"))):
            if is_private(module):
                findings[module].add(file.parent.relative_to(ROOT).as_posix())
    text = Path(ROOT, "docs/flower.md").read_text()
    rows = re.findall(r"^\| `(flwr\.[\w.]+)` \| (.+) \|$", text, re.M)
    listed = {module: set(re.findall(r"`([\w/]+)`", folders)) for module, folders in rows}
    assert listed == findings
