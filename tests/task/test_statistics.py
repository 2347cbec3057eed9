"""Counts of a node's data by class, and by what its images or columns are like."""

import numpy as np
import pytest
from PIL import Image

from flwr_distill.task.columns import Columns
from flwr_distill.task.datasets import DatasetError, load_dataset
from flwr_distill.task.statistics import count_images, count_samples, count_table


def picture(folder, name, colour, size=(8, 8), mode="RGB"):
    folder.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(folder / f"{name}.png")


def test_images_are_counted_by_class_size_mode_and_colour(tmp_path):
    for place in range(3):
        picture(tmp_path / "cat", place, (255, 0, place))
    picture(tmp_path / "dog", "grey", 128, (4, 2), "L")
    (tmp_path / "dog" / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    tables = count_images(tmp_path, 3)
    assert tables["class"] == {"cat": 3, "dog": 1, "(unusable)": 1}
    assert tables["size"] == {"8x8": 3, "2x4": 1, "(unusable)": 1}
    assert tables["mode"] == {"RGB": 3, "L": 1, "(unusable)": 1}
    assert tables["red"] == {"0.9 to 1": 3, "0.5 to 0.6": 1, "(unusable)": 1}
    assert tables["blue"] == {"0 to 0.1": 3, "0.5 to 0.6": 1, "(unusable)": 1}
    assert tables["brightness"] == {"0.3 to 0.4": 3, "0.5 to 0.6": 1, "(unusable)": 1}
    only = count_images(tmp_path, 1, {"cat"})
    assert {sum(cells.values()) for cells in only.values()} == {3}
    assert "red" not in only


def test_many_sizes_are_counted_together(tmp_path):
    for place in range(20):
        picture(tmp_path / "cat", place, place, (100 + place, 70), "L")
    assert count_images(tmp_path, 1)["size"] == {"(64 to 127)x(64 to 127)": 20, "(unusable)": 0}


COLUMNS = Columns.parsed("age:50+-10,chol,sex:f|m,bmi", "ill")


def test_rows_are_counted_by_the_values_of_each_column(tmp_path):
    file = tmp_path / "ward.csv"
    rows = ["50,150,f,no", "61,,m,yes", ",150,f,no", "50,1e9,x,perhaps", "50,150"]
    file.write_text("\n".join(["age,chol,sex,ill", *rows]))
    tables = count_table(file, COLUMNS, ("no", "yes"))
    shown = {name: {c: n for c, n in cells.items() if n} for name, cells in tables.items()}
    assert shown == {
        "column age": {
            **{"50 to 60": 2, "60 to 70": 1},
            **{"(missing)": 1, "(unusable)": 1},
        },
        "column chol": {"100 to 200": 2, "900000 or more": 1, "(missing)": 1, "(unusable)": 1},
        "column sex": {"f": 2, "m": 1, "(wrong)": 1, "(unusable)": 1},
        "column bmi": {"(no such column)": 5},
        "class": {"no": 2, "yes": 1, "(wrong)": 1, "(unusable)": 1},
    }


def test_a_table_without_the_label_is_an_error_that_says_what_is_there(tmp_path):
    file = tmp_path / "ward.csv"
    file.write_text("age,chol\n50,150\n")
    with pytest.raises(DatasetError, match="missing sex, bmi and ill"):
        count_table(file, COLUMNS, ("no", "yes"))


def test_a_named_set_is_counted_as_a_nodes_own():
    digits = load_dataset("digits")
    tables = count_samples(digits.train, digits.spec)
    assert {sum(cells.values()) for cells in tables.values()} == {len(digits.train)}
    assert list(tables["class"]) == [*digits.spec.class_names, "(unusable)"]
    assert tables["size"]["8x8"] == tables["mode"]["L"] == len(digits.train)


def test_a_table_has_no_images(tmp_path):
    (tmp_path / "ward.csv").write_text("age,label\n1,2\n")
    with pytest.raises(DatasetError, match="is a table"):
        count_images(tmp_path / "ward.csv", 1)


@pytest.mark.parametrize("kind", ["text", "table"])
def test_texts_have_classes_alone_and_tables_their_columns(kind):
    from flwr_distill.task.datasets import DataSpec, RawSamples
    from flwr_distill.task.labels import LabelMap

    labels = LabelMap(("no", "yes"), ("age",) if kind == "table" else ())
    spec = DataSpec("own", (1, 1, 1), 2, (5.0,), (2.0,), kind, labels=labels)
    raw = RawSamples(np.full((4, 1, 1, 1), 5.5), np.array([0, 1, 1, 1]))
    expected = {"class": {"no": 1, "yes": 3, "(unusable)": 0}}
    if kind == "table":
        expected["column age"] = {"5 to 6": 4, "(unusable)": 0}
    assert count_samples(raw, spec) == expected
