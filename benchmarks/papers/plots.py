"""Figures of the papers, drawn of our runs: accuracy by round, or traffic to given accuracies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from benchmarks.papers.facts import Value
from benchmarks.papers.runs import Result, rounds_to

Line = tuple[Mapping[str, Value], Sequence[Result]]
"""Place of a row, and its runs, one a seed."""


def draw(
    title: str,
    plot: str,
    panel: str,
    targets: Sequence[float],
    lines: Sequence[Line],
    file: Path,
    running: int = 1,
) -> None:
    """Draw a panel for each value of a key, with a line for each row; means over seeds.

    Parameters
    ----------
    title : str
        Of the whole figure.
    plot : str
        ``accuracy`` by round, or ``traffic``: mebibytes to each target, on a logarithmic axis.
    panel : str
        Key of the places; empty for one panel.
    targets : Sequence[float]
        Accuracies in percent, for ``traffic``.
    lines : Sequence[tuple[Mapping, Sequence[Result]]]
        Places and runs.
    file : Path
        A PNG.
    running : int (default: 1)
        Rounds, up to each, over which ``accuracy`` is averaged.
    """
    panels = list(dict.fromkeys(str(place.get(panel, "")) for place, _ in lines)) or [""]
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    figure.suptitle(title)
    for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for place, results in lines:
            if str(place.get(panel, "")) == name and results:
                label = ", ".join(str(value) for key, value in place.items() if key != panel)
                if plot == "traffic":
                    _traffic(axes, label, results, targets)
                else:
                    _accuracy(axes, label, results, running)
        axes.set_title(name)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def _accuracy(axes: Any, label: str, results: Sequence[Result], running: int) -> None:
    rounds = range(1, 1 + min(result.rounds for result in results))
    means = [_mean([result.by_round[number] for result in results]) for number in rounds]
    axes.plot(rounds, running_means(means, running), label=label)
    axes.set(xlabel="round", ylabel="test accuracy (%)")


def running_means(values: Sequence[float], size: int) -> list[float]:
    """Mean of each value and those before it, `size` at most."""
    return [fmean(values[max(0, end - size) : end]) for end in range(1, len(values) + 1)]


def _traffic(axes: Any, label: str, results: Sequence[Result], targets: Sequence[float]) -> None:
    sizes = [_mean([_mebibytes_to(result, target) for result in results]) for target in targets]
    axes.plot(targets, sizes, marker="o", label=label)
    axes.set(xlabel="test accuracy (%)", ylabel="traffic (MiB)", yscale="log")


def _mebibytes_to(result: Result, target: float) -> float | None:
    rounds = rounds_to(result.by_round, target)
    size = None if rounds is None else result.formula_bytes(rounds)
    return None if size is None else size / 2**20


def _mean(values: Sequence[float | None]) -> float:
    """Mean of what is known; NaN, which is not drawn, if nothing is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else float("nan")
