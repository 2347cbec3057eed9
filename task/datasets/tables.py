"""Tables of numbers with a label column from CSV files, such as network traffic flows."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_distill.task.columns import MAX_VALUE
from flwr_distill.task.datasets.types import Dataset, DatasetError, DataSpec, RawSamples, not_found
from flwr_distill.task.image_files import printable
from flwr_distill.task.labels import LabelError, LabelMap, in_order, names_problem
from flwr_distill.task.text_files import composed, open_rows

LABEL = "label"


def load_tables(spec: DataSpec, root: Path, download: bool) -> Dataset:
    """Load ``train.csv`` and ``test.csv`` with equal columns, one of them ``label``.

    They are in ``<root>/<name>`` or ``<root>``. All other columns are features, one channel each,
    standardised by mean and deviation over the training rows, in float64. Columns are matched by
    name. Their order, and that of the classes, depends on the names alone
    (`task.labels.in_order`). Only the name of ``spec`` is used.
    """
    folder = next((f for f in (root / spec.name, root) if (f / "train.csv").exists()), None)
    if folder is None or not (folder / "test.csv").exists():
        raise not_found(spec.name, f"train.csv and test.csv in {root / spec.name} and {root}")
    train, test = folder / "train.csv", folder / "test.csv"
    columns, features, names = _read_csv(train)
    test_columns, test_features, test_names = _read_csv(test)
    if test_columns != columns:
        odd = sorted(set(columns) ^ set(test_columns))
        raise DatasetError(f"columns differ from train.csv's: {odd}", where=test)
    classes = in_order(names)
    try:
        labels = LabelMap(classes, columns)
    except LabelError as error:
        raise LabelError(str(error), where=train) from None
    if unknown := sorted(set(test_names) - set(classes)):
        raise DatasetError(f"labels {unknown[:5]} are not in train.csv", where=test)
    mean, deviation = _scale(train, columns, features)
    with np.errstate(over="ignore"):  # infinite ones are refused
        _check_scaled(test, columns, (test_features - mean) / deviation)
    table = DataSpec(
        name=spec.name,
        shape=(len(columns), 1, 1),
        num_classes=len(classes),
        mean=tuple(mean.tolist()),
        std=tuple(deviation.tolist()),
        kind="table",
        labels=labels,
    )
    return Dataset(
        table, _samples(features, names, classes), _samples(test_features, test_names, classes)
    )


def _samples(features: NDArray[np.float64], names: list[str], classes: Sequence[str]) -> RawSamples:
    label_of = {name: label for label, name in enumerate(classes)}
    labels = np.array([label_of[name] for name in names], dtype=np.int64)
    return RawSamples(features[:, :, None, None], labels)


def column_problem(lowest: float, highest: float) -> str:
    """Describe why a column of values in this range cannot be standardised, or nothing."""
    if max(abs(lowest), abs(highest)) <= MAX_VALUE or lowest > highest:  # no rows
        return ""
    return f"runs from {lowest:g} to {highest:g}, need at most {MAX_VALUE:g}; use another unit"


def _scale(
    path: Path, columns: Sequence[str], features: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and deviation of each column; of a constant column its value and 1."""
    lowest, highest = features.min(axis=0), features.max(axis=0)
    for name, low, high in zip(columns, lowest.tolist(), highest.tolist(), strict=True):
        if problem := column_problem(low, high):
            raise DatasetError(problem, where=f"{path}, column {name!r}")
    deviation = features.std(axis=0)
    varies = (lowest < highest) & (deviation > 0)
    return np.where(varies, features.mean(axis=0), lowest), np.where(varies, deviation, 1.0)


def _check_scaled(path: Path, columns: Sequence[str], scaled: NDArray[np.float64]) -> None:
    """Raise DatasetError where standardised values do not fit into a model's float32."""
    largest = np.finfo(np.float32).max
    for name, values in zip(columns, np.abs(scaled).T, strict=True):
        if values.max() > largest:
            raise DatasetError(
                f"row {1 + int(values.argmax())} is {values.max():g} deviations from train.csv's "
                "mean",
                where=f"{path}, column {name!r}",
                remedy="check its unit",
            )


@dataclass(frozen=True)
class Row:
    """A row of a table: its line in the file, its label, and its features or what is wrong."""

    line: int
    label: str
    values: list[float]
    problem: str = ""


def read_rows(path: Path) -> Iterator[Row]:
    """Read a table row by row, without blank ones.

    Raises
    ------
    DatasetError
        If it is not readable or has no column of labels.
    """
    with open_csv(path) as (header, rows):
        place = _label_column(path, header)
        for line, row in rows:
            label = composed(row[place].strip()) if place < len(row) else ""
            yield Row(line, label, *_features(row, header, place))


def feature_names(path: Path) -> list[str]:
    """Names of a table's columns but for the label, as the file has them.

    Raises
    ------
    DatasetError
        If it is not readable, has no label, or columns that cannot be matched by name.
    """
    with open_csv(path) as (header, _):
        place = _label_column(path, header)
    names = header[:place] + header[place + 1 :]
    if problem := names_problem(names):
        raise DatasetError(printable(problem), where=f"{path}, columns")
    return names


def _read_csv(path: Path) -> tuple[tuple[str, ...], NDArray[np.float64], list[str]]:
    """Names of the features in order, features (n, d) and labels."""
    names = feature_names(path)
    columns = in_order(names)
    rows = list(read_rows(path))
    if not rows:
        raise DatasetError("has a header but no rows; need at least one", where=path)
    if broken := [row for row in rows if row.problem]:
        others = f"for all {len(broken)} such rows: flwr-distill data check {path}"
        raise DatasetError(
            broken[0].problem,
            where=f"{path}, line {broken[0].line}",
            remedy=others if broken[1:] else "",
        )
    features = np.array([row.values for row in rows])
    by_name = features[:, [names.index(name) for name in columns]]
    return columns, by_name, [row.label for row in rows]


def _features(row: list[str], header: list[str], place: int) -> tuple[list[float], str]:
    """Numbers of a row, and what is wrong with it; the text has no value, which may be a name."""
    values: list[float] = []
    try:
        if len(row) != len(header):
            raise ValueError(f"it has {len(row)}")
        for name, text in zip(header, row, strict=True):
            if name != header[place]:
                values.append(parsed_number(name, text))
    except ValueError as error:
        return [], (
            f"need {len(header)} values, numbers except the label ({printable(str(error))}); "
            "drop columns such as addresses and times"
        )
    if not row[place].strip():
        return [], "has no label; write one, or drop the row"
    if all(map(math.isfinite, values)):
        return values, ""
    names = header[:place] + header[place + 1 :]
    name, value = next(
        pair for pair in zip(names, values, strict=True) if not math.isfinite(pair[1])
    )
    return [], f"{name} is {value}; drop the row"


def parsed_number(name: str, text: str) -> float:
    """Number in a cell of a column; ``1_000`` is none, though one to Python.

    The text of the ValueError is for logs, so it does not have the cell's.
    """
    try:
        if "_" not in text:
            return float(text)
    except ValueError:
        pass
    raise ValueError(f"{name} is no number")


def _label_column(path: Path, header: list[str]) -> int:
    lowered = [name.lower() for name in header]
    if lowered.count(LABEL) != 1 or len(header) < 2:
        raise DatasetError(
            f"need one column {LABEL!r} and features, with commas between them, got "
            f"{printable(str(header))}",
            where=path,
        )
    return lowered.index(LABEL)


@contextmanager
def open_csv(path: Path) -> Iterator[tuple[list[str], Iterator[tuple[int, list[str]]]]]:
    """Header of a CSV file, and its rows with their line numbers."""
    with open_rows(path, "CSV file", skipinitialspace=True) as rows:
        _, names = next(rows, (1, []))
        yield [composed(name.strip()) for name in names], rows
