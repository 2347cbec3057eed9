"""What a look through a node's data finds, before a run does."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from flwr_distill.task.columns import Columns
from flwr_distill.task.datasets import DatasetError
from flwr_distill.task.survey import survey
from flwr_distill.task.table_survey import survey_table
from tests.errors import at


def save(path, seed=0, size=(8, 6), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


def kinds(found):
    return [(finding.kind, finding.place) for finding in found.findings]


@pytest.fixture
def pets(tmp_path):
    save(tmp_path / "cat" / "1.png", 1)
    save(tmp_path / "cat" / "2.png", 2, size=(20, 10))
    save(tmp_path / "cat" / "3.png", 1)
    save(tmp_path / "dog" / "1.png", 2, size=(20, 10))
    save(tmp_path / "dog" / "2.png", 3, mode="L")
    (tmp_path / "dog" / "3.jpg").write_bytes((tmp_path / "dog" / "2.png").read_bytes()[:80])
    (tmp_path / "dog" / "list.csv").write_text("no image")
    (tmp_path / "fish").mkdir()
    save(tmp_path / "beside.png")
    return tmp_path


def test_images_are_counted_and_all_that_is_wrong_is_found(pets):
    found = survey(pets)
    assert found.counts == {"cat": 3, "dog": 2, "fish": 0}
    assert found.sizes == {(6, 8): 3, (10, 20): 2}
    assert found.size_range() == "6x8 to 10x20, mostly 6x8"
    assert found.modes == {"RGB": 4, "L": 1}
    assert kinds(found) == [
        ("stray", "beside.png"),
        ("duplicate", "cat/3.png"),
        ("conflict", "dog/1.png"),
        ("unreadable", "dog/3.jpg"),
        ("stray", "dog/list.csv"),
    ]
    assert "cat/2.png, in another class" in found.of_kind("conflict")[0].reason


def test_a_copy_in_another_format_is_a_duplicate_and_no_bit_is_ignored(tmp_path):
    save(tmp_path / "0" / "a.png")
    save(tmp_path / "0" / "b.bmp")
    for number in range(2):
        Image.new("I;16", (8, 6), 1000 + number).save(tmp_path / "0" / f"deep{number}.png")
    assert kinds(survey(tmp_path)) == [("duplicate", "0/b.bmp")]


def test_each_file_is_watched_with_the_number_of_all(pets):
    seen = []
    survey(pets, lambda total, label, image: seen.append((total, label, image is not None)))
    cats, dogs = [(7, "cat", True)] * 3, [(7, "dog", True)] * 2
    assert seen == [*cats, *dogs, (7, "dog", False), (7, "dog", False)]


def test_an_npz_is_surveyed_like_a_folder(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (4, 6, 8, 3), dtype=np.uint8)
    images[2] = images[3] = images[0]
    np.savez(tmp_path / "own.npz", images=images, labels=np.array([2, 0, 2, 10]))
    found = survey(tmp_path / "own.npz")
    assert found.counts == {"0": 1, "2": 2, "10": 1}
    assert (found.sizes, found.modes) == ({(6, 8): 4}, {"RGB": 4})
    assert kinds(found) == [("duplicate", "image 2"), ("conflict", "image 3")]


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (np.zeros((2, 6, 8, 2), np.uint8), "2 channels, need 1 or 3"),
        (np.zeros((3, 6, 8), np.uint8), "each of the 3"),
    ],
)
def test_an_npz_that_a_run_refuses_is_an_error(tmp_path, images, said):
    np.savez(tmp_path / "own.npz", images=images, labels=[0, 1])
    with pytest.raises(DatasetError, match=said, check=at(tmp_path / "own.npz")):
        survey(tmp_path / "own.npz")


def test_rows_of_a_table_are_checked_each(tmp_path):
    lines = ["bytes,label", "1,web", "nan,web", "2,mail,3", "2,mail", "x,mail", "1,web", "2,web"]
    (tmp_path / "own.csv").write_text("\n".join(lines))
    found = survey(tmp_path / "own.csv")
    assert found.counts == {"mail": 1, "web": 3}
    assert kinds(found) == [
        ("unreadable", "line 3"),
        ("unreadable", "line 4"),
        ("unreadable", "line 6"),
        ("duplicate", "line 7"),
        ("conflict", "line 8"),
    ]


def test_columns_of_a_table_that_say_nothing_or_too_much_are_found(tmp_path):
    lines = ["site,dose,unit,label", "7,1e200,0.1,a", "7,2,0.1,b", "7,3,0.1000000001,a"]
    (tmp_path / "own.csv").write_text("\n".join(lines))
    assert kinds(survey(tmp_path / "own.csv")) == [
        ("constant", "column site"),
        ("overflow", "column dose"),
    ]


def test_treatments_and_the_range_of_pixels_are_counted(tmp_path):
    (tmp_path / "0").mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 6), (51, 102, 0)).save(tmp_path / "0" / "a.jpg", exif=exif)
    Image.new("I;16", (8, 6), 13107).save(tmp_path / "0" / "b.png")
    found = survey(tmp_path)
    assert found.treatments == {"turned": 1, "scaled": 1}
    assert found.sizes == {(8, 6): 1, (6, 8): 1}
    assert found.pixel_range == pytest.approx((0.0, 0.4), abs=0.02)
    np.savez(tmp_path / "own.npz", images=np.full((2, 6, 8), 13107, np.uint16), labels=[0, 1])
    found = survey(tmp_path / "own.npz")
    assert (found.modes, found.treatments) == ({"uint16": 2}, {"scaled": 2})
    assert found.pixel_range == pytest.approx((0.2, 0.2))


def test_names_that_would_write_to_the_terminal_are_escaped_and_many_make_no_long_line(tmp_path):
    save(tmp_path / "a\x1b[2Jb" / "a.png")
    (tmp_path / "a\x1b[2Jb" / "c\n.txt").touch()
    found = survey(tmp_path)
    assert all(text.isprintable() for text in (found.in_a_line(), *found.counts))
    for label in range(29):
        (tmp_path / f"c{label}").mkdir()
    assert " and 20 more)" in survey(tmp_path, decode=False).in_a_line()


def test_a_line_for_the_log_needs_headers_alone_and_neither_torch_nor_numpy(pets):
    code = (
        "import sys; from pathlib import Path\n"
        "from flwr_distill.task.survey import survey\n"
        "print(survey(Path(sys.argv[1]), decode=False).in_a_line())\n"
        "print({'torch', 'numpy'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", code, str(pets)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line, imported = done.stdout.splitlines()
    assert line.startswith("6 samples of 3 classes (cat: 3, dog: 3, fish: 0), 6x8 to 10x20")
    assert "L/RGB; skipped 2 unusable files, first beside.png: lies beside" in line
    assert imported == "set()"


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
