"""Tables of numbers with a label column from CSV files, such as network traffic flows."""

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from task.datasets.types import Dataset, DatasetError, DataSpec, RawSamples

LABEL = "label"


def load_tables(spec: DataSpec, root: Path, download: bool) -> Dataset:
    """Load ``train.csv`` and ``test.csv`` with equal columns, one of them ``label``.

    Looks in ``<root>/<name>``, then in ``<root>``. All other columns are features, one channel
    each, standardised by mean and deviation over the training rows. Classes are the sorted labels
    of the training rows. Only the name of ``spec`` is used.
    """
    folder = next((f for f in (root / spec.name, root) if (f / "train.csv").exists()), None)
    if folder is None or not (folder / "test.csv").exists():
        raise DatasetError(
            f"dataset={spec.name!r} was not found; tried train.csv and test.csv in "
            f"{root / spec.name} and {root}. Remedy: set data-root=... to their folder"
        )
    columns, features, names = _read_csv(folder / "train.csv")
    test_columns, test_features, test_names = _read_csv(folder / "test.csv")
    if test_columns != columns:
        odd = sorted(set(columns) ^ set(test_columns)) or "their order"
        raise DatasetError(f"{folder / 'test.csv'}: columns differ from train.csv's: {odd}")
    classes = sorted(set(names))
    if unknown := sorted(set(test_names) - set(classes)):
        raise DatasetError(f"{folder / 'test.csv'}: labels {unknown[:5]} are not in train.csv")
    mean, deviation = features.mean(axis=0), features.std(axis=0)
    table = DataSpec(
        name=spec.name,
        shape=(len(columns), 1, 1),
        num_classes=len(classes),
        mean=tuple(mean.tolist()),
        std=tuple(np.where(deviation > 0, deviation, 1.0).tolist()),
        kind="table",
    )
    return Dataset(
        table, _samples(features, names, classes), _samples(test_features, test_names, classes)
    )


def _samples(features: NDArray[np.float64], names: list[str], classes: list[str]) -> RawSamples:
    labels = np.array([classes.index(name) for name in names], dtype=np.int64)
    return RawSamples(features.astype(np.float32)[:, :, None, None], labels)


def _read_csv(path: Path) -> tuple[list[str], NDArray[np.float64], list[str]]:
    """Names of the features, features (n, d) and labels."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = csv.reader(file, skipinitialspace=True)
    except (OSError, ValueError, csv.Error) as error:
        raise DatasetError(f"{path}: not a readable CSV file ({error})") from error
    columns = [name.strip() for name in header]
    lowered = [name.lower() for name in columns]
    if lowered.count(LABEL) != 1 or len(columns) < 2 or not rows:
        raise DatasetError(f"{path}: need one column {LABEL!r}, features and rows, got {columns}")
    place = lowered.index(LABEL)
    names = [name for i, name in enumerate(columns) if i != place]
    features = np.empty((len(rows), len(names)))
    for line, row in enumerate(rows):
        try:
            if len(row) != len(columns):
                raise ValueError(f"it has {len(row)}")
            features[line] = [float(value) for i, value in enumerate(row) if i != place]
        except ValueError as error:
            raise DatasetError(
                f"{path}, line {line + 2}: need {len(columns)} values, numbers except the label "
                f"({error}); drop columns such as addresses and times"
            ) from error
    broken = np.argwhere(~np.isfinite(features))
    if len(broken):
        row, column = broken[0]
        raise DatasetError(
            f"{path}, line {row + 2}: {names[column]} is {features[row, column]}; drop the "
            f"{len(np.unique(broken[:, 0]))} rows with such values"
        )
    return names, features, [row[place].strip() for row in rows]
