"""A run that asks nodes for counts of their data: what they hold, and what a run would fail on.

Those that cannot take part in training are asked, too: they are the ones to hear of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from logging import INFO, WARNING
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from flwr_distill.base.text import counted
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import STATISTICS
from flwr_distill.protocol.statistics import ASK_STATISTICS, read_statistics
from flwr_distill.server.data_warnings import data_warnings
from flwr_distill.server.record.recorder import write_json
from flwr_distill.server.roster import Roster
from flwr_distill.server.scoring import PLAIN
from flwr_distill.server.settings import RunSettings
from flwr_distill.strategies.common.directory import by_reason
from flwr_distill.strategies.common.waiting import connected_nodes
from flwr_distill.task.cells import Tables
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.errors import SettingsError

FILE = "statistics.json"
FORMAT = "flwr-distill/statistics/1"


@dataclass
class NodeStatistics:
    """A node's counts, or why it sent none."""

    name: str
    tables: Tables = field(default_factory=dict)
    floor: int = 1
    epsilon: float = 0.0
    problem: str = ""


def check_statistics(settings: RunSettings) -> None:
    """Raise SettingsError if a run with ``statistics`` is to do something else, too."""
    if not settings.statistics:
        return
    if settings.secure_sums:
        raise SettingsError(
            "counts are of single nodes, to say which would fail, and no sums",
            where="secure-sums",
            value=True,
            remedy="set it to false: nodes round their counts, and statistics-epsilon of their "
            "policies adds noise",
        )
    for key, value in {"strategy": PLAIN, "start": "", "edge": "", "resume": ""}.items():
        if (own := getattr(settings, key)) != value:
            raise SettingsError(
                "a run with statistics asks nodes once, and no more",
                where=key,
                value=own,
                remedy=f"set it to {value!r}",
            )


def ask_for_statistics(
    grid: Grid, roster: Roster, settings: RunSettings, spec: DataSpec, folder: Path
) -> None:
    """Meet all connected nodes, ask them for counts, and write these to ``statistics.json``.

    Raises TooFewNodesError if fewer than ``min-nodes`` connect in time.
    """
    timeout = settings.phase_timeout
    nodes = connected_nodes(grid, settings.min_nodes, timeout)
    roster.meet_new(grid, timeout)
    answers = {node: NodeStatistics("", problem="no answer in time") for node in nodes}
    messages = [Message(RecordDict(), node, ASK_STATISTICS) for node in nodes]
    for reply in grid.send_and_receive(messages, timeout=timeout):
        answers[reply.metadata.src_node_id] = _read(reply)
    for node, answer in answers.items():
        answer.name = roster.directory.name(node)
    found = sorted(answers.values(), key=lambda answer: answer.name)
    classes = roster.directory.class_names or spec.labels.classes
    refusing = {roster.directory.name(node): why for node, why in roster.excluded.items()}
    silent = {own.name: [own.problem] for own in found if own.problem}
    warnings = [
        *data_warnings({own.name: own.tables for own in found if own.tables}, classes),
        *(f"Sent no statistics: {line}" for line in by_reason(silent)),
    ]
    for text in warnings:
        log(WARNING, "%s", text)
    warnings[:0] = [f"Cannot take part: {line}" for line in by_reason(refusing)]  # in the log
    log(INFO, "Statistics of %s", counted(len(found) - len(silent), "node"))
    write_json(folder / FILE, _content(found, classes, warnings))


def _read(reply: Message) -> NodeStatistics:
    if reply.has_error():
        return NodeStatistics("", problem=one_line(reply.error.reason) or "it failed")
    try:
        tables, report = read_statistics(reply.content.config_records[STATISTICS])
    except ValueError as error:
        return NodeStatistics("", problem=one_line(error))
    if not tables:
        return NodeStatistics(
            "", floor=report.floor, problem=f"it has fewer than {counted(report.floor, 'sample')}"
        )
    return NodeStatistics("", tables, report.floor, report.epsilon)


def _content(
    nodes: Sequence[NodeStatistics], classes: Sequence[str], warnings: Sequence[str]
) -> Mapping[str, object]:
    return {
        "format": FORMAT,
        "warnings": warnings,
        "classes": list(classes),
        "nodes": [asdict(node) for node in nodes],
    }
