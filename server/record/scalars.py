"""A round's numbers by name, as trackers plot them."""

from collections.abc import Callable
from dataclasses import asdict

from flwr_distill.server.hooks import RoundRow


def scalars(row: RoundRow, class_name: Callable[[int], str] = str) -> dict[str, float]:
    """Numbers of a row that are known; `class_name` gives a class's name by its label."""
    numbers = asdict(row)
    intervals, nodes = numbers.pop("intervals") or {}, numbers.pop("node_scores") or {}
    for group, bounds in (("interval", intervals), ("nodes_interval", nodes.get("intervals"))):
        for name, (low, high) in (bounds or {}).items():
            numbers |= {f"{group}/{name}_low": low, f"{group}/{name}_high": high}
    numbers |= {f"nodes/{k}": v for k, v in nodes.items() if isinstance(v, int | float)}
    for name in ("round", "confusion"):
        del numbers[name]
    for label, accuracy in enumerate(numbers.pop("class_accuracy") or []):
        numbers[f"class_accuracy/{class_name(label)}"] = accuracy
    return {name: value for name, value in numbers.items() if value is not None}
