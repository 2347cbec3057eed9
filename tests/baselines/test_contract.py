"""Baselines and the example are plug-ins like anyone's: they use the public modules alone."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from flwr_distill.protocol.registry import all_methods

ROOT = Path(__file__).resolve().parents[2]
BASELINES = ROOT / "baselines" / "flwr_distill_baselines"
PLUGINS = (BASELINES, ROOT / "examples" / "class-anchors" / "class_anchors")
PAGE = (ROOT / "docs" / "plugins.md").read_text()
SECTION = PAGE.partition("## Public modules")[2].partition("\n## ")[0]
PUBLIC = set(re.findall(r"`(flwr_distill[\w.]+)`", SECTION))
POINTS = tomllib.loads((ROOT / "baselines" / "pyproject.toml").read_text())["project"][
    "entry-points"
]["flwr_distill.methods"]


def modules(folder):
    return {file: ast.parse(file.read_text()) for file in sorted(folder.rglob("*.py"))}


def imports(tree):
    """Module and name of each import, inside functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


def named_in_texts(tree):
    """Module and attribute of each ``module:attribute`` in a text."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    for text in texts:
        if match := re.fullmatch(r"(flwr_distill[\w.]*):(\w+)", str(text)):
            yield match.groups()


def of_ours(module):
    return module.partition(".")[0] == "flwr_distill"


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_a_plug_in_uses_public_modules_and_names_alone(folder):
    used = [
        (file.relative_to(folder), module, name)
        for file, tree in modules(folder).items()
        for module, name in (*imports(tree), *named_in_texts(tree))
        if of_ours(module)
    ]
    assert len(used) > 10
    assert [use for use in used if use[1] not in PUBLIC or use[2].startswith("_")] == []


def test_public_modules_are_there_and_of_no_room_that_is_not():
    for module in PUBLIC:
        importlib.import_module(module)
        room, _, rest = module.removeprefix("flwr_distill.").partition(".")
        assert room not in ("cli", "fleet", "node", "server") or module.endswith("server.hooks")
        assert room != "strategies" or rest.startswith("common.")


@pytest.mark.parametrize("name", POINTS)
def test_a_baseline_is_one_folder_with_the_roles_of_built_in_methods(name):
    own = name.replace("-", "_")
    folder = BASELINES / own
    assert POINTS[name] == f"flwr_distill_baselines.{own}.method:METHOD"
    trees = {file.stem: tree for file, tree in modules(folder).items()}
    assert {"__init__", "method", "strategy"} <= trees.keys()
    sides = {"strategy": {"client"}, "client": {"strategy"}, "method": {"strategy", "client"}}
    for stem, tree in trees.items():
        for module, _ in imports(tree):
            if module.startswith("flwr_distill_baselines."):
                _, part, *rest = module.split(".")
                assert part in (own, "common"), f"{stem} imports {module}"
                assert not {*rest} & sides.get(stem, set()), f"{stem} imports {module}"


def test_baselines_are_installed_by_their_names():
    installed = {n: m.package for n, m in all_methods().items() if m.package}
    assert POINTS.keys() <= installed.keys()
    assert {installed[name].partition("==")[0] for name in POINTS} == {"flwr-distill-baselines"}


def test_reading_their_declarations_imports_neither_side_nor_pytorch():
    code = (
        "import sys; from flwr_distill.protocol import registry; registry.all_methods();"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {name for name in done.stdout.split() if name.startswith("flwr_distill_baselines")}
    assert len(imported) > len(POINTS)
    assert [name for name in imported if name.endswith((".strategy", ".client"))] == []
    assert "torch" not in done.stdout.split()
