"""Numbers as text."""

from collections.abc import Mapping, Sequence
from typing import Any

METRIC_WORDS = {
    "accuracy": "accuracy",
    "balanced-accuracy": "balanced accuracy",
    "macro-f1": "macro F1",
    "auroc": "AUROC",
    "ece": "calibration error",
    "loss": "loss",
}
"""Names of metrics of ``best-metric``."""
LOWER_IS_BETTER = ("loss", "ece")


def shown(metric: str, value: float | None) -> str:
    """A value of a metric: loss and calibration error as numbers, others in percent."""
    if value is not None and metric in LOWER_IS_BETTER:
        return f"{value:.3f}"
    return percent(value)


def percent(share: float | None) -> str:
    """0.9417 -> ``94.2 %``."""
    return "-" if share is None else f"{100 * share:.1f} %"


def stated(row: Mapping[str, Any]) -> str:
    """A row's accuracy: on the server's test samples, else ``51.9 % on nodes``."""
    if (accuracy := row.get("accuracy")) is None and row.get("node_accuracy") is not None:
        return f"{percent(row['node_accuracy'])} on nodes"
    return percent(accuracy)


def data_size(num_bytes: float | None) -> str:
    """10905784 -> ``10.9 MB``."""
    if num_bytes is None:
        return "-"
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= 0.9995 * unit:  # 999,600 B is 1 MB, not 1000 kB
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} B"


def seconds(duration: float | None) -> str:
    """One decimal below 100, none above."""
    return "-" if duration is None else f"{duration:.0f}" if duration >= 100 else f"{duration:.1f}"


def between(numbers: Sequence[int]) -> str:
    """``[3, 1, 2]`` -> ``1 to 3``, ``[2, 2]`` -> ``2``."""
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def spans(numbers: Sequence[int]) -> str:
    """``[1, 2, 3, 7]`` -> ``1–3, 7``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}–{r[-1]}" for r in runs)
