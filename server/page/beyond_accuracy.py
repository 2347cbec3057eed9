"""Metrics besides accuracy, with their intervals: of the server's test samples, and of nodes."""

from collections.abc import Mapping
from typing import Any

from flwr_distill.base.text import counted
from flwr_distill.server.page.drawings import Series, confusion_map
from flwr_distill.server.page.layout import chart
from flwr_distill.server.page.numbers import score_of
from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.server.page.words import METRIC_WORDS, shown
from flwr_distill.strategies.common.sections import Figure, Section, Table

METRICS = ("accuracy", "balanced-accuracy", "macro-f1", "auroc", "ece")
BY_NODE = METRICS[1:]
LEGEND = (
    "Balanced accuracy and macro F1 are means over classes, whatever their sizes; classes without "
    "samples are left out. AUROC is the area under the ROC curve of each class against the rest, "
    "and their mean; samples of nearly one probability count as ties. Calibration error (ECE) is "
    "how far confidence is from accuracy; 0 is best. In brackets, 95 % of bootstrap samples."
)
LABELS = ("main", "s1", "s2")


def beyond_accuracy(run: RunFiles) -> Section | None:
    """Metrics of the last round, and their curves; None if none is known."""
    columns = {
        "server's test samples": run.rows[-1] if run.rows else {},
        "all nodes that sent counts": _of_nodes(run.rows[-1]) if run.rows else {},
    }
    known = {name: row for name, row in columns.items() if row.get("balanced_accuracy") is not None}
    if not known:
        return None
    rows = [
        [METRIC_WORDS[metric], *(with_interval(row, metric) for row in known.values())]
        for metric in METRICS
    ]
    tables = [Table(["metric, last round", *(f"#{name}" for name in known)], rows)]
    figures = [figure for name, row in known.items() if (figure := _confusion(run, name, row))]
    if curves := _curves(run):
        figures.insert(0, curves)
    return Section("Beyond accuracy", [LEGEND, *_counted(run)], tables, figures)


def with_interval(row: Mapping[str, Any], metric: str) -> str:
    """``91.2 % [89.0, 93.1]``; without brackets where there is no interval."""
    key = metric.replace("-", "_")
    text = shown(metric, row.get(key))
    if (pair := (row.get("intervals") or {}).get(key)) is None:
        return text
    low, high = (shown(metric, bound).removesuffix(" %") for bound in pair)
    return f"{text} [{low}, {high}]"


def _of_nodes(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return row.get("node_scores") or {}


def _counted(run: RunFiles) -> list[str]:
    nodes = _of_nodes(run.rows[-1])
    if not nodes:
        return []
    number = counted(nodes["nodes"], "node")
    weight = counted(nodes["samples"], "held-out sample")
    return [f"In the last round {number} sent counts, which weigh as {weight}."]


def _curves(run: RunFiles) -> Figure | None:
    curves = []
    for metric, style in zip(BY_NODE, LABELS, strict=False):
        values = [(row["round"], score_of(row, metric)) for row in run.rows]
        if points := [(number, 100 * value) for number, value in values if value is not None]:
            curves.append(Series(METRIC_WORDS[metric], points, style))
    if not curves or run.evaluated:
        return None
    ends = ", ".join(f"{curve.label} at {curve.points[-1][1]:.1f} %" for curve in curves)
    caption = f"By round, on the server's test samples, else on nodes' counts; at the end {ends}."
    return chart("Metrics of all classes alike", caption, curves, "%", y_max=100)


def _confusion(run: RunFiles, what: str, row: Mapping[str, Any]) -> Figure | None:
    if not (matrix := row.get("confusion")):
        return None
    wrong = [
        (count, run.class_name(true), run.class_name(predicted))
        for true, counts in enumerate(matrix)
        for predicted, count in enumerate(counts)
        if true != predicted and count
    ]
    caption = f"Of {what}, last round: a row for each true class, a column for each predicted one."
    if wrong:
        count, true, predicted = max(wrong)
        caption += f" Most often wrong: {true} as {predicted}, {counted(count, 'time')}."
    drawing = confusion_map(matrix, run.class_name)
    return Figure("Confusion matrix", caption, drawing)
