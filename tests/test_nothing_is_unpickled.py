"""No code of ours unpickles; bombs are sent to each decoder in the decoders' own tests.

`tests/attacks/test_sandbox.py` sends pickles to a real node.
"""

import ast
from pathlib import Path

import pytest

from flwr_distill import ROOMS

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(file.parent.name for file in ROOT.glob("*/__init__.py"))
MODULES = {
    *("pickle", "_pickle", "cPickle", "pickletools", "copyreg", "marshal", "shelve", "dbm"),
    *("dill", "cloudpickle", "joblib", "jsonpickle", "multiprocess", "pathos", "hickle", "klepto"),
    *("torch.multiprocessing", "torch.package", "torch.hub", "torch.distributed"),
    *("xmlrpc", "Pyro4", "Pyro5", "rpyc", "logging.config"),
}
"""Whoever imports them unpickles, or runs code that came as data."""
PROCESSES = {"multiprocessing", "ProcessPoolExecutor"}
"""Their pipes, queues, managers, listeners and pools unpickle what other processes send."""
NAMES = {
    *("read_pickle", "to_pickle", "load_state_dict_from_url", "unsafe_load", "full_load"),
    *("Unpickler", "recv()", "torch.load", "yaml.load", "allow_pickle", "memmap"),
}
"""Calls that unpickle, of whatever they are an attribute."""


def loads(tree):
    """What a module imports or calls that may unpickle, by the names above."""
    safe = {call.func for call in ast.walk(tree) if reads_weights_alone(call)}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for name in names:
                    yield from prefixes(name.name)
            case ast.ImportFrom(module=str(module), names=names):
                for name in names:
                    yield from prefixes(f"{module}.{name.name}")
                    yield name.name
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield from prefixes(name)
            case ast.Call(func=ast.Attribute(attr="recv"), args=[], keywords=[]):
                yield "recv()"
            case ast.Attribute(attr=name) if node not in safe:
                yield name
                yield from prefixes(ast.unparse(node))
            case ast.keyword(arg="allow_pickle", value=value):
                if not (isinstance(value, ast.Constant) and value.value is False):
                    yield "allow_pickle"


def prefixes(name):
    """``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``."""
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def reads_weights_alone(node):
    return isinstance(node, ast.Call) and any(
        each.arg == "weights_only" and ast.unparse(each.value) == "True" for each in node.keywords
    )


def unpicklers(code):
    return set(loads(ast.parse(code))) & (MODULES | NAMES | PROCESSES)


def allowed(package):
    """A benchmark starts its own processes, of its own code, and is not installed."""
    return PROCESSES | {"recv()"} if package == "benchmarks" else set()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_or_calls_an_unpickler(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        assert not unpicklers(file.read_text()) - allowed(package), file


def test_the_search_covers_all_that_is_installed():
    installed = {"flwr_distill", *ROOMS}
    assert installed <= set(PACKAGES)
    assert not [package for package in installed if allowed(package)]


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads as read",
        "import dill.x",
        "import cloudpickle",
        "from joblib import load",
        "import marshal",
        "import shelve",
        "importlib.import_module('pickle')",
        "__import__('_pickle').loads(data)",
        "connection.recv()",
        "from multiprocessing import Pipe",
        "from multiprocessing.connection import Client, Listener",
        "from multiprocessing.managers import BaseManager",
        "import multiprocessing as mp",
        "from concurrent.futures import ProcessPoolExecutor",
        "concurrent.futures.ProcessPoolExecutor()",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "torch.load(file, weights_only=flag)",
        "from torch.multiprocessing import Queue",
        "torch.multiprocessing.Queue()",
        "torch.hub.load(name)",
        "map(torch.load, files)",
        "np.load(file, allow_pickle=True)",
        "np.load(file, allow_pickle=flag)",
        "np.lib.format.read_array(file, allow_pickle=1)",
        "pd.read_pickle(file)",
        "pandas.read_pickle(file)",
        "from pandas import read_pickle",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "logging.config.listen()",
    ],
)
def test_the_search_finds_unpicklers(code):
    assert unpicklers(code)


@pytest.mark.parametrize(
    "code",
    [
        "socket.recv(1024)",
        "torch.load(file, weights_only=True)",
        "np.load(file, allow_pickle=False)",
        "np.load(file)",
        "yaml.safe_load(text)",
        "json.load(file)",
        "from concurrent.futures import ThreadPoolExecutor",
    ],
)
def test_the_search_leaves_alone_what_reads_data(code):
    assert not unpicklers(code)
