"""Tables of the pages are whole, and each promise names tests that are there."""

import re

import pytest

from .pages import PAGES, ROOT, spans

PROMISES = ROOT / "docs" / "promises.md"
_NAMED = re.compile(r"(tests/[\w/]+\.py)(?:::)?|\b(test_\w+)\b(?!\.py)")


def promises():
    """Each promise with the file and the name, if any, of each test in its row."""
    section, default = "", None
    for line in PROMISES.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section, default = line, None
        elif match := re.search(r"Tests without a file are in `(tests/[\w/]+\.py)`", line):
            default = match[1]
        elif line.startswith("| ") and not line.startswith("| promise "):
            promise, named, _ = (cell.strip() for cell in line.strip("|").split("|"))
            file, tests = default, []
            for path, name in _NAMED.findall(named):
                file = path or file
                tests.append((file, name))
            yield pytest.param(section, promise, tests, id=promise[:60])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_row_of_a_table_is_in_it_and_has_its_columns(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    for begin, end in spans(page, "table_open"):
        columns = {len(re.findall(r"(?<!\\)\|", lines[n])) for n in range(begin, end)}
        assert len(columns) == 1, f"line {begin + 1}: rows of {sorted(columns)} bars"
    whole = [*spans(page, "table_open"), *spans(page, "fence")]
    inside = {n for begin, end in whole for n in range(begin, end)}
    bars = {place for place, line in enumerate(lines) if line.startswith("|")}
    assert not bars - inside, "rows beside a table"


@pytest.mark.parametrize(("section", "promise", "tests"), list(promises()))
def test_each_promise_names_a_test_that_is_there(section, promise, tests):
    assert tests, "it names none"
    for file, name in tests:
        assert file is not None, f"{name}: in which file?"
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8") if name else True
        assert (ROOT / file).is_file()


def test_no_promise_is_there_twice():
    findings = [(p.values[0], p.values[1]) for p in promises()]
    assert len(findings) == len(set(findings))
    assert len(findings) > 40


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_test_that_a_page_names_by_its_file_is_there(page):
    named = re.findall(r"\btests/[\w/]+\.py\b", page.read_text(encoding="utf-8"))
    assert not [file for file in named if not (ROOT / file).is_file()]
