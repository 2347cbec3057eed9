"""Report that compares runs."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flwr_distill.server.page.comparison import (
    accuracy_of,
    best,
    common_accuracy,
    differing,
    labels,
    reached,
)
from flwr_distill.server.page.curves import Series, finite
from flwr_distill.server.page.layout import chart, page
from flwr_distill.server.page.run_files import REPORT, RunFiles
from flwr_distill.server.page.svg import colour
from flwr_distill.server.page.words import data_size, percent, seconds, stated
from flwr_distill.strategies.common.sections import Figure, Section, Table


def comparison_page(runs: Sequence[RunFiles], folder: Path) -> str:
    """HTML page in `folder` that compares two or more runs, with links to their reports."""
    first, *others = (Section(title, tables=[table]) for title, table in comparison_tables(runs))
    figures = _curves(runs)
    learning = [Section("Learning", figures=figures)] if figures else []
    return page(
        " · ".join(labels(runs)),
        f"{len(runs)} runs of flwr-distill compared",
        [replace(first, links=_reports(runs, folder)), *learning, *others],
    )


def _reports(runs: Sequence[RunFiles], folder: Path) -> list[tuple[str, str]]:
    """Links to the runs' reports that are there."""
    return [
        (Path(os.path.relpath(run.folder / REPORT, folder)).as_posix(), f"Report of {label}")
        for label, run in zip(labels(runs), runs, strict=True)
        if (run.folder / REPORT).exists()
    ]


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
