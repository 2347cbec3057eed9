"""What a run would fail on by nodes' counts: each with the nodes' names and a remedy."""

import pytest

from flwr_distill.server.data_warnings import MAX_LINES, data_warnings

PLAIN = {
    "class": {"cat": 20, "dog": 20},
    "size": {"8x8": 40},
    "mode": {"RGB": 40},
    "brightness": {"0.4 to 0.5": 40},
    "red": {"0.5 to 0.6": 40},
    "blue": {"0.2 to 0.3": 40},
}
TABLE = {"class": {"cat": 20, "dog": 20}, "column age": {"50 to 60": 40}}


@pytest.mark.parametrize(
    ("usual", "odd", "words"),
    [
        (PLAIN, {"class": {"cat": 20, "wolf": 20}}, "wolf"),
        (PLAIN, {"mode": {"L": 40}}, "grey"),
        (PLAIN, {"size": {"9x9": 40}}, "9x9"),
        (PLAIN, {"brightness": {"0 to 0.1": 40}}, "darker"),
        (PLAIN, {"brightness": {"0.9 to 1": 40}}, "brighter"),
        (PLAIN, {"red": {"0.2 to 0.3": 40}, "blue": {"0.5 to 0.6": 40}}, "red and blue"),
        (PLAIN, {"class": {"cat": 20, "dog": 20, "(unusable)": 10}}, "cannot be read"),
        (TABLE, {"column age": {"0.05 to 0.06": 40}}, "unit"),
        (TABLE, {"column age": {"(missing)": 40}}, "age is empty"),
        (TABLE, {"column age": {"(no such column)": 40}}, "age is not there"),
        (TABLE, {"column age": {"50 to 60": 20, "(missing)": 20}}, "without a value"),
        (TABLE, {"column age": {"50 to 60": 20, "(wrong)": 20}}, "refuses"),
    ],
)
def test_the_node_that_differs_is_named_with_a_remedy(usual, odd, words):
    nodes = {"ward-1": usual, "ward-2": usual, "ward-3": {**usual, **odd}}
    (line,) = data_warnings(nodes, ["cat", "dog"])
    assert line.startswith("ward-3: ")
    assert words in line
    assert line.endswith(")")


def test_nodes_alike_have_no_warning_and_classes_of_nobody_have_one():
    assert data_warnings({"a": PLAIN, "b": PLAIN}, ["cat", "dog"]) == []
    assert data_warnings({"a": PLAIN, "b": PLAIN}, []) == []
    (line,) = data_warnings({"a": PLAIN}, ["cat", "dog", "owl"])
    assert "owl" in line
    assert data_warnings({}, ["cat"]) == []


def test_one_node_with_endless_columns_does_not_fill_the_page():
    flood = {f"column {place}": {"(missing)": 10} for place in range(5000)}
    assert len(data_warnings({"a": flood}, [])) == MAX_LINES
