"""What leaves of the counts of a node's data under its policy: rounded, perhaps with noise.

The app counts; all that hides single samples is done here, outside of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from flwr.app import RecordDict

from flwr_distill.node.evaluation import geometric
from flwr_distill.node.policy import Policy
from flwr_distill.node.requests import MessageRequest, Refusal, table_of
from flwr_distill.protocol.messages import STATISTICS
from flwr_distill.protocol.statistics import ASK_STATISTICS, read_statistics, statistics_record
from flwr_distill.task.cells import (
    BRIGHTNESS,
    CLASS,
    COLOURS,
    MODE,
    OWN,
    SIZE,
    Tables,
    cells_of,
    column_table,
    multiples,
    rounded,
)
from flwr_distill.task.labels import is_number
from flwr_distill.task.settings import PrivateSettings

PRIVATE = "private"
_SIZE_CELL = re.compile(r"\(?[0-9]+( to [0-9]+\))?x\(?[0-9]+( to [0-9]+\))?|\(unusable\)")
_OF_NAMED_SETS = (CLASS, SIZE, MODE, BRIGHTNESS, *COLOURS)
_COLUMN = column_table("")


def cost_of_statistics(policy: Policy, request: MessageRequest) -> float:
    """Epsilon that the answer costs each sample; 0 without noise."""
    if request.message_type != ASK_STATISTICS:
        return 0.0
    return policy.statistics_epsilon or 0.0


def release_statistics(
    policy: Policy,
    request: MessageRequest,
    reply: RecordDict,
    *,
    samples: int | None,
    class_names: Collection[str],
) -> Refusal | None:
    """Put what may leave in place of the app's counts; why nothing may, else None.

    `samples` are those of the node's data as it counts them itself, None if it cannot, and
    `class_names` those of its folders.
    """
    if request.message_type != ASK_STATISTICS:
        return None
    epsilon, floor = policy.statistics_epsilon, policy.statistics_floor
    try:
        if STATISTICS not in reply.config_records:
            raise ValueError("it has no counts")
        tables, _ = read_statistics(reply.config_records[STATISTICS])
        known = _known_cells(request)
        _check(tables, known, {*class_names, *_class_names(request)}, samples)
    except ValueError as error:
        reason = "the app's counts are not those of this node's data (the node's log says more)"
        return Refusal("replies", reason, str(error))
    if epsilon is None:
        tables = rounded(tables, floor)
    else:
        tables = multiples(_with_noise(tables, known, epsilon), floor)
    reply[STATISTICS] = statistics_record(tables, floor, epsilon or 0.0)
    return None


def _private(request: MessageRequest) -> PrivateSettings | None:
    """Settings of nodes' own data; None if the run has a named data set."""
    if request.run_config.get("dataset") != PRIVATE:
        return None
    return PrivateSettings.checked(table_of(request.run_config, PRIVATE), "run config")


def _known_cells(request: MessageRequest) -> Mapping[str, tuple[str, ...]]:
    private = _private(request)
    return {} if private is None else cells_of(private)


def _class_names(request: MessageRequest) -> tuple[str, ...]:
    private = _private(request)
    return private.class_names if private else ()


def _check(
    tables: Tables,
    known: Mapping[str, tuple[str, ...]],
    class_names: Collection[str],
    samples: int | None,
) -> None:
    """Check that tables are of the same samples, no more than there are, and names are known."""
    if len({sum(cells.values()) for cells in tables.values()}) > 1:
        raise ValueError("its tables are of different numbers of samples")
    for name, cells in tables.items():
        if known and name not in (*known, CLASS, SIZE):
            raise ValueError(f"there is no table {name!r} in this run")
        if not known and name not in _OF_NAMED_SETS and not name.startswith(_COLUMN):
            raise ValueError(f"there is no table {name!r}")
        if name == CLASS:
            odd = [c for c in cells if not (c in class_names or c in OWN or is_number(c))]
            odd = odd if known else []
        elif name == SIZE:
            odd = [cell for cell in cells if not _SIZE_CELL.fullmatch(cell)]
        else:
            odd = [cell for cell in cells if name in known and cell not in known[name]]
        if odd:
            raise ValueError(f"table {name!r} has a cell {odd[0]!r}")
    usable = sum(n for cell, n in tables.get(CLASS, {}).items() if cell not in OWN)
    if samples is not None and usable > samples:
        raise ValueError(f"it counts {usable} samples, and there are {samples}")


def _with_noise(tables: Tables, known: Mapping[str, tuple[str, ...]], epsilon: float) -> Tables:
    """Noisy counts of all cells that the run's settings name, zeros included, and no others.

    A sample is in one cell of each table, so each table has its share of epsilon.
    """
    share = epsilon / len(known)
    return {
        name: {
            cell: max(0, tables.get(name, {}).get(cell, 0) + geometric(share) - geometric(share))
            for cell in cells
        }
        for name, cells in known.items()
    }
