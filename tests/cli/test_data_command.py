"""`flwr-distill data check`: tables, files and exit codes."""

import csv

import numpy as np
import pytest
from PIL import Image

from .commands import assert_refused, command


@pytest.fixture
def check(tmp_path):
    def run(path, *arguments):
        output = tmp_path / "results"
        return command("data", "check", path, "--output", output, *arguments), output

    return run


@pytest.fixture
def pets(tmp_path):
    for number, (label, colour) in enumerate([("cat", "red"), ("cat", "red"), ("dog", "blue")]):
        (tmp_path / "pets" / label).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10), colour).save(tmp_path / "pets" / label / f"{number}.png")
    return tmp_path / "pets"


def test_counts_findings_and_a_picture_are_shown_and_written(check, pets):
    (pets / "dog" / "[red]broken.png").write_bytes(b"no image")
    result, output = check(pets)
    assert result.exit_code == 0, result.output
    assert "Height x width 10x20; modes: RGB 3\n" in result.output
    assert "dog/[red]broken.png: not a readable image" in result.output
    with (output / "findings.csv").open() as file:
        rows = list(csv.reader(file))
    assert [row[:2] for row in rows[1:]] == [
        ["duplicate", "cat/1.png"],
        ["unreadable", "dog/[red]broken.png"],
    ]
    pixels = np.asarray(Image.open(output / "classes.png")).reshape(-1, 3).tolist()
    assert [255, 0, 0] in pixels
    assert [0, 0, 255] in pixels


def test_strict_refuses_what_is_else_skipped(check, pets):
    result, _ = check(pets, "--strict")
    assert_refused(result, "--strict: 1 finding; fix them")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("a,label\n1,x\nnan,x\n", "refuses a table with 1 unusable row;"),
        ("a,label\nnan,x\n", "it has no usable sample"),
        ("a,b\n1,2\n", "'label'"),
    ],
)
def test_what_a_run_would_refuse_ends_with_one_line_and_1(check, tmp_path, content, reason):
    (tmp_path / "own.csv").write_text(content)
    result, _ = check(tmp_path / "own.csv")
    assert_refused(result, f"flwr-distill data check: {tmp_path / 'own.csv'}: ", reason)


def test_a_table_that_cannot_be_standardised_is_refused_and_constants_are_shown(check, tmp_path):
    (tmp_path / "own.csv").write_text("site,dose,label\n7,1,a\n7,2,b\n")
    result, output = check(tmp_path / "own.csv")
    assert result.exit_code == 0, result.output
    assert "column site" in result.output
    assert "column site" in (output / "findings.csv").read_text()
    (tmp_path / "own.csv").write_text("dose,label\n1,a\n1e200,b\n")
    result, _ = check(tmp_path / "own.csv")
    assert_refused(result, "dose")


def test_a_path_without_data_is_named(check, tmp_path):
    result, _ = check(tmp_path / "none")
    assert_refused(result, tmp_path / "none")


STATED = 'private.columns="age,sex:f|m,chol:200+-50" private.label="ill" private.classes="no,yes"'


def test_a_table_is_read_by_the_columns_that_a_run_states(check, tmp_path):
    lines = ["name,age,sex,chol,ill", "Ann,61,f,240,no", "Bob,47,m,210,yes"]
    (tmp_path / "own.csv").write_text("\n".join(lines))
    (tmp_path / "run.toml").write_text(
        'dataset = "private"\n[private]\nlabel = "ill"\nclasses = "no,yes"\n'
        'columns = "age,sex:f|m,chol:200+-50"\n'
    )
    for stated in (STATED, str(tmp_path / "run.toml")):
        result, _ = check(tmp_path / "own.csv", "-c", stated)
        assert result.exit_code == 0, result.output
        rows = [line.split("│")[1:-1] for line in result.output.splitlines() if "│" in line]
        cells = {name.strip(): text.strip() for name, *_, text in rows}
        assert cells["age"].startswith("47 to 61,")
        assert cells["sex"] == "f 1, m 1"
        assert cells["chol"].endswith("0.2 to 0.8")
        assert cells["ill"] == "no 1, yes 1"
        assert "name" not in cells


@pytest.mark.parametrize(
    ("row", "places"),
    [
        ("Cy,,male,210,no", ["line 3"]),
        ("Cy,50,m,1e200,no", ["line 3"]),
        ("Cy,50,f", ["line 3"]),
        ("Cy,50,m,90000,no", ["column chol"]),
    ],
)
def test_a_table_that_a_run_would_refuse_fails_the_check(check, tmp_path, row, places):
    (tmp_path / "own.csv").write_text(f"name,age,sex,chol,ill\nAnn,61,f,240,no\n{row}\n")
    result, output = check(tmp_path / "own.csv", "-c", STATED)
    assert_refused(result, tmp_path / "own.csv")
    with (output / "findings.csv").open() as file:
        assert [finding["place"] for finding in csv.DictReader(file)] == places


@pytest.mark.parametrize("name", ["own.csv", "own.parquet"])
def test_a_table_without_a_statement_is_refused_with_how_to_state_columns(check, tmp_path, name):
    (tmp_path / name).write_text("age,ill\n1,no\n")
    result, _ = check(tmp_path / name)
    assert_refused(result, tmp_path / name, "-c 'private.columns=")


@pytest.mark.parametrize(
    ("stated", "setting"),
    [
        ('private.label="ill"', "private.columns"),
        ('private.columns="age" private.column="b"', "private.column:"),
        ('private.columns="sex:f" private.classes="no,yes"', "private.columns"),
        ("private.columns=age", "private.columns"),
        ("missing.toml", "missing.toml"),
    ],
)
def test_a_wrong_statement_of_columns_is_refused_by_name(check, tmp_path, stated, setting):
    (tmp_path / "own.csv").write_text("age,label\n1,no\n")
    result, _ = check(tmp_path / "own.csv", "-c", stated)
    assert_refused(result, setting)
