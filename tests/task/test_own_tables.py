"""A node's own table: columns by name, categories, and the scale that all nodes share."""

from fractions import Fraction

import numpy as np
import pytest

from flwr_distill.protocol.arrays import as_arrays
from flwr_distill.protocol.meeting import SUMS, record_of_sums, scale_in
from flwr_distill.task.columns import Columns, Moments, Scale, dwarfed, pooled, scale_of_sums
from flwr_distill.task.datasets import DatasetError, RawSamples, load_own_table, moments_of
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import check_columns, data_spec, open_columns
from flwr_distill.task.survey import survey
from tests.errors import at

STATED = "age,sex:f|m,chol:200+-50"
ROWS = [("61", "f", "240", "no"), ("47", "m", "210", "yes")]


def settings(columns=STATED, **more):
    config = {
        "dataset": "private",
        "private.classes": "no,yes",
        "private.label": "ill",
        "private.columns": columns,
    }
    return TaskSettings.from_run_config(config | more)


def load(path, task=None, scale=None):
    task = task or settings()
    spec = data_spec(task, scale=scale)
    return load_own_table(path, spec, task.private.table, is_scaled=scale is not None)


def write(path, header="age,sex,chol,ill", rows=ROWS):
    path.write_text("\n".join([header, *map(",".join, rows)]) + "\n")
    return path


def test_columns_are_found_by_name_and_others_are_not_read(tmp_path):
    plain = load(write(tmp_path / "plain.csv"))
    assert plain.images[:, :, 0, 0].tolist() == [[61, 1, 0, 240], [47, 0, 1, 210]]
    assert plain.labels.tolist() == [0, 1]
    swapped = [(ill, "Smith, J.", chol, age, sex) for age, sex, chol, ill in ROWS]
    rows = [(f'"{name}"', *rest) for ill, name, *rest in swapped for rest in [[ill, *rest]]]
    other = load(write(tmp_path / "other.csv", "name,ill,chol,age,sex", rows))
    assert np.array_equal(other.images, plain.images)
    assert np.array_equal(other.labels, plain.labels)


def test_a_spec_names_the_inputs_and_standardises_numbers_alone():
    task = settings()
    assert open_columns(task) == ("age",)
    spec = data_spec(task, scale=Scale((50.0,), (9.0,)))
    assert spec.labels.columns == ("age", "sex=f", "sex=m", "chol")
    assert spec.mean == (50.0, 0.0, 0.0, 200.0)
    assert spec.std == (9.0, 1.0, 1.0, 50.0)
    assert spec.class_names == ("no", "yes")


def test_large_numbers_keep_their_differences(tmp_path):
    """Milliseconds of an hour, which float32 cannot tell apart."""
    times = [str(1_750_000_000_000 + 60_000 * minute) for minute in range(60)]
    rows = [(time, "f", "200", "no") for time in times]
    raw = load(write(tmp_path / "table.csv", rows=rows))
    scale = pooled([moments_of(raw, settings().private.table)])
    inputs = raw.to_samples(data_spec(settings(), scale=scale)).inputs[:, 0, 0, 0]
    assert len(set(inputs.tolist())) == 60
    assert float(inputs.std(correction=0)) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        (0, "", "age is missing"),
        (0, "Smith", "age is no number"),
        (0, "1_000", "age is no number"),
        (0, "nan", "age is not finite"),
        (0, "1e200", "age is not finite, or beyond"),
        (1, "", "sex is missing"),
        (1, "Smith", "sex is not among f and m"),
        (3, "Smith", "ill is not among no and yes"),
    ],
)
def test_a_wrong_value_is_an_error_with_its_line_that_does_not_show_it(
    tmp_path, column, value, problem
):
    """The server reads why a node does not take part."""
    wrong = [*ROWS[1][:column], value, *ROWS[1][column + 1 :]]
    path = write(tmp_path / "table.csv", rows=[ROWS[0], wrong])
    with pytest.raises(DatasetError, match=problem, check=at(f"{path}, line 3")) as error:
        load(path)
    assert "Smith" not in str(error.value)


def test_a_table_of_another_system_reads_as_the_same(tmp_path):
    """Accents apart from their letters, as macOS writes them, and rows without values."""
    apart, joined = "Zoe\u0308", "Zo\u00eb"
    task = settings(f"{apart},sex:{apart}|m,chol:200+-50")
    plain = load(write(tmp_path / "plain.csv", f"{joined},sex,chol,ill", ROWS[1:]), task)
    rows = [(",,,",), ROWS[1], ("", " ", "", "")]
    other = load(write(tmp_path / "other.csv", f"{apart},sex,chol,ill", rows), task)
    assert np.array_equal(other.images, plain.images)
    named = load(
        write(tmp_path / "named.csv", rows=[("1", apart, "2", "no")]),
        settings(f"age,sex:{joined}|m,chol:200+-50"),
    )
    assert named.images[0, :, 0, 0].tolist() == [1, 1, 0, 2]


@pytest.mark.parametrize(
    ("header", "rows", "where", "problem"),
    [
        ("age,sex,kol,ill", ROWS, "", "missing chol.*kol.*chol"),
        ("age,age,sex,chol,ill", [("1", *ROWS[0])], ", columns", "'age' is there twice"),
        ("age,sex,chol,ill", [ROWS[0][:3]], ", line 2", "has 3 values"),
        ("age,sex,chol,ill", [], "", "no rows"),
    ],
)
def test_a_table_of_another_form_is_an_error(tmp_path, header, rows, where, problem):
    path = write(tmp_path / "table.csv", header, rows)
    with pytest.raises(DatasetError, match=problem, check=at(f"{path}{where}")):
        load(path)


def test_a_column_in_another_unit_than_the_runs_is_an_error(tmp_path):
    path = write(tmp_path / "table.csv")
    load(path, scale=Scale((50.0,), (9.0,)))
    with pytest.raises(DatasetError, match="unit", check=at(f"{path}, column 'age'")):
        load(path, scale=Scale((50_000.0,), (9.0,)))


def test_a_parquet_file_reads_as_the_same_csv(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    task = settings("age,sex:1|2,chol:200+-50")
    rows = [("61.5", "1", "240", "no"), ("47", "2", "210", "yes")]
    plain = load(write(tmp_path / "table.csv", rows=rows), task)
    columns = {
        "ill": ["no", "yes"],
        "chol": [240, 210],
        "sex": [1.0, 2.0],  # as pandas makes of integers with gaps
        "age": [61.5, 47.0],
        "name": ["Smith", None],
    }
    parquet.write_table(arrow.table(columns), tmp_path / "table.parquet")
    other = load(tmp_path / "table.parquet", task)
    assert np.array_equal(other.images, plain.images)
    assert np.array_equal(other.labels, plain.labels)
    parquet.write_table(arrow.table(columns | {"age": [61.5, None]}), tmp_path / "gap.parquet")
    with pytest.raises(DatasetError, match="row 2: age is missing"):
        load(tmp_path / "gap.parquet", task)


def test_spaces_and_accents_of_a_parquet_file_read_as_those_of_the_same_csv(tmp_path):
    """As databases pad texts, and macOS splits letters from their accents."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    apart, joined = "Zoe\u0308", "Zo\u00eb"
    task = settings(f"{joined},sex:f|m,chol:200+-50")
    columns = {
        f"{apart} ": ["61", " 47"],
        "sex": ["f   ", "m"],
        " chol": [240, 210],
        "ill": ["no", "yes "],
    }
    rows = [list(map(str, row)) for row in zip(*columns.values(), strict=True)]
    plain = load(write(tmp_path / "table.csv", ",".join(columns), rows), task)
    parquet.write_table(arrow.table(columns), tmp_path / "table.parquet")
    other = load(tmp_path / "table.parquet", task)
    assert np.array_equal(other.images, plain.images)
    assert np.array_equal(other.labels, plain.labels)
    parquet.write_table(arrow.table(columns | {"sex": ["  ", "m"]}), tmp_path / "blank.parquet")
    with pytest.raises(DatasetError, match="row 1: sex is missing"):
        load(tmp_path / "blank.parquet", task)


@pytest.mark.parametrize(
    ("columns", "more", "said"),
    [
        ("age,age", {}, "age.*twice"),
        ("age,sex:f", {}, "sex.*two or more"),
        ("age,sex:f|f", {}, "sex.*twice"),
        ("age:5+-0", {}, "age.*above 0"),
        ("age:x+-1", {}, "age.*two numbers"),
        ("a=b", {}, "a=b"),
        ("age,ill", {}, "ill.*twice"),
        ("age,", {}, "another name"),
        ("age", {"private.classes": ""}, "private.classes"),
    ],
)
def test_columns_that_are_written_wrongly_are_an_error(columns, more, said):
    with pytest.raises(SettingsError, match=said, check=at("private.columns", value=columns)):
        settings(columns, **more)


@pytest.mark.parametrize("text", ["1.75e+12+-3e+10", "1.75E+12 +- +3E10", "+1.75e12+-3e+10"])
def test_a_stated_scale_may_have_exponents_as_data_check_prints_them(text):
    (column,) = settings(f"time:{text}").private.table.features
    assert column.scale == (1.75e12, 3e10)


def test_pooled_scale_is_that_of_all_rows_in_one_table():
    rng = np.random.default_rng(0)
    tables = [rng.normal([5, 1.7e12, 0.7], [2, 6e4, 0], size=(n, 3)) for n in (10, 200, 31)]
    columns = Columns.parsed("a,b,c", "label")
    labels = [np.zeros(len(table), np.int64) for table in tables]
    parts = [
        moments_of(RawSamples(table[:, :, None, None], own), columns)
        for table, own in zip(tables, labels, strict=True)
    ]
    scale, rows = pooled(parts), np.concatenate(tables)
    assert scale.mean[2] == 0.7  # whose mean by shares is rounded
    assert scale.mean == pytest.approx(rows.mean(axis=0).tolist(), rel=1e-12)
    assert scale.deviation[:2] == pytest.approx(rows.std(axis=0).tolist()[:2], rel=1e-9)
    assert scale.deviation[2] == 1.0  # constant


def test_exact_sums_give_the_scale_of_all_rows_for_columns_of_any_size():
    """Epoch milliseconds, millionths, map metres, huge ones, and constants that a mean rounds."""
    rng = np.random.default_rng(0)
    middle, spread = [1.7e12, 3e-6, 5e6, 1e30, 0.7, 0.0], [6e4, 1e-9, 0.01, 1e25, 0, 0]
    tables = [rng.normal(middle, spread, size=(n, 6)) for n in (10, 200, 31)]
    columns = Columns.parsed("a,b,c,d,e,f", "label")
    sums = np.zeros(())
    for table in tables:
        raw = RawSamples(table[:, :, None, None], np.zeros(len(table), np.int64))
        record = record_of_sums(moments_of(raw, columns), columns.inputs)
        sums = sums + as_arrays(record)[SUMS]
    scale, rows = scale_in(sums), np.concatenate(tables)
    centred = rows - rows.mean(axis=0)
    assert scale.mean == pytest.approx(rows.mean(axis=0).tolist(), rel=1e-15)
    assert scale.deviation[:4] == pytest.approx(centred.std(axis=0).tolist()[:4], rel=1e-7)
    assert (scale.mean[4:], scale.deviation[4:]) == ((0.7, 0.0), (1.0, 1.0))


@pytest.mark.parametrize(
    ("mean", "variance"), [(1e60, 1.0), (0.0, 1e120), (1.0, 1e-130), (1e-70, 1e-140)]
)
def test_a_column_that_does_not_fit_into_secure_sums_is_an_error_that_names_it(mean, variance):
    with pytest.raises(SettingsError, match=r"'weight'.*private\.columns=weight:MEAN"):
        record_of_sums(Moments(30, (5.0, mean), (1.0, variance)), ["age", "weight"])


def test_sums_that_no_rows_have_are_an_error():
    for rows, total, squares in ((0, 0, 0), (-3, 5, 9), (10, 100, 50)):
        with pytest.raises(ValueError, match=r"rows|squares"):
            scale_of_sums(Fraction(rows), [(Fraction(total), Fraction(squares))])


def test_values_that_a_scale_dwarfs_are_in_another_unit():
    own = Moments(30, (60.0, 1.75e12, 0.0, 4.0), (144.0, 1e12, 0.0, 0.25))
    scale = Scale((1.5e6, 1.7e12, 50.0, 9.0), (2.6e6, 1e11, 90.0, 5.0))
    assert dwarfed(own, scale) == (0,)


def test_nodes_below_different_edges_need_one_scale_that_the_run_states():
    with pytest.raises(SettingsError, match="age", check=at("private.columns")):
        check_columns(settings(), edge=True)
    check_columns(settings("age:60+-12,sex:f|m"), edge=True)


def test_columns_are_found_again_from_the_inputs_of_an_exported_model():
    columns = Columns.parsed("age,sex:f|m,chol:200+-50", "ill")
    again = Columns.of_inputs(columns.inputs)
    assert again.inputs == columns.inputs
    assert again.names == ("age", "sex", "chol")


def test_a_nodes_guard_counts_the_rows_of_any_table(tmp_path):
    """For bounds on what runs say of its samples. Which column is the label, a run says."""
    path = write(tmp_path / "table.csv")
    assert survey(path, decode=False).usable == 2
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"ill": ["no"] * 3}), tmp_path / "table.parquet")
    assert survey(tmp_path / "table.parquet", decode=False).usable == 3
