"""Columns of nodes' own tables: what a run reads of them, and the scale that all nodes share.

Nothing here imports NumPy or torch.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Self

from flwr_distill.task.labels import names_problem
from flwr_distill.task.text_files import composed

MAX_VALUE = 1e150
"""Absolute value in a column; the squares of larger ones do not fit into float64."""
FAR = 100.0
"""Deviations between a node's values and others' that only another unit, or a lie, explains."""
MIN_VARIANCE = 2.0**-400
"""Smallest variance above 0 that a node adds to exact sums, which end at 2^-512."""
_NO_VARIANCE = 2.0**-450
_NUMBER = r"\s*\+?(?:[eE]\+|[^+])+"
_STATED = re.compile(rf"(?P<mean>{_NUMBER})\+-(?P<deviation>{_NUMBER})")


@dataclass(frozen=True)
class Column:
    """A column that a run reads.

    Parameters
    ----------
    name : str
        In the header of every node's table.
    categories : tuple[str, ...] (default: ())
        Allowed values, each a separate input that is 1 where it is the value; empty for numbers.
    scale : tuple[float, float], optional (default: None)
        Mean and deviation by which its numbers are standardised, if the run states them; else the
        nodes' own give them.
    """

    name: str
    categories: tuple[str, ...] = ()
    scale: tuple[float, float] | None = None

    @classmethod
    def parsed(cls, text: str) -> Self:
        """A column as written in ``private.columns``: ``age``, ``age:54+-9`` or ``sex:f|m``."""
        name, colon, rest = (part.strip() for part in text.partition(":"))
        if any(mark in name for mark in "=|"):
            raise ValueError(f"column {name!r}: = and | separate other parts; rename it")
        if not colon:
            return cls(name)
        if stated := _STATED.fullmatch(rest):
            return cls(name, scale=_scale(name, stated["mean"], stated["deviation"]))
        categories = tuple(category.strip() for category in rest.split("|"))
        problem = names_problem(categories) or ("there is one" if len(categories) == 1 else "")
        if problem:
            raise ValueError(
                f"column {name!r}: after the colon need two or more categories, as in f|m, or mean "
                f"and deviation, as in 54+-9 ({problem})"
            )
        return cls(name, categories)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the model's inputs that it becomes: its own, or ``sex=f`` and ``sex=m``."""
        return tuple(f"{self.name}={category}" for category in self.categories) or (self.name,)

    @property
    def is_open(self) -> bool:
        """Whether the nodes' means and deviations standardise it."""
        return not self.categories and self.scale is None


@dataclass(frozen=True)
class Columns:
    """The columns that a run reads, in the order of the model's inputs, and the label's.

    Parameters
    ----------
    features : tuple[Column, ...]
        All but the label.
    label : str (default: "")
        Name of the column with the classes; empty for tables without it.
    """

    features: tuple[Column, ...]
    label: str = ""

    @classmethod
    def parsed(cls, text: str, label: str) -> Self:
        """Columns as written in ``private.columns``, with commas between; else ValueError."""
        features = map(Column.parsed, composed(text).split(","))
        columns = cls(tuple(features), composed(label))
        problem = names_problem(columns.names) or names_problem(columns.inputs)
        if problem:
            raise ValueError(problem)
        return columns

    @classmethod
    def of_inputs(cls, inputs: Sequence[str]) -> Self:
        """Columns, without the label, of a model with inputs of these names."""
        categories: dict[str, list[str]] = {}
        for name, equals, category in (text.partition("=") for text in inputs):
            categories.setdefault(name, []).extend([category] if equals else [])
        return cls(tuple(Column(name, tuple(own)) for name, own in categories.items()))

    @property
    def names(self) -> tuple[str, ...]:
        """Names in a table's header, the label's last."""
        return (*(column.name for column in self.features), *filter(None, [self.label]))

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the model's inputs."""
        return tuple(name for column in self.features for name in column.inputs)

    @cached_property
    def open_inputs(self) -> tuple[int, ...]:
        """Places among the inputs of columns that nodes' values standardise."""
        is_open = [column.is_open for column in self.features for _ in column.inputs]
        return tuple(place for place, value in enumerate(is_open) if value)

    def scale_of_inputs(self, scale: "Scale | None") -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of each input; 0 and 1 of categories, and of all not yet known."""
        pairs = [column.scale or (0.0, 1.0) for column in self.features for _ in column.inputs]
        if scale is not None:
            known = zip(scale.mean, scale.deviation, strict=True)
            for place, pair in zip(self.open_inputs, known, strict=True):
                pairs[place] = pair
        return tuple(mean for mean, _ in pairs), tuple(deviation for _, deviation in pairs)


@dataclass(frozen=True)
class Scale:
    """Mean and deviation over all nodes of each column that a run does not state them of."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True)
class Moments:
    """A node's report of its columns: rows, and mean and variance of each column.

    Mean and deviation over all rows of all nodes follow from these. Sums of squares would lose
    digits of large values.
    """

    rows: int
    mean: tuple[float, ...]
    variance: tuple[float, ...]

    @property
    def sums(self) -> tuple[tuple[Fraction, Fraction], ...]:
        """Exact sum and sum of squares of each column."""
        pairs = zip(map(Fraction, self.mean), map(Fraction, self.variance), strict=True)
        return tuple(
            (self.rows * mean, self.rows * (variance + mean**2)) for mean, variance in pairs
        )


def pooled(parts: Sequence[Moments]) -> Scale:
    """Mean and deviation of each column over all rows; of a constant column its value and 1."""
    total = sum(part.rows for part in parts)
    shares = [part.rows / total for part in parts]
    pairs = [
        _pooled(shares, means, variances)
        for means, variances in zip(
            zip(*(part.mean for part in parts), strict=True),
            zip(*(part.variance for part in parts), strict=True),
            strict=True,
        )
    ]
    return Scale(tuple(mean for mean, _ in pairs), tuple(deviation for _, deviation in pairs))


def dwarfed(own: Moments, scale: Scale) -> tuple[int, ...]:
    """Places of columns in which a node's values differ, but are tiny beside the scale's deviation.

    Then other nodes' values are in another unit, or one of them lies.
    """
    return tuple(
        place
        for place, deviation in enumerate(scale.deviation)
        if own.variance[place]
        and max(abs(own.mean[place]), math.sqrt(own.variance[place])) < deviation / FAR
    )


def _pooled(
    shares: Sequence[float], means: Sequence[float], variances: Sequence[float]
) -> tuple[float, float]:
    if not any(variances) and len(set(means)) == 1:  # a mean of equal values may be rounded
        return means[0], 1.0
    mean = math.fsum(share * own for share, own in zip(shares, means, strict=True))
    variance = math.fsum(
        share * (own_variance + (own - mean) ** 2)
        for share, own, own_variance in zip(shares, means, variances, strict=True)
    )
    return mean, math.sqrt(variance) or 1.0


def scale_of_sums(rows: Fraction, sums: Sequence[tuple[Fraction, Fraction]]) -> Scale:
    """Mean and deviation of each column from exact sums over all rows, as `pooled` has them.

    Raises ValueError if no rows have such sums.
    """
    if rows < 1:
        raise ValueError(f"they are of {float(rows):.3g} rows")
    means = [total / rows for total, _ in sums]
    variances = [squares / rows - mean**2 for mean, (_, squares) in zip(means, sums, strict=True)]
    if any(variance < -_NO_VARIANCE for variance in variances):
        raise ValueError("sums of squares are too small for the sums")
    deviations = [math.sqrt(v) if v > _NO_VARIANCE else 1.0 for v in variances]
    return Scale(tuple(map(float, means)), tuple(deviations))


def _scale(name: str, mean: str, deviation: str) -> tuple[float, float]:
    try:
        scale = float(mean), float(deviation)
    except ValueError:
        scale = math.nan, math.nan
    if not (abs(scale[0]) <= MAX_VALUE and 0 < scale[1] <= MAX_VALUE):
        raise ValueError(
            f"column {name!r}: mean+-deviation must be two numbers, the second above 0, as in "
            f"54+-9, got {mean}+-{deviation}"
        )
    return scale
