"""Surveys the columns of a node's own table that a run reads, and what a run refuses of them."""

from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flwr_distill.task.columns import Column, Columns
from flwr_distill.task.datasets.own_tables import (
    REMEDY,
    UNIT_REMEDY,
    inputs_of,
    read_records,
    unit_problem,
)
from flwr_distill.task.image_files import Finding, printable
from flwr_distill.task.survey import Survey, Watch

MAX_EXAMPLES = 3
"""Maximum wrong values of a column in a survey."""


@dataclass
class ColumnSurvey:
    """The values of a column, by the run's statement of it; the label's categories are classes.

    Parameters
    ----------
    missing, wrong : int
        Rows without a value, and with one that is no number, too large, or another category.
    examples : list of str
        The first wrong values, distinct. For the data's owner alone: they may name persons.
    categories : Counter[str]
        Rows of each category, perhaps 0; empty for numbers.
    numbers : array
        All numbers, as in the table; empty for categories.
    """

    column: Column
    missing: int = 0
    wrong: int = 0
    examples: list[str] = field(default_factory=list)
    categories: Counter[str] = field(default_factory=Counter)
    numbers: "array[float]" = field(default_factory=lambda: array("d"))

    def __post_init__(self) -> None:
        self.categories.update(dict.fromkeys(self.column.categories, 0))

    def add(self, text: str) -> list[float]:
        """Count a value; returns the model's inputs, or raises ValueError as `inputs_of`."""
        try:
            inputs = inputs_of(self.column, text)
        except ValueError:
            self._add_wrong(text)
            raise
        if self.categories:
            self.categories[text] += 1
        else:
            self.numbers.extend(inputs)
        return inputs

    def _add_wrong(self, text: str) -> None:
        if not text:
            self.missing += 1
            return
        self.wrong += 1
        shown = printable(text)
        if len(self.examples) < MAX_EXAMPLES and shown not in self.examples:
            self.examples.append(shown)

    @property
    def usable(self) -> int:
        """Rows with a number or category."""
        return self.categories.total() + len(self.numbers)

    def finding(self) -> Finding | None:
        """Why a run refuses the column, or that it is constant; None if neither."""
        place = f"column {self.column.name}"
        numbers = np.array(self.numbers)
        scale = self.column.scale
        if scale and len(numbers) and (problem := unit_problem(numbers, *scale)):
            return Finding("unit", place, f"{problem} ({UNIT_REMEDY})")
        values = [name for name, count in self.categories.items() if count]
        if len(numbers) and numbers.min() == numbers.max():
            values = [f"{numbers[0]:g}"]
        if self.usable < 2 or len(values) != 1:
            return None
        reason = f"is {values[0]} in all rows; it says something only if other nodes' differ"
        return Finding("constant", place, reason)


@dataclass
class TableSurvey(Survey):
    """Findings in a table, also by the columns that a run reads, the label's last."""

    columns: list[ColumnSurvey] = field(default_factory=list)


def survey_table(
    path: Path,
    columns: Columns,
    classes: Sequence[str],
    watch: Watch | None = None,
    *,
    only: Collection[str] | None = None,
) -> TableSurvey:
    """Survey a node's ``.csv`` or ``.parquet`` table by the columns and classes of a run.

    Rows of other classes than those in `only`, if it is given, are left out.

    Raises
    ------
    DatasetError
        If the table cannot be read at all, or does not have each of the columns once.
    """
    result = TableSurvey(path, counts=dict.fromkeys(classes, 0))
    features = [ColumnSurvey(column) for column in columns.features]
    label = ColumnSurvey(Column(columns.label, tuple(classes)))
    result.columns = [*features, label]
    for record in read_records(path, columns):
        if only is not None and record.values and record.values[-1] not in only:
            continue
        problems = [record.problem] if record.problem else []
        inputs = array("d")
        for column, text in zip(result.columns, record.values, strict=False):
            try:
                inputs.extend(column.add(text))
            except ValueError as error:
                problems.append(str(error))
        if problems:
            reason = f"{', '.join(problems)}; {REMEDY}"
            result.findings.append(Finding("unreadable", record.place, reason))
        else:
            without_label = inputs[: len(columns.inputs)]
            result.add(record.place, record.values[-1], without_label.tobytes())
        if watch:
            watch(0, "", None)
    of_columns = (column.finding() for column in features)
    result.findings += [finding for finding in of_columns if finding]
    return result
