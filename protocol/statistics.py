"""Statistics of a node's data (``flwr-distill stats``): the message, and the reply's record."""

from collections.abc import Mapping
from typing import Annotated

from flwr.app import ConfigRecord
from pydantic import Field

from flwr_distill.links.records import Printable
from flwr_distill.protocol.messages import STATISTICS
from flwr_distill.protocol.method import Phase
from flwr_distill.protocol.schema import MAX_NUMBER, Reply, Request
from flwr_distill.task.cells import Tables
from flwr_distill.task.settings import Block

ASK_STATISTICS = "query.statistics"
"""Ask a node for counts of its data, whether it can take part in training or not."""
DEFAULT_FLOOR = 10
"""Samples to multiples of which a node without a guard rounds."""
MAX_CELLS = 10_000
"""Cells of all tables."""
MAX_NAME = 100
"""Characters in the name of a table or cell."""

_Names = Annotated[
    list[Annotated[Printable, Field(max_length=MAX_NAME)]], Field(max_length=MAX_CELLS)
]
_Counts = Annotated[list[Annotated[int, Field(ge=0, le=MAX_NUMBER)]], Field(max_length=MAX_CELLS)]


class StatisticsReport(Block):
    """The record: of each cell its table, its name and its samples, and how they were hidden."""

    tables: _Names = Field(default_factory=list)
    cells: _Names = Field(default_factory=list)
    counts: _Counts = Field(default_factory=list)
    floor: Annotated[int, Field(ge=1, le=MAX_NUMBER)] = 1
    """Samples are rounded down to multiples of it."""
    epsilon: Annotated[float, Field(ge=0)] = 0.0
    """Of the noise on them; 0 for none."""


def statistics_record(tables: Tables, floor: int = 1, epsilon: float = 0.0) -> ConfigRecord:
    """The record of tables; cells without samples are left out."""
    rows = [(t, cell, n) for t, cells in tables.items() for cell, n in cells.items() if n]
    names, cells, counts = (list(part) for part in zip(*rows, strict=True)) if rows else ([],) * 3
    report = {"tables": names, "cells": cells, "counts": counts}
    return ConfigRecord({**report, "floor": floor, "epsilon": epsilon})


def read_statistics(record: Mapping[str, object]) -> tuple[Tables, StatisticsReport]:
    """The tables in a record, and the record checked; ValueError if it is malformed."""
    report = StatisticsReport.checked(record, STATISTICS)
    tables: Tables = {}
    for name, cell, count in zip(report.tables, report.cells, report.counts, strict=True):
        if cell in tables.setdefault(name, {}):
            raise ValueError(f"{STATISTICS}: a cell is there twice")
        tables[name][cell] = count
    return tables, report


PHASES = (
    Phase(
        ASK_STATISTICS,
        "nodes count their data",
        (Reply(configs={STATISTICS: StatisticsReport}),),
        "flwr_distill.client.statistics:statistics",
        request=Request(),
        leaves="samples by class, size, mode and brightness, or by the values of each column: "
        "rounded down to multiples of `statistics-floor`, with noise by `statistics-epsilon`",
    ),
)
