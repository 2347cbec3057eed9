"""What is used of Flower is found in the source, and an incompatible Flower fails with a name."""

import ast
from pathlib import Path

import pytest

from flwr_distill.flower import names
from flwr_distill.flower.lines import FOLDERS, line

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
import flwr.supernode.cli
from flwr.app import Message, Nothing
from flwr.gone import Lost
from flwr.supernode import start_client_internal as loop
from flwr_distill.base.text import counted

def patched():
    from flwr.server.superlink.linkstate import LinkState as State
    loop.start_client_internal(State.store_message_ins, State.lost, Message.lost)
    counted.nothing
"""


@pytest.fixture
def module(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(SOURCE)
    return file


def test_imports_and_attributes_of_what_is_imported_are_found(module):
    assert [str(use) for use in names.uses_in([module, module])] == [
        "flwr.app:Message",
        "flwr.app:Message.lost",
        "flwr.app:Nothing",
        "flwr.gone:Lost",
        "flwr.server.superlink.linkstate:LinkState",
        "flwr.server.superlink.linkstate:LinkState.lost",
        "flwr.server.superlink.linkstate:LinkState.store_message_ins",
        "flwr.supernode.cli",
        "flwr.supernode.start_client_internal",
        "flwr.supernode.start_client_internal:start_client_internal",
    ]


def test_what_the_installed_flower_does_not_have_is_named_with_the_reason(module):
    problems = {str(use): use.problem() for use in names.uses_in([module])}
    assert {name for name, problem in problems.items() if problem} == {
        "flwr.app:Message.lost",
        "flwr.app:Nothing",
        "flwr.gone:Lost",
        "flwr.server.superlink.linkstate:LinkState.lost",
    }
    assert "flwr.gone" in problems["flwr.gone:Lost"]


def test_the_installed_flower_has_all_names_that_its_line_uses(capsys):
    with pytest.raises(SystemExit) as ended:
        names.main()
    printed = capsys.readouterr().out
    assert ended.value.code == 0, printed
    assert FOLDERS[line()] in printed


def test_where_no_folder_serves_the_installed_flower_each_is_checked(monkeypatch, capsys):
    monkeypatch.setattr(names, "line", lambda: "9.9")
    with pytest.raises(SystemExit) as ended:
        names.main()
    printed = capsys.readouterr().out
    assert ended.value.code == 1
    assert all(folder in printed for folder in FOLDERS.values())
    assert "flwr.proto.runtime_pb2" in printed  # of a line that is not installed


@pytest.mark.parametrize("folder", sorted(set(FOLDERS.values())))
def test_each_folder_has_what_the_executor_takes_of_it(folder):
    """Its modules import only where its Flower is installed, so their source is read."""
    tree = ast.parse((ROOT / "flower" / folder / "node" / "appio.py").read_text())
    bound = {alias.asname or alias.name for alias in _imports(tree)}
    bound |= {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    bound |= {
        target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
    }
    used = {
        node.attr
        for file in ("executor.py", "task.py")
        for node in ast.walk(ast.parse((ROOT / "flower" / file).read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "appio"
    }
    assert used
    assert used <= bound


def _imports(tree):
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from node.names
