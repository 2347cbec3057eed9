"""Comparing runs: best rounds, common accuracy, settings that differ."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from server.page.run_files import RunFiles, flat, short

Row = Mapping[str, Any]


def best(rows: Sequence[Row]) -> Row | None:
    """Row with the highest accuracy, the earliest if tied; None without any."""
    scored = [row for row in rows if row["accuracy"] is not None]
    return max(scored, key=lambda row: row["accuracy"], default=None)


def reached(rows: Sequence[Row], accuracy: float) -> Row | None:
    """First row with at least `accuracy`."""
    scored = (row for row in rows if row["accuracy"] is not None)
    return next((row for row in scored if row["accuracy"] >= accuracy), None)


def common_accuracy(runs: Sequence[Sequence[Row]]) -> float | None:
    """Highest accuracy that every run reached; None if a run has no accuracy at all."""
    peaks = [best(rows) for rows in runs]
    return min((p["accuracy"] for p in peaks if p), default=None) if all(peaks) else None


def differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Dotted keys whose values differ, with each run's value; None if a run lacks the key."""
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
