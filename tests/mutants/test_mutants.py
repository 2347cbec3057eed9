"""The measurement of the tests themselves, on packages of a few lines."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from mutants import draw, measure, mutants_of, share_noticed

pytestmark = pytest.mark.matrix

SOURCE = '''"""A package."""

def larger(a: int | None, b: int) -> int:
    """Return the larger."""
    if a > b:
        return a
    return b


def unused(a):
    return a + 1
'''
GOOD = """
from tiny.larger import larger

def test_larger():
    assert larger(1, 2) == larger(2, 1) == 2
"""
CANNOT_FAIL = """
from tiny.larger import larger

def test_larger():
    larger(1, 2)
    larger(2, 1)
"""


@pytest.fixture
def tree(tmp_path):
    """Write a git work tree with a package and its test."""

    def write(test, source=SOURCE):
        root = tmp_path / "tree"
        (root / "tiny").mkdir(parents=True)
        (root / "tests").mkdir()
        (root / "tiny" / "__init__.py").write_text("")
        (root / "tiny" / "larger.py").write_text(source)
        (root / "tests" / "test_larger.py").write_text(test)
        subprocess.run(("git", "init", "-q"), cwd=root, check=True)
        return root

    return write


def contents(root):
    """Digest every file of a tree, with its time."""
    return {
        str(file): (file.stat().st_mtime_ns, hashlib.sha256(file.read_bytes()).hexdigest())
        for file in root.rglob("*")
        if file.is_file()
    }


def test_what_a_good_test_notices_and_no_test_runs(tree, tmp_path):
    root = tree(GOOD)
    before = contents(root)
    tried, places = measure(root, ("tiny",), 100, 0, tmp_path / "kept")
    outcomes = {mutant.before: mutant.outcome for mutant in tried}
    assert outcomes["return a + 1"] == "no test"
    assert {m.outcome for m in tried if m.before == "if a > b:"} == {"noticed"}
    assert {m.test for m in tried if m.noticed} == {"tests/test_larger.py::test_larger"}
    assert 0 < share_noticed(tried) < 1
    assert len(tried) == places
    assert contents(root) == before


def test_a_test_that_cannot_fail_lets_mutants_survive(tree, tmp_path):
    root = tree(CANNOT_FAIL)
    tried, _ = measure(root, ("tiny",), 100, 0, tmp_path / "kept")
    assert {m.outcome for m in tried if m.before == "if a > b:"} == {"survived"}
    assert share_noticed(tried) == 0


def test_the_same_seed_draws_the_same_mutants(tree):
    root = tree(GOOD)
    assert draw(root, ("tiny",), 3, 1) == draw(root, ("tiny",), 3, 1)
    drawn = {tuple(draw(root, ("tiny",), 2, seed)[0]) for seed in range(8)}
    assert len(drawn) > 1


def test_what_is_left_alone():
    source = """
from __future__ import annotations
if TYPE_CHECKING:
    limit = 1 + 1
__all__ = ["a"] + ["b"]

@dataclass(frozen=True)
class Range(Protocol):
    first: int | None = None

    @abstractmethod
    def check(self, value: int | str) -> int | None:
        log(1, "%d", value + 1)
        logger.info("%d", value + 1)
        raise ValueError(f"{value + 1}")

def call(a, *, b):
    return f(*a, **b)
"""
    places = mutants_of("a.py", source)
    left = {(m.line, m.operator) for mutants in places.values() for m in mutants}
    assert left == {(7, "core/RemoveDecorator")}
