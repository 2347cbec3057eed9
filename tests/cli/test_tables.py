"""Tables of pages in a terminal of 80 columns: all of each cell is there, and no word is broken."""

import io

import pytest
from rich.console import Console

from flwr_distill.cli.run_log import print_table
from flwr_distill.strategies.common.sections import Table

SCORE = "85.3 % [82.1, 88.0]"


def printed(title, table, keys=1):
    console = Console(file=io.StringIO(), width=80)
    print_table(console, title, table, keys)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("number", [7, 30])
def test_a_wide_table_is_printed_in_parts_each_with_the_names_of_its_rows(number):
    columns = ["node", "#samples", *(f"#metric {place}" for place in range(number))]
    table = Table(columns, [["st-marys-radiology-2", "1,234", *(number * [SCORE])]])
    lines = printed("By node", table)
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if "│" in line]
    assert sum(line.count(SCORE) for line in rows) == number
    assert all("st-marys-radiology-2" in line for line in rows)
    text = " ".join(lines)
    assert all(f" metric {place} " in text for place in range(number))
    assert text.count("By node, continued") == len(rows) - 1


def test_rows_that_two_columns_name_have_both_in_each_part():
    columns = ["method", "C", *(f"number {place}" for place in range(9))]
    lines = printed("Table 3", Table(columns, [["FedAvg", "2", *(9 * ["91.25 ± 0.31"])]]), 2)
    rows = [line for line in lines if "│" in line]
    assert len(rows) > 1
    assert all(line.split("│")[1:3] == [" FedAvg ", " 2 "] for line in rows)


def test_a_table_whose_words_fit_stays_whole():
    columns = ["run", *(6 * ["#accuracy"])]
    lines = printed("Results", Table(columns, [["fedavg", *(6 * ["29.3 % on nodes"])]]))
    assert sum("fedavg" in line for line in lines) == 1
    assert "continued" not in " ".join(lines)


def test_names_with_brackets_are_shown_as_they_are():
    lines = printed("Of [/b]", Table(["node [/i]"], [["ward [bold]"]]))
    text = " ".join(lines)
    assert all(word in text for word in ("Of [/b]", "node [/i]", "ward [bold]"))
