"""Counts a node's data into tables (`task.cells`): own images and tables, or a named data set's."""

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageStat

from flwr_distill.task.cells import (
    ABSENT,
    BRIGHTNESS,
    BRIGHTNESS_CELLS,
    CLASS,
    COLOURS,
    EDGES,
    MISSING,
    MODE,
    MODES,
    NUMBERS,
    OTHER,
    SIZE,
    UNUSABLE,
    WRONG,
    Tables,
    column_table,
)
from flwr_distill.task.columns import Columns
from flwr_distill.task.datasets import DatasetError, DataSpec, RawSamples
from flwr_distill.task.datasets.own_tables import header_of
from flwr_distill.task.survey import survey
from flwr_distill.task.table_survey import ColumnSurvey, survey_table

MAX_SIZES = 16
"""Sizes of images that are counted by themselves; more are counted by powers of two."""


def count_images(path: Path, channels: int, only: Collection[str] | None = None) -> Tables:
    """Count images by class, size, stored mode and brightness; with 3 channels, of each colour.

    Only those of some classes, where these are given. For errors see `task.survey.survey`;
    a table is one, too.
    """
    if path.suffix in (".csv", ".parquet") and path.is_file():
        remedy = "have the run name its columns, private.columns, or take images"
        raise DatasetError("is a table, and the run reads images", where=path, remedy=remedy)
    names = (BRIGHTNESS, *COLOURS) if channels == 3 else (BRIGHTNESS,)
    means: list[Counter[str]] = [Counter() for _ in names]

    def watch(total: int, label: str, image: Image.Image | None) -> None:
        if image is not None:
            red, green, blue = ImageStat.Stat(image.convert("RGB")).mean
            values = ((red + green + blue) / 3, red, green, blue)
            for counter, mean in zip(means, values, strict=False):
                counter[_brightness(np.array([mean / 255]))[0]] += 1

    found = survey(path, watch, only=only)
    sizes = Counter[str]()
    for (height, width), count in found.sizes.items():
        sides = (height, width)
        whole = len(found.sizes) <= MAX_SIZES
        sizes["x".join(map(str, sides) if whole else map(_power_of_two, sides))] += count
    modes = Counter[str]()
    for mode, count in found.modes.items():
        modes[mode if mode in MODES else OTHER] += count
    tables = {CLASS: found.counts, SIZE: sizes, MODE: modes}
    tables |= dict(zip(names, means, strict=True))
    return _complete(tables, len(found.of_kind("unreadable")))


def count_table(
    path: Path, columns: Columns, classes: Sequence[str], only: Collection[str] | None = None
) -> Tables:
    """Count the rows of a table by class, and by the values of each column.

    Columns that it does not have are reported as absent, as long as it has one. For errors see
    `task.table_survey.survey_table`.
    """
    header = header_of(path)
    there = tuple(c for c in columns.features if c.name in header)
    label = columns.label if columns.label in header else ""
    if not (there and label):
        there, label = columns.features, columns.label  # an error that lists them
    found = survey_table(path, Columns(there, label), classes, only=only)
    rows = found.usable + len(found.of_kind("unreadable"))
    tables = {column_table(own.column.name): _of_column(own) for own in found.columns[:-1]}
    for column in columns.features:
        tables.setdefault(column_table(column.name), {ABSENT: rows})
    tables[CLASS] = _of_column(found.columns[-1])
    short = {name: rows - sum(cells.values()) for name, cells in tables.items()}
    return {name: _full(cells, short[name]) for name, cells in tables.items()}


def count_samples(raw: RawSamples, spec: DataSpec) -> Tables:
    """Count samples of a named data set by class; images and tables as nodes' own."""
    labels, numbers = np.unique(raw.labels, return_counts=True)
    names = spec.class_names
    tables: Tables = {CLASS: {names[i]: int(n) for i, n in zip(labels, numbers, strict=True)}}
    if spec.kind == "image":
        channels, height, width = raw.images.shape[1:]
        tables[SIZE] = {f"{height}x{width}": len(raw)}
        tables[MODE] = {{1: "L", 3: "RGB"}.get(channels, OTHER): len(raw)}
        means = raw.images.mean(axis=(2, 3), dtype=np.float64)
        means /= 255 if raw.images.dtype == np.uint8 else 1
        tables[BRIGHTNESS] = Counter(_brightness(means.mean(axis=1)))
        if channels == 3:
            of_colours = zip(COLOURS, means.T, strict=True)
            tables |= {name: Counter(_brightness(values)) for name, values in of_colours}
    elif spec.kind == "table":
        for place, name in enumerate(spec.labels.columns):
            tables[column_table(name)] = _ranges(raw.images[:, place, 0, 0])
    return _complete(tables, 0)


def _of_column(own: ColumnSurvey) -> dict[str, int]:
    values = own.categories if own.categories else _ranges(np.array(own.numbers))
    return {**values, MISSING: own.missing, WRONG: own.wrong}


def _ranges(numbers: NDArray[np.generic]) -> dict[str, int]:
    places = np.digitize(numbers.astype(np.float64), EDGES)
    return Counter(NUMBERS[place] for place in places.tolist())


def _brightness(means: NDArray[np.float64]) -> list[str]:
    places = np.minimum((means * 10 + 1e-9).astype(int), len(BRIGHTNESS_CELLS) - 1)
    return [BRIGHTNESS_CELLS[place] for place in places]


def _power_of_two(side: int) -> str:
    low = 1 << (side.bit_length() - 1)
    return f"({low} to {2 * low - 1})"


def _complete(tables: Tables, unusable: int) -> Tables:
    return {name: _full(cells, unusable) for name, cells in tables.items()}


def _full(cells: dict[str, int], unusable: int) -> dict[str, int]:
    return {**cells, UNUSABLE: unusable}
