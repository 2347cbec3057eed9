"""Report that compares runs: results, cost of equal accuracy, settings that differ, curves."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr_distill.server.page.drawings import Series, colour, finite
from flwr_distill.server.page.layout import chart, page
from flwr_distill.server.page.numbers import Row, accuracy_of, best, reached
from flwr_distill.server.page.run_files import REPORT, RunFiles, flat, short
from flwr_distill.server.page.words import data_size, percent, seconds, stated
from flwr_distill.strategies.common.sections import Figure, Section, Table


def comparison_page(runs: Sequence[RunFiles], folder: Path, back: str = "") -> str:
    """HTML page in `folder` that compares two or more runs, with links to their reports.

    `back` is the dashboard's first page, if that shows it.
    """
    names = labels(runs)
    first, *others = (Section(title, tables=[table]) for title, table in comparison_tables(runs))
    links = [
        (Path(os.path.relpath(run.folder / REPORT, folder)).as_posix(), f"Report of {name}")
        for name, run in zip(names, runs, strict=True)
        if (run.folder / REPORT).exists()
    ]
    figures = _curves(runs)
    learning = [Section("Learning", figures=figures)] if figures else []
    return page(
        " · ".join(names),
        f"{len(runs)} runs of flwr-distill compared",
        [replace(first, links=links), *learning, *others],
        back=back,
    )


def comparison_tables(runs: Sequence[RunFiles]) -> list[tuple[str, Table]]:
    """Tables by title: results, cost of reaching the common accuracy, differing settings."""
    tables = [("Results", _results(runs))]
    if (common := common_accuracy([run.rows for run in runs])) is not None:
        title = f"Cost of {percent(common)} accuracy, which all runs reached"
        tables.append((title, _costs(runs, common)))
    differences = differing([run.settings for run in runs])
    if differences:
        rows = [[key, *map(str, values)] for key, values in differences.items()]
        tables.append(("Settings that differ", Table(["setting", *labels(runs)], rows)))
    return tables


def labels(runs: Sequence[RunFiles]) -> list[str]:
    """Strategy of each run, plus the end of its id if two runs have the same strategy."""
    strategies = [str(run.settings["strategy"]) for run in runs]
    times = Counter(strategies)
    return [
        name if times[name] == 1 else f"{name} {short(run.folder.name)}"
        for name, run in zip(strategies, runs, strict=True)
    ]


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


def _results(runs: Sequence[RunFiles]) -> Table:
    rows = []
    for label, run in zip(labels(runs), runs, strict=True):
        peak, last = best(run.rows), run.rows[-1] if run.rows else {}
        rows.append(
            [
                label,
                stated(last),
                percent(accuracy_of(peak) if peak else None),
                str(last.get("round", "-")),
                data_size(last.get("server_bytes")),
                data_size(last.get("link_bytes")),
                seconds(last.get("seconds")),
            ]
        )
    columns = ["run", "#accuracy", "#best", "#rounds", "#server", "#links", "#seconds"]
    return Table(columns, rows)


def _costs(runs: Sequence[RunFiles], accuracy: float) -> Table:
    rows = []
    for label, run in zip(labels(runs), runs, strict=True):
        if row := reached(run.rows, accuracy):
            sizes = data_size(row["server_bytes"]), data_size(row["link_bytes"])
            rows.append([label, str(row["round"]), *sizes, seconds(row["seconds"])])
    return Table(["run", "#rounds", "#server", "#links", "#seconds"], rows)


def _curves(runs: Sequence[RunFiles]) -> list[Figure]:
    def series(x: str, y: str, x_unit: float = 1, y_unit: float = 1) -> list[Series]:
        curves = []
        for index, (name, run) in enumerate(zip(labels(runs), runs, strict=True)):
            points = finite((row[x] / x_unit, row[y] / y_unit) for row in run.scored)
            if points:
                curves.append(Series(name, points, colour(index)))
        return curves

    if not series("round", "loss"):
        return []
    return [
        chart(
            "Accuracy by round",
            "Accuracy of the global model on the server's test samples after each round.",
            series("round", "accuracy", y_unit=0.01),
            "accuracy, %",
            y_max=100,
        ),
        chart(
            "Accuracy by traffic",
            "The same accuracy by the bytes sent through the server so far: further left is "
            "cheaper.",
            series("server_bytes", "accuracy", 1e6, 0.01),
            "accuracy, %",
            x_label="MB through the server",
            y_max=100,
        ),
        chart(
            "Loss by round",
            "Mean cross-entropy on the same samples, in nats; 0 is perfect.",
            series("round", "loss"),
            "loss",
        ),
    ]
