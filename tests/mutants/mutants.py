"""Mutants: the share of small changes of the code that the fast tests notice.

Cosmic Ray finds where and how code can be changed: another operator, a number plus or minus one, a
negated condition, a loop that never runs, and so on. Every place counts once, with one change drawn
for it; the seed draws a sample of the places.

The fast tests run once under coverage. Each mutant is put into a copy of the tree, and some of the
tests of its line run on it: the fastest, those that run most of its file, and for a loop or a
condition those that enter it. A line that runs at import, such as a default, has the tests of its
whole file and those of approved results, which may read it without running it. A mutant is noticed
if a test fails or takes far too long. At the end the tests that noticed mutants run unchanged
code: one that fails there as well proves nothing.

Texts of errors and logs, annotations, ``if TYPE_CHECKING`` and arguments such as ``strict`` and
``frozen`` are never changed. After 18 minutes no more mutants are started. Coverage is cached in
``.mutants`` until a file changes. The exit code is 1 if less than 85 % is noticed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from coverage import CoverageData
from rich.console import Console

APP_DIR = Path(__file__).resolve().parents[2]
FOLDERS = (
    *("distill", "strategies", "links", "storage", "protocol"),
    *("client", "server", "flower", "task", "base"),
)
FAST = "not slow and not faults and not docker and not matrix and not wheel"
APPROVED = ("tests/golden/", "tests/server/test_settings_catalogue.py")
COPIES = 2  # mutants at once
LAST_START = 18 * 60  # seconds after which no mutant is started
LEAST_SHARE = 0.85

MAX_TESTS = 60  # of the fastest of a line, and again of those that run most of its file
MAX_SECONDS = 15.0  # that these take under coverage
START_SECONDS = 120.0  # a process's imports, on a busy machine
SLOWER = 5  # times the seconds that the tests took under coverage, and a mutant hangs

SAME = ("NoOp", "_Eq_Is", "_NotEq_IsNot", "_Is_Eq", "_IsNot_NotEq")  # mostly no other behaviour
CALCULATIONS = {"arith_expr", "term", "expr", "and_expr", "xor_expr", "shift_expr", "power"}
NEVER_MUTATED = {"name", "newline", "string", "endmarker", "fstring_string"}
LOGGERS = {"log", "logger", "logging", "warnings"}
GUARDS = {"frozen", "maxsize", "slots", "strict"}  # keep code from mistakes, or make it fast
MARKS = {"abstractmethod", "overload", "override", "runtime_checkable"}  # for type checkers

Position = tuple[int, int]


@dataclass(frozen=True)
class Mutant:
    """One change of one place."""

    path: str
    line: int
    operator: str
    occurrence: int
    before: str = ""
    after: str = ""
    outcome: str = ""  # noticed, timeout (noticed too), survived, or no test (survived too)
    test: str = ""  # the first that failed

    @property
    def noticed(self) -> bool:
        return self.outcome in ("noticed", "timeout")


@dataclass(frozen=True)
class Coverage:
    """What tests run which line."""

    seconds: dict[str, float] = field(default_factory=dict)  # of each test that passed
    lines: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Tests by file and line number; an empty name stands for an import."""

    def tests_of(self, path: str, lines: Iterable[int], body: Iterable[int] = ()) -> list[str]:
        """List the tests to run for a change in these lines of a file, the fastest first.

        Of a loop's or a condition's line, `body` is where the code may continue.
        """
        by_line = self.lines.get(path, {})
        share = Counter(test for tests in by_line.values() for test in set(tests))
        found = {test for line in lines for test in by_line.get(str(line), [])}
        approved: set[str] = set()
        if "" in found:
            found = set(share)
            approved = {test for test in self.seconds if test.startswith(APPROVED)}
        found &= set(self.seconds)
        nearest = sorted(found, key=lambda test: (-share[test], self.seconds[test], test))
        inside = [found.intersection(by_line.get(str(line), ())) for line in body]
        groups = [self._fastest(found), nearest, *map(self._fastest, inside)]
        first = {test for group in groups for test in self._first(group[:MAX_TESTS])}
        return self._fastest(first.union(self._first(self._fastest(approved))))

    def _fastest(self, tests: Iterable[str]) -> list[str]:
        return sorted(tests, key=lambda test: (self.seconds[test], test))

    def _first(self, tests: list[str]) -> list[str]:
        """Take tests while there is time for them, and one in any case."""
        taken, left = tests[:1], MAX_SECONDS
        for test in tests:
            left -= self.seconds[test]
            if left > 0 and test not in taken:
                taken.append(test)
        return taken


def tree_files(root: Path) -> list[str]:
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted(name for name in set(names.split("\0")) if name and (root / name).is_file())


def copy_tree(root: Path, target: Path) -> Path:
    for name in tree_files(root):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target / name)
    return target


def run_python(copy: Path, *args: str, limit: float | None = None) -> tuple[int | None, str]:
    unset = ("PYTEST_", "COV", "PYTHONDONTWRITEBYTECODE")  # bytecode halves the imports
    env = {k: v for k, v in os.environ.items() if not k.startswith(unset)}
    env |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    env |= {"COVERAGE_FILE": str(copy / ".coverage"), "COLUMNS": "200"}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            (sys.executable, *args),
            cwd=copy,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what the tests have left
            process.wait()
        output.seek(0)
        return code, output.read()


def run_tests(copy: Path, *args: str, limit: float | None = None) -> tuple[int | None, str]:
    return run_python(copy, "-m", "pytest", "-p", "no:cacheprovider", *args, limit=limit)


def run_chosen(copy: Path, tests: list[str], *args: str, limit: float) -> tuple[int | None, str]:
    names = copy / ".chosen-tests"
    names.write_text("\n".join(tests) + "\n")
    return run_tests(copy, "-q", "--tb=no", "-rfE", *args, f"@{names.name}", limit=limit)


def failed(output: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)


def check_imports(copy: Path, folders: Iterable[str]) -> None:
    """Make sure that the copy's packages are imported, not the installed ones."""
    code = "import importlib.util, sys\nfor name in sys.argv[1:]:\n"
    code += "    print(*importlib.util.find_spec(name).submodule_search_locations)"
    _, output = run_python(copy, "-c", code, *(f"flwr_distill.{folder}" for folder in folders))
    if output.split() != [str(copy / folder) for folder in folders]:
        raise RuntimeError(f"not the copy's packages: {output}")


def measure_coverage(copy: Path, folders: Iterable[str]) -> Coverage:
    args = ("-q", "-n", str(COPIES), "-m", FAST, "-rp", "--durations=0", "--durations-min=0", "-vv")
    covers = [f"--cov={folder}" for folder in folders]
    _, output = run_tests(copy, *args, *covers, "--cov-context=test", "--cov-report=")
    passed = set(re.findall(r"^PASSED (.+)$", output, re.MULTILINE))
    seconds = dict.fromkeys(sorted(passed), 0.0)
    for taken, test in re.findall(
        r"^([\d.]+)s (?:setup|call|teardown) +(.+)$", output, re.MULTILINE
    ):
        if test in seconds:
            seconds[test] += float(taken)
    data = CoverageData(str(copy / ".coverage"))
    data.read()
    lines = {}
    for name in sorted(data.measured_files()):
        by_line = data.contexts_by_lineno(name).items()
        lines[str(Path(name).relative_to(copy))] = {
            str(line): sorted({context.rpartition("|")[0] for context in contexts})
            for line, contexts in sorted(by_line)
        }
    if not passed or not lines:
        raise RuntimeError("no test passed under coverage:\n" + output[-4000:])
    return Coverage(seconds, lines)


def kept_coverage(root: Path, copy: Path, folders: Iterable[str], kept: Path) -> Coverage:
    digest = hashlib.sha256(repr((tuple(folders), sys.version)).encode())
    for name in tree_files(root):
        digest.update(f"{name}\0".encode() + hashlib.sha256((root / name).read_bytes()).digest())
    file = kept / f"coverage-{digest.hexdigest()[:16]}.json"
    if file.exists():
        return Coverage(**json.loads(file.read_text()))
    coverage = measure_coverage(copy, folders)
    kept.mkdir(parents=True, exist_ok=True)
    for old in kept.glob("coverage-*.json"):
        old.unlink()
    file.write_text(json.dumps(asdict(coverage)))
    return coverage


def root_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def left_alone(tree: ast.Module) -> Iterator[tuple[Position, Position]]:
    """Find where a change would change no behaviour that a test should look at."""
    for node in ast.walk(tree):
        parts: list[ast.expr | ast.stmt | None] = []
        match node:
            case ast.AnnAssign():
                parts = [node.annotation]
            case ast.arg():
                parts = [node.annotation]
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                parts = [node.returns]
                for mark in node.decorator_list:
                    if (mark.attr if isinstance(mark, ast.Attribute) else root_name(mark)) in MARKS:
                        yield (mark.lineno, 0), (mark.lineno + 1, 0)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Raise():
                parts = [node]
            case ast.Assert():
                parts = [node.msg]
            case ast.keyword() if node.arg in GUARDS:
                parts = [node.value]
            case ast.Expr(value=ast.Call()) if root_name(node.value) in LOGGERS:
                parts = [node]
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                parts = [node]
        for part in parts:
            if part is not None:
                end = (part.end_lineno or part.lineno, part.end_col_offset or 0)
                yield (part.lineno, part.col_offset), end


def mutants_of(path: str, source: str) -> dict[tuple[Position, Position], list[Mutant]]:
    operators = {
        name: get_operator(name)()
        for name in sorted(operator_names())
        if not get_operator(name).arguments() and not name.endswith(SAME)
    }
    spans = list(left_alone(ast.parse(source)))
    places: dict[tuple[Position, Position], list[Mutant]] = {}
    counts: Counter[str] = Counter()
    for node in ast_nodes(get_ast(source)):
        if node.type in NEVER_MUTATED or getattr(node, "value", "") in tuple("()[]{},.:="):
            continue
        for name, operator in operators.items():
            for place in operator.mutation_positions(node):
                start = tuple(place[0])
                mutant = Mutant(path, start[0], name, counts[name])
                counts[name] += 1
                if any(first <= start < last for first, last in spans):
                    continue
                if "ReplaceBinaryOperator" in name and node.parent.type not in CALCULATIONS:
                    continue
                places.setdefault((start, tuple(place[1])), []).append(mutant)
    return places


def mutated(mutant: Mutant, source: str) -> str:
    try:
        text = str(mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence))
        with warnings.catch_warnings(action="ignore"):
            compile(text, mutant.path, "exec")
    except (AttributeError, SyntaxError):  # the first where Cosmic Ray meets a dotted exception
        return ""
    return text


def draw(root: Path, folders: Iterable[str], sample: int, seed: int) -> tuple[list[Mutant], int]:
    rng = random.Random(seed)
    one_each = []
    for path in tree_files(root):
        if path.split("/")[0] in folders and path.endswith(".py") and "_pb2" not in path:
            places = mutants_of(path, (root / path).read_text())
            one_each += [rng.choice(places[place]) for place in sorted(places)]
    rng.shuffle(one_each)
    drawn: list[Mutant] = []
    for mutant in one_each:
        if len(drawn) == sample:
            break
        source = (root / mutant.path).read_text()
        if text := mutated(mutant, source):
            before, after = changed_line(source, text)
            drawn.append(replace(mutant, before=before, after=after))
    return drawn, len(one_each)


def changed_line(source: str, text: str) -> tuple[str, str]:
    lines = [
        line
        for line in difflib.unified_diff(source.splitlines(), text.splitlines(), n=0, lineterm="")
        if line[1:].strip() and not line.startswith(("---", "+++", "@@"))
    ]
    before, after = ([line[1:].strip() for line in lines if line[0] == sign] for sign in "-+")
    return next(iter(before), ""), next(iter(after), "")


def lines_to_look_up(source: str, line: int) -> tuple[list[int], list[int], list[int]]:
    """Tell the line, the lines of the statement around it, and where the statements inside begin.

    Lines of statements inside do not count as the statement's own.
    """
    around, body = [line], []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            inside = {
                inner
                for child in ast.walk(node)
                if isinstance(child, ast.stmt) and child is not node
                for inner in range(child.lineno, (child.end_lineno or child.lineno) + 1)
            }
            if line not in inside:
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                around = [number for number in lines if number not in inside]
                parts = (getattr(node, part, []) for part in ("body", "orelse"))
                body = [part[0].lineno for part in parts if part]
    return [line], around, body


def try_mutant(mutant: Mutant, copy: Path, coverage: Coverage) -> Mutant:
    file = copy / mutant.path
    source = file.read_text()
    line, statement, body = lines_to_look_up(source, mutant.line)
    tests = coverage.tests_of(mutant.path, line, body)
    tests = tests or coverage.tests_of(mutant.path, statement, body)
    if not tests:
        return replace(mutant, outcome="no test")
    try:
        write_anew(file, mutated(mutant, source))
        limit = START_SECONDS + SLOWER * sum(coverage.seconds[test] for test in tests)
        code, output = run_chosen(copy, tests, "-x", limit=limit)
    finally:
        write_anew(file, source)
    if code is None:
        return replace(mutant, outcome="timeout")
    if code in (0, 5):
        return replace(mutant, outcome="survived")
    return replace(mutant, outcome="noticed", test=next(iter(failed(output)), ""))


def write_anew(file: Path, text: str) -> None:
    """Write a file with a time of its own: Python knows stale bytecode by the second alone."""
    later = int(file.stat().st_mtime) + 2
    file.write_text(text)
    os.utime(file, (later, later))


def without_false_alarms(
    found: list[Mutant], copy: Path, seconds: dict[str, float]
) -> list[Mutant]:
    """Take back what was noticed by a test that fails without a mutant, too."""
    tests = sorted({mutant.test for mutant in found} & set(seconds))
    if not tests:
        return found
    limit = START_SECONDS + SLOWER * sum(seconds[test] for test in tests)
    alarms = set(failed(run_chosen(copy, tests, limit=limit)[1]))
    return [replace(m, outcome="survived") if m.test in alarms else m for m in found]


def measure(
    root: Path, folders: tuple[str, ...], sample: int, seed: int, kept: Path
) -> tuple[list[Mutant], int]:
    began = time.monotonic()
    drawn, places = draw(root, folders, sample, seed)
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory).resolve()
        copies = [copy_tree(root, base / str(number)) for number in range(COPIES)]
        for copy in copies:
            check_imports(copy, folders)
        coverage = kept_coverage(root, copies[0], folders, kept)
        print(f"{time.monotonic() - began:4.0f} s: {len(coverage.seconds)} tests", flush=True)
        free: SimpleQueue[Path] = SimpleQueue()
        for copy in copies:
            free.put(copy)

        def attempt(mutant: Mutant) -> Mutant | None:
            if time.monotonic() - began > LAST_START:
                return None
            copy = free.get()
            try:
                found = try_mutant(mutant, copy, coverage)
            finally:
                free.put(copy)
            seconds = time.monotonic() - began
            print(f"{seconds:4.0f} s: {found.outcome}: {found.path}:{found.line}", flush=True)
            return found

        with ThreadPoolExecutor(COPIES) as pool:
            tried = [found for found in pool.map(attempt, drawn) if found is not None]
        return without_false_alarms(tried, copies[0], coverage.seconds), places


def share_noticed(tried: list[Mutant]) -> float:
    return sum(mutant.noticed for mutant in tried) / max(len(tried), 1)


def show(tried: list[Mutant], places: int) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for mutant in sorted(tried, key=lambda mutant: (mutant.path, mutant.line)):
        if not mutant.noticed:
            console.print(f"{mutant.path}:{mutant.line}: {mutant.outcome}")
            console.print(f"    {mutant.before}  ->  {mutant.after or '(nothing)'}")
    outcomes = Counter(mutant.outcome for mutant in tried)
    noticed = outcomes["noticed"] + outcomes["timeout"]
    console.print(
        f"noticed {noticed} of {len(tried)} ({share_noticed(tried):.1%}), {outcomes['timeout']} of"
        f" them by time; {outcomes['no test']} where no test comes; {places} places in all"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--sample", type=int, default=150, help="mutants to try")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    tried, places = measure(APP_DIR, FOLDERS, args.sample, args.seed, APP_DIR / ".mutants")
    show(tried, places)
    if args.json is not None:
        results = {
            "seed": args.seed,
            "places": places,
            "share_noticed": share_noticed(tried),
            "mutants": [asdict(mutant) for mutant in tried],
        }
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    if not tried:
        sys.exit("no time was left for mutants; run it again: what tests run which line is kept")
    sys.exit(share_noticed(tried) < LEAST_SHARE)


if __name__ == "__main__":
    main()
