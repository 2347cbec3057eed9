"""What a survey finds in the columns that a run reads of a node's own table."""

import pytest

from flwr_distill.task.columns import Columns
from flwr_distill.task.datasets import DatasetError
from flwr_distill.task.table_survey import survey_table

STATED = "age,sex:f|m|d,chol:200+-50"
HEADER = "name,age,sex,chol,ill"


def found_in(tmp_path, *rows, columns=STATED, header=HEADER):
    path = tmp_path / "own.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return survey_table(path, Columns.parsed(columns, "ill"), ("no", "yes"))


def places(found, kind):
    return [finding.place for finding in found.of_kind(kind)]


def test_values_missing_and_wrong_ones_are_counted_by_column(tmp_path):
    found = found_in(
        tmp_path,
        "Ann,61,f,240,no",
        "Bob,,m,210,yes",
        "Cy,x,male,1e200,maybe",
        "Di,47,f,,no",
        "Ed,1_000,f,nan,no",
        *(f"Fay,\x1b[2J{number},f,240,no" for number in range(50)),
    )
    by_name = {own.column.name: (own.usable, own.missing, own.wrong) for own in found.columns}
    assert by_name == {"age": (2, 1, 52), "sex": (54, 0, 1), "chol": (52, 1, 2), "ill": (54, 0, 1)}
    age, sex, _, ill = found.columns
    assert list(age.numbers) == [61, 47]
    assert age.examples == ["x", "1_000", r"'\x1b[2J0'"]  # few, and printable
    assert sex.categories == {"f": 53, "m": 1, "d": 0}
    assert ill.categories == {"no": 53, "yes": 1}
    assert found.counts == {"no": 1, "yes": 0}


def test_every_row_that_a_run_would_refuse_is_found_by_line_without_its_values(tmp_path):
    found = found_in(
        tmp_path, "Ann,61,f,240,no", "", "Bob,Smith,,240,no", ",,,,", "Cy,1,f", "Di,47,f,1e200,no"
    )
    assert places(found, "unreadable") == ["line 4", "line 6", "line 7"]
    reason = found.of_kind("unreadable")[0].reason
    assert "age" in reason
    assert "sex" in reason
    assert "Smith" not in reason
    assert found.usable == 1


def test_constant_columns_are_found_also_those_of_one_category(tmp_path):
    found = found_in(tmp_path, "Ann,7,f,240,no", "Bob,7,f,210,no")
    assert places(found, "constant") == ["column age", "column sex"]


def test_a_column_in_another_unit_than_the_run_states_is_found(tmp_path):
    found = found_in(tmp_path, "Ann,61,f,24000,no", "Bob,47,m,21000,no")
    assert places(found, "unit") == ["column chol"]


def test_the_same_row_again_is_a_duplicate_or_a_conflict(tmp_path):
    found = found_in(tmp_path, "Ann,61,f,240,no", "Ann,61.0,f,240,no", "Bob,61,f,240,yes")
    assert places(found, "duplicate") == ["line 3"]
    assert places(found, "conflict") == ["line 4"]


@pytest.mark.parametrize(
    ("header", "rows", "named"),
    [
        ("name,age,sex,kol,ill", ["Ann,61,f,240,no"], "chol"),
        ("age,age,sex,chol,ill", ["1,61,f,240,no"], "age"),
        (HEADER, [], "own.csv"),
    ],
)
def test_a_table_that_cannot_be_read_at_all_is_an_error_as_in_a_run(tmp_path, header, rows, named):
    with pytest.raises(DatasetError, match=named):
        found_in(tmp_path, *rows, header=header)


def test_a_parquet_file_is_surveyed_as_the_same_csv(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"ill": ["no", "yes"], "age": [61.0, None], "sex": ["f", "x"], "chol": [240, 210]}
    parquet.write_table(arrow.table(columns), tmp_path / "own.parquet")
    found = survey_table(tmp_path / "own.parquet", Columns.parsed(STATED, "ill"), ("no", "yes"))
    assert places(found, "unreadable") == ["row 2"]
    assert found.columns[0].missing == 1
    assert found.columns[1].wrong == 1
