"""The table in docs/flower.md says what tests found on each Flower, and has all their rows."""

import re

from tests.faults.test_faults import DEPLOYED

from .conftest import ROOT
from .table import PAGE, column, read, written

MARK = re.compile(r'mark\.deployment\(\s*"([^"]+)"')


def results(tmp_path, *cases):
    """A file of pytest's, with these cases: the row that each is about, and its outcome."""
    texts = (
        f'<testcase name="test_{number}"><properties><property name="deployment" value="{row}"/>'
        f"</properties>{outcome}</testcase>"
        for number, (row, outcome) in enumerate(cases)
    )
    file = tmp_path / "results.xml"
    file.write_text(f"<testsuites><testsuite>{''.join(texts)}</testsuite></testsuites>")
    return file


def test_a_failure_counts_before_a_success_and_that_before_what_was_skipped(tmp_path):
    failed, skipped = '<failure message="no"/>', '<skipped message="no nginx"/>'
    cells = column(
        results(
            tmp_path,
            *(("runs", ""), ("stops", ""), ("stops", failed), ("stops", skipped)),
            *(("policy", ""), ("policy", skipped), ("nginx", skipped)),
            ("broken", "<error/>"),
        )
    )
    assert cells == {
        "runs": "yes",
        "stops": "no: `test_2` fails",
        "policy": "yes",
        "nginx": "not tried: no nginx",
        "broken": "no: `test_7` fails",
    }


def test_what_is_written_is_read_again_and_other_columns_stay():
    page = PAGE.read_text(encoding="utf-8")
    table = read(page)
    assert read(written(page, table)) == table
    more = {**table, "1.100.0": {"flies": "yes"}}
    read_again = read(written(page, more))
    assert list(read_again)[-1] == "1.100.0"  # by number, not by letter
    assert read_again["1.100.0"]["flies"] == "yes"
    assert {row: cell for row, cell in read_again["1.42.0"].items() if cell} == {
        row: cell for row, cell in table["1.42.0"].items() if cell
    }


def test_each_row_of_the_page_has_tests_and_each_marked_test_has_a_row():
    marked = {row for rows in DEPLOYED.values() for row in rows}
    for file in ROOT.glob("tests/**/test_*.py"):
        marked |= set(MARK.findall(file.read_text(encoding="utf-8")))
    table = read(PAGE.read_text(encoding="utf-8"))
    assert {row for column in table.values() for row in column} == marked
    assert {"1.32.1", "1.36.0", "1.42.0"} <= table.keys()
    for version, cells in table.items():
        assert not [row for row, cell in cells.items() if cell.startswith("no:")], version
