"""Learning curves: overall, by class and by node."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr_distill.base.text import counted
from flwr_distill.server.page.drawings import Point, Series, colour_beside_main, finite
from flwr_distill.server.page.layout import chart
from flwr_distill.server.page.numbers import ACCURACY, best, best_metric, score_of
from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.server.page.words import METRIC_WORDS, percent, shown
from flwr_distill.strategies.common.sections import Figure, Section

PERCENT = 100


def learning(run: RunFiles) -> Section | None:
    """Learning curves; None without any evaluation or number from a node."""
    figures = _overall(run)
    by_class: dict[str, list[Point]] = defaultdict(list)
    for row in run.scored:
        for label, accuracy in enumerate(row.get("class_accuracy") or []):
            if accuracy is not None:
                name = f"class {run.class_name(label)}"
                by_class[name].append((row["round"], PERCENT * accuracy))
    if by_class:
        figures.append(_spread("Accuracy by class", "class", by_class, "accuracy, %", PERCENT))
    if by_node := _by_node(run, "eval-accuracy", PERCENT):
        title = "Accuracy on nodes' held-out samples"
        figures.append(_spread(title, "node", by_node, "accuracy, %", PERCENT))
    if by_node := _by_node(run, "train-loss", 1):
        figures.append(_spread("Training loss on nodes", "node", by_node, "loss"))
    return Section("Learning", figures=figures) if figures else None


def _overall(run: RunFiles) -> list[Figure]:
    """Accuracy and loss on the server's test samples."""
    rows, metric = run.scored, best_metric(run)
    if not (peak := best(rows)):
        return []
    first, last = rows[0], rows[-1]
    accuracy = chart(
        "Accuracy",
        f"From {percent(first['accuracy'])} to {percent(last['accuracy'])} on the server's test "
        f"samples; highest, {percent(peak['accuracy'])}, after round {peak['round']}. Round 0 is "
        "the model before training." + _best_otherwise(rows, metric),
        [Series("accuracy", [(row["round"], PERCENT * row["accuracy"]) for row in rows])],
        "accuracy, %",
        y_max=PERCENT,
    )
    if not (points := finite((row["round"], row["loss"]) for row in rows)):
        return [accuracy]
    loss = chart(
        "Loss",
        f"Mean cross-entropy on the same samples, in nats: from {first['loss']:.2f} to "
        f"{last['loss']:.2f}; 0 is perfect.",
        [Series("loss", points)],
        "loss",
    )
    return [accuracy, loss]


def _best_otherwise(rows: Sequence[Mapping[str, Any]], metric: str) -> str:
    """The best round by another metric than accuracy; empty if there is none."""
    if metric == ACCURACY or not (peak := best(rows, metric)):
        return ""
    score = shown(metric, score_of(peak, metric))
    return f" By {METRIC_WORDS[metric]} (best-metric) round {peak['round']} is best: {score}."


def _by_node(run: RunFiles, key: str, unit: float) -> dict[str, list[Point]]:
    by_node: dict[str, list[Point]] = defaultdict(list)
    for server_round, node, value in run.reported(key):
        by_node[node].append((server_round, unit * value))
    return by_node


def _spread(
    title: str,
    what: str,
    curves: Mapping[str, list[Point]],
    y_label: str,
    y_max: float | None = None,
) -> Figure:
    """Many faint curves; their mean and those that end lowest and highest stand out.

    A curve has the same colour in every chart of the same curves.
    """
    values: dict[float, list[float]] = defaultdict(list)
    for curve in curves.values():
        for number, value in curve:
            values[number].append(value)
    mean = [(number, sum(v) / len(v)) for number, v in sorted(values.items())]
    by_end = sorted(curves, key=lambda name: curves[name][-1][1])
    low, high = by_end[0], by_end[-1]
    others = [Series(name, curves[name], "faint") for name in curves if name not in (low, high)]
    place = {name: number for number, name in enumerate(sorted(curves))}
    styles = {low: colour_beside_main(place[low]), high: colour_beside_main(place[high])}
    if low != high and styles[low] == styles[high]:
        styles[high] = colour_beside_main(place[high] + 1)
    series = [
        *others,
        *(Series(name, curves[name], style) for name, style in styles.items()),
        Series("mean", mean, "main"),
    ]
    caption = (
        f"{counted(len(curves), 'curve')} and their mean. At the end the lowest, of {low}, is at "
        f"{curves[low][-1][1]:.3g}, the highest, of {high}, at {curves[high][-1][1]:.3g}, and the "
        f"mean at {mean[-1][1]:.3g}."
    )
    figure = chart(title, caption, series, y_label, y_max=y_max)
    faint = [("faint", f"each other {what}")] if others else []
    return replace(figure, legend=[*figure.legend, *faint])
