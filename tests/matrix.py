"""Strategies of a test: some run always, the others with ``make test-matrix``."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

OURS = {"cadis", "fedavg", "fedhead-plus", "fedlgd", "fedproto", "hfldd", "scaffold"}
"""One of each way to keep a state, and to use phases and arrays of their own."""
BASELINES = (
    *("dynafed", "fedaf", "feddm", "fedhkd", "fedmd", "fedproto", "fedseq", "fedseq-zaccone"),
    "vhl",
)
"""Methods of other papers than those of this project's, with phases or steps of their own."""


def strategies(names: Iterable[str], always: Collection[str] = OURS) -> list[Any]:
    """Parameters of a test, sorted; those that are not in `always` are marked ``matrix``."""
    rest = pytest.mark.matrix
    return [n if n in always else pytest.param(n, marks=rest) for n in sorted(set(names))]
