"""The scale of the columns of nodes' own tables: from means and variances, or sums, of nodes."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import ERROR, INFO
from statistics import median

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from pydantic import TypeAdapter

from flwr_distill.base.text import counted
from flwr_distill.links.digits import NUM_DIGITS
from flwr_distill.links.masks import MAX_NODES
from flwr_distill.protocol.arrays import as_arrays, sent_arrays
from flwr_distill.protocol.meeting import (
    COLUMNS,
    DESCRIBE_COLUMNS,
    SUMS,
    ColumnsRequest,
    moments_in,
    scale_in,
)
from flwr_distill.protocol.messages import CONFIG, NUM_EXAMPLES
from flwr_distill.protocol.outliers import capped
from flwr_distill.protocol.replies import number, set_aside, usable
from flwr_distill.server.record.checkpoint import Checkpoint
from flwr_distill.server.settings import RunSettings
from flwr_distill.strategies.common.waiting import connected_nodes
from flwr_distill.task.columns import FAR, Moments, Scale, pooled
from flwr_distill.task.errors import SettingsError

MIN_COMPARED = 3
"""Nodes among which one can be far from the others."""


def run_scale(
    grid: Grid, columns: Sequence[str], settings: RunSettings, checkpoint: Checkpoint | None
) -> Scale | None:
    """Mean and deviation of each column that a run leaves to nodes; None if there are none.

    A resumed run has those of its checkpoint. Others wait for ``min-nodes`` nodes, and ask all that
    are connected. Also None if no answer is usable; nodes give their reasons at the first meeting.
    """
    if not columns:
        return None
    if checkpoint:
        return TypeAdapter(Scale).validate_python(checkpoint.record["scale"])
    connected_nodes(grid, settings.min_nodes, settings.phase_timeout)
    if settings.secure_sums:
        return _ask_for_sums(grid, len(columns), settings.phase_timeout)
    return _ask(grid, columns, settings)


def _ask_for_sums(grid: Grid, num_columns: int, timeout: float) -> Scale | None:
    """The scale from secure sums; several of equal size share the time if one is too small."""
    deadline = time.monotonic() + timeout
    request = ColumnsRequest(columns=num_columns).model_dump(by_alias=True)
    content = RecordDict({CONFIG: ConfigRecord(request)})
    nodes = sorted(grid.get_node_ids())
    num_sums = math.ceil(len(nodes) / MAX_NODES)
    num_summed, sums = 0, np.zeros((1 + 2 * num_columns, NUM_DIGITS))
    for place in range(num_sums):
        messages = [Message(content, node, DESCRIBE_COLUMNS) for node in nodes[place::num_sums]]
        share = max(0.0, deadline - time.monotonic()) / (num_sums - place)
        replies = usable(grid.send_and_receive(messages, timeout=share))
        if replies:  # each has the mean of all
            num_summed += len(replies)
            weight = sum(int(number(reply, NUM_EXAMPLES)) for reply in replies)
            mean = as_arrays(sent_arrays(replies[0], COLUMNS))[SUMS]
            sums += weight * np.asarray(mean, np.float64)
    if not num_summed:
        return None
    try:
        scale = scale_in(sums)
    except ValueError as error:
        log(ERROR, "Secure sums of columns fit no table: %s", error)
        return None
    log(INFO, "Columns are standardised by a secure sum of %s", counted(num_summed, "node"))
    return scale


def _ask(grid: Grid, columns: Sequence[str], settings: RunSettings) -> Scale | None:
    messages = [Message(RecordDict(), node, DESCRIBE_COLUMNS) for node in grid.get_node_ids()]
    parts: dict[int, Moments] = {}
    for reply in usable(grid.send_and_receive(messages, timeout=settings.phase_timeout)):
        node = reply.metadata.src_node_id
        own = moments_in(sent_arrays(reply, COLUMNS), int(number(reply, NUM_EXAMPLES)))
        if len(own.mean) == len(columns):
            parts[node] = own
        else:
            reason = f"describes {len(own.mean)} columns, and the run has {len(columns)}"
            set_aside(grid, node, DESCRIBE_COLUMNS, reason)
    for node, reason in far_from_others(parts, columns).items():
        set_aside(grid, node, DESCRIBE_COLUMNS, reason)
        del parts[node]
    if not parts:
        return None
    rows = capped({node: part.rows for node, part in parts.items()}, settings.most_samples)
    log(INFO, "Columns are standardised by the values of %s", counted(len(parts), "node"))
    return pooled([replace(part, rows=rows[node]) for node, part in parts.items()])


def far_from_others(parts: Mapping[int, Moments], columns: Sequence[str]) -> dict[int, str]:
    """Why nodes' values are rejected: a column is in another unit, or a lie.

    Means and deviations are compared with the medians of all nodes, which fewer than half of them
    cannot move far. A column that is constant on most nodes is not judged.
    """
    reasons: dict[int, str] = {}
    if len(parts) < MIN_COMPARED:
        return reasons
    for place, name in enumerate(columns):
        means = {node: part.mean[place] for node, part in parts.items()}
        deviations = {node: part.variance[place] ** 0.5 for node, part in parts.items()}
        middle, usual = median(means.values()), median(deviations.values())
        for node in parts if usual else ():
            if max(abs(means[node] - middle), deviations[node]) > FAR * usual:
                reasons.setdefault(
                    node,
                    f"its column {name!r} is more than {FAR:g} deviations from other nodes' "
                    "(check its unit)",
                )
    return reasons


def check_scale(scale: Scale | None, columns: Sequence[str]) -> None:
    """Raise SettingsError if a run does not know the scale of its columns."""
    if scale is None and columns:
        raise SettingsError(
            "no node sent means and deviations of its columns, as the log says",
            where="private.columns",
            remedy=f"state them for each column, private.columns={columns[0]}:MEAN+-DEVIATION",
        )
