"""What ``auto`` codecs chose, and by what, for a run's report."""

from collections.abc import Mapping
from typing import Any

from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.strategies.common.sections import Section, Table


def codecs(run: RunFiles) -> Section | None:
    """A row for each choice; None for a run whose settings name its codecs."""
    rows = [_row(entry["round"], entry["codecs"]) for entry in run.journal if "codecs" in entry]
    if not rows:
        return None
    text = (
        "The smallest codec that cost under half a point on the held-out samples of a few nodes. "
        "Costs are medians over these nodes; shares are of the bytes of float32."
    )
    columns = ["#after round", "down", "up", "#nodes", "#accuracy", "tried", "why"]
    return Section("Codecs", [text], [Table(columns, rows)])


def _row(server_round: int, choice: Mapping[str, Any]) -> list[str]:
    accuracy = choice.get("accuracy")
    return [
        str(server_round),
        choice["down"],
        choice["up"],
        str(choice.get("nodes_counted", "")),
        "" if accuracy is None else f"{100 * accuracy:.2f} %",
        "; ".join(map(_tried, choice.get("tried", ()))),
        choice["reason"],
    ]


def _tried(one: Mapping[str, Any]) -> str:
    cost = "not evaluated" if one["cost"] is None else f"{100 * one['cost']:.2f} points"
    return f"{one['name']}: {cost}, {100 * one['share']:.0f} % of bytes"
