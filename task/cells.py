"""Tables of counts that describe a node's data: their cells, and how small ones are hidden.

Each table has all samples, each in one cell. Which cells there can be follows from a run's settings
alone, but for sizes of images and names of a node's own classes. Nothing here imports torch.
"""

import math
from collections.abc import Mapping
from itertools import pairwise

from flwr_distill.task.settings import PrivateSettings

Tables = dict[str, dict[str, int]]
"""Samples by the name of a table, and of a cell."""

CLASS, SIZE, MODE, BRIGHTNESS = "class", "size", "mode", "brightness"
COLOURS = ("red", "green", "blue")
UNUSABLE = "(unusable)"
"""Cell of files and rows that a run cannot read."""
MISSING, WRONG, ABSENT = "(missing)", "(wrong)", "(no such column)"
"""Cells of a column: rows without a value, with one that a run refuses, and all if it is absent."""
OWN = (UNUSABLE, MISSING, WRONG, ABSENT)

OTHER = "other"
MODES = ("1", "L", "LA", "I;16", "I", "F", "P", "RGB", "RGBA", "CMYK", "YCbCr", "uint16", "float32")
"""Modes of stored images that have a cell of their own."""
BRIGHTNESS_CELLS = tuple(f"{step / 10:g} to {(step + 1) / 10:g}" for step in range(10))
"""Of an image's mean pixel, black is 0 and white is 1."""
_SIZES = tuple(float(f"{digit}e{power}") for power in range(-3, 6) for digit in range(1, 10))
EDGES = (*(-size for size in reversed(_SIZES)), 0.0, *_SIZES)
"""Where ranges of a column's numbers end, the same for all columns and runs.

Extremes of the data would be single rows, and edges that a run chooses could be moved until one
row is on the other side.
"""
_RANGES = tuple(f"{low:g} to {high:g}" for low, high in pairwise(EDGES))
NUMBERS = (f"below {EDGES[0]:g}", *_RANGES, f"{EDGES[-1]:g} or more")
"""Cells of a column's numbers, in their order."""


def column_table(name: str) -> str:
    """Name of the table of a column."""
    return f"column {name}"


def cells_of(private: PrivateSettings) -> dict[str, tuple[str, ...]]:
    """The tables of nodes' own data, with all cells that follow from a run's settings alone."""
    classes, columns = private.class_names, private.table
    if columns:
        tables = {column_table(c.name): c.categories or NUMBERS for c in columns.features}
        return {name: (*own, *OWN) for name, own in {**tables, CLASS: classes}.items()}
    is_colour = private.shape.startswith("3x")
    names = (BRIGHTNESS, *COLOURS) if is_colour else (BRIGHTNESS,)
    tables = {MODE: (*MODES, OTHER), **dict.fromkeys(names, BRIGHTNESS_CELLS)}
    if classes:
        tables[CLASS] = classes
    return {name: (*own, UNUSABLE) for name, own in tables.items()}


def multiples(tables: Mapping[str, Mapping[str, int]], floor: int) -> Tables:
    """Round each cell down to a multiple of a floor; cells of fewer are left out."""
    return {
        name: {cell: count - count % floor for cell, count in cells.items() if count >= floor}
        for name, cells in tables.items()
    }


def rounded(tables: Mapping[str, Mapping[str, int]], floor: int) -> Tables:
    """Round the cells of tables of the same samples down to multiples of a floor.

    A cell of fewer is left out, as an empty one is. Nor do the other cells tell that it has a
    sample: their sums in this and the other tables are bounds of all samples, and where one sum
    needs a sample in each cell that is left out, its largest cells show a multiple less.
    """
    shown = multiples(tables, floor)
    # Each cell but one may have floor - 1 more than it shows: so many samples need not be in that.
    hidden = {
        name: max(0, sum(map(bool, cells.values())) - 1) * (floor - 1)
        for name, cells in tables.items()
    }
    totals = {name: sum(cells.values()) for name, cells in shown.items()}
    while max(totals.values(), default=0) > (
        most := min((totals[name] + hidden[name] for name in totals), default=0)
    ):
        for name in (name for name, total in totals.items() if total > most):
            _lower(shown[name], math.ceil((totals[name] - most) / floor) * floor)
            totals[name] = sum(shown[name].values())
    return {name: {c: n for c, n in cells.items() if n} for name, cells in shown.items()}


def _lower(cells: dict[str, int], excess: int) -> None:
    """Take so much from the largest cells."""
    for cell in sorted(cells, key=cells.__getitem__, reverse=True):
        taken = min(cells[cell], excess)
        cells[cell] -= taken
        excess -= taken
