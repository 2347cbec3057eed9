"""A run's result in a few numbers, and its best rounds."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.server.page.words import data_size, percent, seconds, stated

TARGET = 0.8  # accuracy

Row = Mapping[str, Any]


def accuracy_of(row: Row) -> float | None:
    """Accuracy on the server's test samples; without any, the mean of nodes on their own."""
    accuracy: float | None = row["accuracy"]
    return row.get("node_accuracy") if accuracy is None else accuracy


def best(rows: Sequence[Row]) -> Row | None:
    """Row with the highest accuracy, the earliest if tied; None without any."""
    return max(_scored(rows), key=itemgetter(0), default=(0.0, None))[1]


def reached(rows: Sequence[Row], accuracy: float) -> Row | None:
    """First row with at least `accuracy`."""
    return next((row for known, row in _scored(rows) if known >= accuracy), None)


def _scored(rows: Sequence[Row]) -> list[tuple[float, Row]]:
    return [(accuracy, row) for row in rows if (accuracy := accuracy_of(row)) is not None]


def numbers(run: RunFiles) -> list[tuple[str, str]]:
    """Name and value of each number; empty before the end of round 0."""
    if not run.rows:
        return []
    last, peak, target = run.rows[-1], best(run.rows), reached(run.rows, TARGET)
    nodes = run.about.get("nodes", {})
    samples = sum(node["samples"] or 0 for node in nodes.values())
    accuracy = []
    if peak:
        accuracy = [
            ("accuracy", stated(last)),
            ("best accuracy", f"{percent(accuracy_of(peak))}, round {peak['round']}"),
            ("rounds to 80 %", str(target["round"]) if target else "not reached"),
        ]
    if last["accuracy"] is not None:
        accuracy.append(("loss", f"{last['loss']:.3f}"))
        if last.get("node_accuracy") is not None:
            accuracy.append(("mean over nodes", percent(last["node_accuracy"])))
    return [
        *accuracy,
        ("rounds", f"{last['round']} of {run.settings['num-rounds']}"),
        *([("nodes", str(len(nodes))), ("training samples", f"{samples:,}")] if nodes else []),
        ("through the server", data_size(last["server_bytes"])),
        ("between nodes", data_size(last["link_bytes"])),
        ("seconds", seconds(last["seconds"])),
        ("warnings", str(sum("warning" in entry for entry in run.journal))),
    ]
