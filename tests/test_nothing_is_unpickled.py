"""No code of ours unpickles; bombs are sent to each decoder in the decoders' own tests."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(file.parent.name for file in ROOT.glob("*/__init__.py"))
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def loads(tree):
    """What a module imports, and the calls in it that may unpickle."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name.partition(".")[0] for name in names)
            case ast.ImportFrom(module=str(module)):
                yield module.partition(".")[0]
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch" as module), attr="load")):
                yield f"{module}.load"
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=allowed)) if allowed:
                yield "allow_pickle"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_or_calls_an_unpickler(package):
    forbidden = UNPICKLERS | {"torch.load", "allow_pickle"}
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        assert not forbidden & set(loads(ast.parse(file.read_text()))), file


def test_the_search_covers_all_that_is_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    installed = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {"client", "node", "server"} <= set(installed) <= set(PACKAGES)


def test_the_search_finds_unpicklers():
    code = "import dill.x\nfrom pickle import loads\ntorch.load(f)\nnp.load(f, allow_pickle=True)"
    assert set(loads(ast.parse(code))) == {"dill", "pickle", "torch.load", "allow_pickle"}
