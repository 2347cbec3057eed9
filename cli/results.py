"""Runs' results as a table."""

from collections.abc import Mapping
from typing import Any, Literal

from rich.table import Table
from rich.text import Text


def results_table(title: str, results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Make a table of runs from their ``summary.json``, by run name, with their warnings."""
    from flwr_distill.server.page.words import stated  # here: its package imports much

    table = Table(title=title)
    for column in ("strategy", "accuracy", "rounds to 80 %", "server MB", "link MB", "seconds"):
        justify: Literal["left", "right"] = "left" if column == "strategy" else "right"
        table.add_column(column, justify=justify, overflow="fold")
    for name, result in results.items():
        table.add_row(
            name,
            stated(result),
            str(result["rounds"] or "not reached"),
            f"{result['server_bytes'] / 1e6:.2f}",
            f"{result['link_bytes'] / 1e6:.3f}",
            f"{result['seconds']:.0f}",
        )
    warnings = dict.fromkeys(text for r in results.values() for text in r.get("warnings", ()))
    if warnings:
        table.caption = Text("\n".join(warnings), style="yellow", justify="left")
    return table
