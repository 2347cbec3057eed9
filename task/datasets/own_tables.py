"""A node's own table: the columns that a run reads, by name, from a CSV or Parquet file."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_distill.base.text import listed
from flwr_distill.task.columns import FAR, MAX_VALUE, Column, Columns, Moments
from flwr_distill.task.datasets.tables import open_csv, parsed_number
from flwr_distill.task.datasets.types import PRIVATE, DatasetError, DataSpec, RawSamples
from flwr_distill.task.labels import names_problem
from flwr_distill.task.readers.arrow import opened
from flwr_distill.task.text_files import composed

REMEDY = "correct it or drop the row"
UNIT_REMEDY = "check its unit, which must be that of other nodes"


@dataclass(frozen=True)
class Record:
    """A row of a table: where it is, and its values as text or what is wrong with it."""

    place: str
    values: Sequence[str]
    problem: str = ""


def load_own_table(
    path: str | Path, spec: DataSpec, columns: Columns, *, is_scaled: bool
) -> RawSamples:
    """Load the columns of a node's table that a run reads; the others are ignored.

    Parameters
    ----------
    path : str or Path
        A ``.csv`` or ``.parquet`` file, with a header that has each of `columns` once.
    spec : DataSpec
        Of the run's data; labels must be among its classes.
    columns : Columns
        The run's.
    is_scaled : bool
        Whether `spec` has the run's means and deviations, so that values are compared with them.

    Raises
    ------
    DatasetError
        If a column or value is missing, or a value does not fit the run's columns. Names file and
        line, but shows no value, because the server reads it.
    """
    inputs, labels = _read(Path(path), columns, spec)
    if is_scaled:
        _check_scaled(Path(path), inputs, spec)
    return RawSamples(inputs, np.array(labels, dtype=np.int64))


def header_of(path: Path) -> tuple[str, ...]:
    """Names of a table's columns as the file has them; DatasetError if it is unreadable."""
    with _header(path) as (header, _):
        return tuple(header)


def load_inputs(path: Path, spec: DataSpec) -> NDArray[np.float64]:
    """Inputs of a model for each row of a table, (n, C, 1, 1), not yet standardised.

    For errors see :func:`load_own_table`.
    """
    names = spec.labels.columns
    if spec.name == PRIVATE:
        columns = Columns.of_inputs(names)
    else:  # a data set without categories
        columns = Columns(tuple(map(Column, names)))
    return _read(path, columns, spec)[0]


def moments_of(raw: RawSamples, columns: Columns) -> Moments:
    """What a node says of the columns that a run states no scale of."""
    values: NDArray[np.float64] = raw.images[:, list(columns.open_inputs), 0, 0].astype(np.float64)
    mean, variance = values.mean(axis=0), values.var(axis=0)
    is_constant = values.min(axis=0) == values.max(axis=0)  # whose mean is rounded
    mean, variance = np.where(is_constant, values[0], mean), np.where(is_constant, 0.0, variance)
    return Moments(len(raw), tuple(mean.tolist()), tuple(variance.tolist()))


def _read(path: Path, columns: Columns, spec: DataSpec) -> tuple[NDArray[np.float64], list[int]]:
    """Inputs (n, C, 1, 1), and labels if the columns have one."""
    values: list[list[float]] = []
    labels: list[int] = []
    label = Column(columns.label, spec.labels.classes)
    for record in read_records(path, columns):
        cells = zip(columns.features, record.values, strict=False)  # the label's is the last
        try:
            if record.problem:
                raise ValueError(record.problem)
            values.append([value for column, text in cells for value in inputs_of(column, text)])
            if columns.label:
                labels.append(inputs_of(label, record.values[-1]).index(1.0))
        except ValueError as error:
            raise DatasetError(str(error), where=f"{path}, {record.place}", remedy=REMEDY) from None
    return np.array(values)[:, :, None, None], labels


def inputs_of(column: Column, text: str) -> list[float]:
    """The model's inputs of a column's value, not yet standardised.

    Raises ValueError, which does not show the value, if it is neither a number nor a category.
    """
    if not text:
        raise ValueError(f"{column.name} is missing")
    if column.categories:
        if text not in column.categories:
            raise ValueError(f"{column.name} is not among {listed(column.categories)}")
        return [float(text == category) for category in column.categories]
    value = parsed_number(column.name, text)
    if not abs(value) <= MAX_VALUE:
        raise ValueError(f"{column.name} is not finite, or beyond {MAX_VALUE:g}")
    return [value]


def _check_scaled(path: Path, inputs: NDArray[np.float64], spec: DataSpec) -> None:
    """Raise DatasetError where a column does not fit the run's mean and deviation."""
    columns = zip(spec.labels.columns, inputs[:, :, 0, 0].T, spec.mean, spec.std, strict=True)
    for name, values, mean, deviation in columns:
        if problem := unit_problem(values, mean, deviation):
            raise DatasetError(problem, where=f"{path}, column {name!r}", remedy=UNIT_REMEDY)


def unit_problem(values: NDArray[np.float64], mean: float, deviation: float) -> str:
    """Describe why values are in another unit, or do not fit a model's float32; or nothing."""
    with np.errstate(over="ignore"):
        scaled = np.abs(values - mean) / deviation
        usual, largest = scaled.mean(), scaled.max()
    if usual <= FAR and largest <= np.finfo(np.float32).max:
        return ""
    return f"is {usual:.3g} deviations from the run's mean, on average over its rows"


def read_records(path: Path, columns: Columns) -> Iterator[Record]:
    """Read a table row by row, with the values of the columns alone, in their order.

    Raises DatasetError if it cannot be read, or has no rows, or not each of the columns once.
    """
    record = None
    with _opened(path, columns) as records:
        for record in records:
            yield record
    if record is None:
        raise DatasetError("has a header but no rows; need at least one", where=path)


@contextmanager
def _opened(path: Path, columns: Columns) -> Iterator[Iterator[Record]]:
    with _header(path) as (header, table):
        places = _places(path, header, columns)
        if path.suffix == ".csv":
            yield _csv_rows(places, len(header), table)
        else:
            names = table.schema_arrow.names
            yield _parquet_rows(table, [names[place] for place in places])


@contextmanager
def _header(path: Path) -> Iterator[tuple[list[str], Any]]:
    """Names of a table's columns, and its rows as the reader of its format has them."""
    if path.suffix == ".csv" and path.is_file():
        with open_csv(path) as (header, rows):
            yield header, rows
    elif path.suffix == ".parquet" and path.is_file():
        with opened(path) as table:
            yield [composed(name.strip()) for name in table.schema_arrow.names], table
    else:
        raise DatasetError(
            "is no existing .csv or .parquet file, and a run with private.columns reads tables",
            where=path,
            remedy="start the node with --data TABLE.csv",
        )


def _places(path: Path, header: Sequence[str], columns: Columns) -> list[int]:
    """Places of the columns in a header."""
    if missing := [name for name in columns.names if name not in header]:
        raise DatasetError(
            f"columns differ, missing {listed(missing)}: here {listed(header)}, in the run "
            f"{listed(columns.names)}",
            where=path,
            remedy="rename them, or have the run state others: private.columns",
        )
    if problem := names_problem([name for name in header if name in columns.names]):
        raise DatasetError(problem, where=f"{path}, columns")
    return [header.index(name) for name in columns.names]


def _csv_rows(
    places: Sequence[int], width: int, rows: Iterator[tuple[int, list[str]]]
) -> Iterator[Record]:
    for line, row in rows:
        if len(row) == width:
            yield Record(f"line {line}", [composed(row[place].strip()) for place in places])
        else:
            yield Record(f"line {line}", (), f"has {len(row)} values, the header {width}")


def _parquet_rows(table: Any, names: Sequence[str]) -> Iterator[Record]:
    row = 0
    for batch in table.iter_batches(columns=list(names)):
        columns = [batch.column(name).to_pylist() for name in names]
        for values in zip(*columns, strict=True):
            row += 1
            yield Record(f"row {row}", [composed(_text(value).strip()) for value in values])


def _text(value: object) -> str:
    """A value of a Parquet file as CSV would have it; 1.0 as 1, since gaps make integers floats."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
