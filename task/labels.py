"""The label map: the names of a run's classes, and of a table's columns, in the model's order.

Nothing here imports torch, so that a node's supervisor can use it too.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from flwr_distill.base.text import listed
from flwr_distill.task.errors import DatasetError

MAX_NAME_LENGTH = 60
"""Characters of a class's or a column's name."""
MAX_NAMES = 10_000
"""Classes, and columns."""
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


class LabelError(DatasetError):
    """Names are ambiguous, or differ from the run's; the message shows them."""


@dataclass(frozen=True)
class LabelMap:
    """Names of the classes by label, and of a table's columns by the model's inputs.

    Parameters
    ----------
    classes : tuple[str, ...] (default: ())
        Empty if the data have no names: classes are then called by their positions, from ``0`` on.
    columns : tuple[str, ...] (default: ())
        Empty if the data are no table.
    """

    classes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what, names in (("classes", self.classes), ("columns", self.columns)):
            if problem := names_problem(names):
                raise LabelError(problem, where=what)

    @property
    def digest(self) -> str:
        """Hash of all names in their order, 16 hexadecimal digits."""
        text = json.dumps([self.classes, self.columns])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def has_numbers(self) -> bool:
        """Whether a class is named by a number, so that integers in data are names."""
        return any(map(is_number, self.classes))

    def label_of(self, name: str) -> int | None:
        """Label of a class by its name; None if there is none of this name."""
        return self.classes.index(name) if name in self.classes else None

    def difference(self, run: "LabelMap") -> str:
        """Difference from a run's names, as text with both; empty if they are the same."""
        pairs = {
            "classes": (self.classes, run.classes),
            "columns": (self.columns, run.columns),
        }
        return "; ".join(
            _difference(what, own, other) for what, (own, other) in pairs.items() if own != other
        )


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Distinct names in an order that is the same everywhere: numbers by value, then texts."""
    return tuple(sorted(set(names), key=_sort_key))


def is_number(name: str) -> bool:
    """Whether a name is a number: an optional sign, digits, and perhaps a point and more digits."""
    return _NUMBER.fullmatch(name) is not None


def is_position(name: str) -> bool:
    """Whether a name may be the position of a class: a whole number without leading zeros."""
    short = len(name) <= MAX_NAME_LENGTH
    return short and name.isascii() and name.isdecimal() and str(int(name)) == name


def positions(number: int) -> tuple[str, ...]:
    """Names of so many classes of data that have no names: ``0``, ``1`` and so on."""
    return tuple(map(str, range(number)))


def names_problem(names: Sequence[str]) -> str:
    """Why names cannot serve in a label map, or nothing if they can."""
    if len(names) > MAX_NAMES:
        return f"there are {len(names):,}, need at most {MAX_NAMES:,}"
    for name in names:
        if not name or not name.isprintable() or len(name) > MAX_NAME_LENGTH:
            shown = f"{name!a:.{MAX_NAME_LENGTH}}"
            return f"{shown} needs another name: printable, of 1 to {MAX_NAME_LENGTH} characters"
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        return f"{twice!r} is there twice; give each another name"
    return same_number(names)


def same_number(names: Iterable[str]) -> str:
    """Which names are one number, such as ``1`` and ``01``; or nothing."""
    numbers: dict[Decimal, str] = {}
    for name in names:
        if is_number(name) and (other := numbers.setdefault(Decimal(name), name)) != name:
            return f"{other} and {name} are the same number; write it in one way, on all nodes"
    return ""


def _sort_key(name: str) -> tuple[bool, Decimal, str]:
    number = is_number(name)
    return not number, Decimal(name) if number else Decimal(0), name


def _difference(what: str, own: Sequence[str], run: Sequence[str]) -> str:
    parts = [
        f"{verb} {listed(names)}"
        for verb, names in (
            ("missing", _without(run, own)),
            ("extra", _without(own, run)),
        )
        if names
    ]
    how = ", ".join(parts) or "another order"
    return f"{what} differ, {how}: here {_shown(own)}, in the run {_shown(run)}"


def _without(names: Sequence[str], others: Sequence[str]) -> list[str]:
    known = set(others)
    return [name for name in names if name not in known]


def _shown(names: Sequence[str]) -> str:
    return f"{listed(names)} ({len(names)})" if names else "no names"
