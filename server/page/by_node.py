"""How well the model does on each node's held-out samples, and on which node worst."""

import math
from statistics import fmean
from typing import Any

from flwr_distill.base.text import counted
from flwr_distill.protocol.messages import NUM_EXAMPLES
from flwr_distill.server.page.beyond_accuracy import METRICS, with_interval
from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.server.page.words import METRIC_WORDS, percent
from flwr_distill.strategies.common.sections import Section, Table
from flwr_distill.task.scores import share_interval

LEGEND = (
    "The lowest accuracy comes first. In brackets are 95 % intervals: Wilson's of accuracy, of "
    "bootstrap samples of other metrics, which come from counts. They say what other samples of "
    "the node might give. A node reports its numbers itself, and noise that its policy adds is not "
    "in the intervals."
)


def by_node(run: RunFiles) -> Section | None:
    """Table of the nodes that evaluated, worst first; None if none did.

    The first line of its text names the worst, and says whether that may be chance.
    """
    if not (scores := _scores(run)):
        return None
    metrics = [m for m in METRICS if any(m.replace("-", "_") in score for score in scores)]
    columns = ["node", "#samples", *(f"#{METRIC_WORDS[metric]}" for metric in metrics)]
    rows = [
        [score["node"], f"{score['samples']:,}", *(with_interval(score, m) for m in metrics)]
        for score in scores
    ]
    return Section("By node", [_worst(scores), LEGEND], [Table(columns, rows)])


def _scores(run: RunFiles) -> list[dict[str, Any]]:
    """Metrics and intervals of each node in the last round that nodes evaluated, worst first."""
    phases = [e for e in run.journal if e.get("phase") == "evaluate" and e["nodes"]]
    if not phases:
        return []
    entries = [e for e in run.journal if "scored" in e and e["round"] == phases[-1]["round"]]
    of_counts = {node: numbers for entry in entries for node, numbers in entry["nodes"].items()}
    scores = []
    for node, numbers in phases[-1]["nodes"].items():
        samples, accuracy = numbers.get(NUM_EXAMPLES, 0), numbers.get("eval-accuracy", math.nan)
        if not (samples > 0 and 0 <= accuracy <= 1):  # of an app that reports something else
            continue
        score = _of_counts(of_counts.get(node, {}))
        score["intervals"]["accuracy"] = share_interval(accuracy, samples)
        names = {"node": run.name(node), "samples": int(samples), "accuracy": accuracy}
        scores.append(score | names)
    return sorted(scores, key=lambda s: (s["accuracy"], s["intervals"]["accuracy"], s["node"]))


def _of_counts(numbers: dict[str, float]) -> dict[str, Any]:
    """A node's scores in the journal as those of a row are, with their intervals."""
    row: dict[str, Any] = {
        key.removeprefix("eval-").replace("-", "_"): value for key, value in numbers.items()
    }
    names = [key.removesuffix("_low") for key in row if key.endswith("_low")]
    return row | {"intervals": {name: (row[f"{name}_low"], row[f"{name}_high"]) for name in names}}


def _worst(scores: list[dict[str, Any]]) -> str:
    lowest, mean = scores[0], fmean(score["accuracy"] for score in scores)
    low, high = lowest["intervals"]["accuracy"]
    text = (
        f"Worst is {lowest['node']}: {percent(lowest['accuracy'])} of "
        f"{counted(lowest['samples'], 'sample')}, between {percent(low)} and {percent(high)}."
    )
    if len(scores) == 1:
        return text
    return (
        f"{text} The mean over {counted(len(scores), 'node')}, {percent(mean)}, is "
        f"{'above' if high < mean else 'not above'} that interval."
    )
