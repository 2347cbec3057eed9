"""A run's result in a few numbers, and its best rounds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.server.page.words import (
    LOWER_IS_BETTER,
    METRIC_WORDS,
    data_size,
    percent,
    seconds,
    shown,
    stated,
)

TARGET = 0.8  # accuracy
ACCURACY = "accuracy"

Row = Mapping[str, Any]


def accuracy_of(row: Row) -> float | None:
    """Accuracy on the server's test samples; without any, the mean of nodes on their own."""
    accuracy: float | None = row["accuracy"]
    return row.get("node_accuracy") if accuracy is None else accuracy


def score_of(row: Row, metric: str) -> float | None:
    """A metric of ``best-metric`` on the server's test samples, else of nodes; None if unknown."""
    if metric == ACCURACY:
        return accuracy_of(row)
    key = metric.replace("-", "_")
    value = row.get(key)
    if value is None:
        value = (row.get("node_scores") or {}).get(key)
    return value if value is not None and math.isfinite(value) else None


def best(rows: Sequence[Row], metric: str = ACCURACY) -> Row | None:
    """Row that is best by a metric of ``best-metric``, the earliest if tied; None without any."""
    sign = -1 if metric in LOWER_IS_BETTER else 1
    return max(_scored(rows, metric), key=lambda pair: sign * pair[0], default=(0.0, None))[1]


def best_metric(run: RunFiles) -> str:
    """Name of the metric by which a run's best round is chosen."""
    return str(run.settings["best-metric"])


def reached(rows: Sequence[Row], accuracy: float) -> Row | None:
    """First row with at least `accuracy`."""
    return next((row for known, row in _scored(rows, ACCURACY) if known >= accuracy), None)


def _scored(rows: Sequence[Row], metric: str) -> list[tuple[float, Row]]:
    return [(score, row) for row in rows if (score := score_of(row, metric)) is not None]


def numbers(run: RunFiles) -> list[tuple[str, str]]:
    """Name and value of each number; empty before the end of round 0."""
    if not run.rows:
        return []
    last, target, metric = run.rows[-1], reached(run.rows, TARGET), best_metric(run)
    peak = best(run.rows, metric)
    nodes = run.about.get("nodes", {})
    samples = sum(node["samples"] or 0 for node in nodes.values())
    rounds = [("rounds", f"{last['round']} of {run.settings['num-rounds']}")]
    if run.evaluated or run.statistics:  # which train nothing
        rounds = [("model", run.evaluated)] if run.evaluated else []
    accuracy = []
    if best(run.rows):
        accuracy.append(("accuracy", stated(last)))
    if peak and not run.evaluated:
        score = shown(metric, score_of(peak, metric))
        accuracy.append((f"best {METRIC_WORDS[metric]}", f"{score}, round {peak['round']}"))
    if best(run.rows) and not run.evaluated:
        accuracy.append(("rounds to 80 %", str(target["round"]) if target else "not reached"))
    if last["accuracy"] is not None:
        accuracy.append(("loss", f"{last['loss']:.3f}"))
        if last.get("node_accuracy") is not None:
            accuracy.append(("mean over nodes", percent(last["node_accuracy"])))
    return [
        *accuracy,
        *rounds,
        *([("nodes", str(len(nodes))), ("training samples", f"{samples:,}")] if nodes else []),
        ("through the server", data_size(last["server_bytes"])),
        ("between nodes", data_size(last["link_bytes"])),
        ("seconds", seconds(last["seconds"])),
        ("warnings", str(sum("warning" in entry for entry in run.journal))),
    ]
