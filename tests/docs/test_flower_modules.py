"""docs/flower.md lists what of Flower's private modules is imported, and by whom."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = {"app", "clientapp", "common", "serverapp", "simulation"}
"""Packages of Flower whose names are for users; modules within them are not."""
PUBLIC_WITHIN = {"flwr.clientapp.mod", "flwr.serverapp.strategy"}


def imported(tree):
    """Modules of Flower's that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr."):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("flwr."))


def is_private(module):
    _, *path = module.split(".")
    return module not in PUBLIC_WITHIN and (len(path) > 1 or path[0] not in PUBLIC)


def test_the_docs_name_every_private_module_of_flowers_and_who_imports_it():
    found = defaultdict(set)
    rooms = {file.parent for file in ROOT.glob("*/__init__.py")} - {ROOT / "benchmarks"}
    for file in (file for room in rooms for file in room.rglob("*.py")):
        for module in imported(ast.parse(file.read_text(encoding="utf-8"))):
            if is_private(module):
                found[module].add(file.relative_to(ROOT).as_posix())
    rows = re.findall(
        r"^\| `(flwr\.[\w.]+)` \| (.+) \|$", Path(ROOT, "docs/flower.md").read_text(), re.M
    )
    told = {module: set(re.findall(r"`([\w/.]+)`", files)) for module, files in rows}
    assert told == found
