"""Comparing runs: best rounds, common accuracy, settings that differ."""

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from flwr_distill.server.page.run_files import RunFiles, flat, short

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


def common_accuracy(runs: Sequence[Sequence[Row]]) -> float | None:
    """Highest accuracy that every run reached; None if a run has no accuracy at all."""
    peaks = [accuracy_of(peak) for rows in runs if (peak := best(rows))]
    known = [accuracy for accuracy in peaks if accuracy is not None]
    return min(known, default=None) if len(known) == len(runs) else None


def differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Dotted keys whose values differ, with each run's value; None where a run has no such key."""
    flattened = [flat(each) for each in settings]
    keys = {key: None for each in flattened for key in each}
    values = {key: [each.get(key) for each in flattened] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def labels(runs: Sequence[RunFiles]) -> list[str]:
    """Strategy of each run, plus the end of its id if two runs have the same strategy."""
    strategies = [str(run.settings["strategy"]) for run in runs]
    times = Counter(strategies)
    return [
        name if times[name] == 1 else f"{name} {short(run.folder.name)}"
        for name, run in zip(strategies, runs, strict=True)
    ]
