"""Tables of counts: what they show, and what nobody can work out of them."""

from hypothesis import given
from hypothesis import strategies as st

from flwr_distill.task.cells import EDGES, NUMBERS, cells_of, rounded
from flwr_distill.task.settings import PrivateSettings


@st.composite
def tables_of_the_same_samples(draw):
    """Samples in one cell of each table, often with just too few of a cell."""
    number = draw(st.integers(1, 60))
    cells = st.lists(st.integers(0, draw(st.integers(0, 7))), min_size=number, max_size=number)
    tables = {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        own = draw(cells)
        tables[name] = {f"cell {cell}": own.count(cell) for cell in set(own)}
    return tables


def worlds(tables, shown, floor):
    """Whether each cell that is not shown may be empty, to one who adds up all that is shown.

    A shown cell has up to a floor more than it says, one that is not up to a floor less one.
    """
    low = max(sum(cells.values()) for cells in shown.values())
    for name, cells in tables.items():
        most = {cell: shown[name].get(cell, 0) + floor - 1 for cell in cells}
        for cell, count in cells.items():
            if 0 < count < floor:
                yield sum(n for other, n in most.items() if other != cell) >= low


@given(tables_of_the_same_samples(), st.integers(1, 12))
def test_no_cell_below_the_floor_is_shown_or_follows_from_the_others(tables, floor):
    shown = rounded(tables, floor)
    for name, cells in shown.items():
        for cell, count in cells.items():
            assert count >= floor
            assert count % floor == 0
            assert count <= tables[name][cell]
    assert all(worlds(tables, shown, floor))


def test_the_sum_of_another_table_does_not_tell_that_ten_small_cells_are_full():
    """Ten cells of nine each: beside a sum of 90 each would be known to the last sample."""
    small = {str(cell): 9 for cell in range(10)}
    assert rounded({"class": small, "size": {"8x8": 90}}, 10) == {"class": {}, "size": {"8x8": 80}}


def test_tables_without_samples_show_none():
    """A hostile app can send them, and the guard must not work on them forever."""
    assert rounded({"class": {"cat": 0}, "size": {}}, 10) == {"class": {}, "size": {}}
    assert rounded({}, 10) == {}


@given(tables_of_the_same_samples())
def test_with_a_floor_of_one_counts_are_exact(tables):
    assert rounded(tables, 1) == tables


def test_cells_are_the_runs_and_not_the_datas():
    columns = "age:54+-9,chol,sex:f|m"
    tables = cells_of(PrivateSettings(columns=columns, classes="no,yes"))
    assert list(tables) == ["column age", "column chol", "column sex", "class"]
    assert tables["column sex"][:2] == ("f", "m")
    assert all(len(set(cells)) == len(cells) for cells in tables.values())
    assert "class" not in cells_of(PrivateSettings())
    assert len(set(NUMBERS)) == len(EDGES) + 1
    stated = cells_of(PrivateSettings(columns="age:54.01+-0.001", classes="no,yes"))
    assert stated["column age"] == tables["column age"], "a run moves no edge"
