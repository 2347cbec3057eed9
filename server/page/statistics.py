"""What nodes hold by their own counts, and what a run would fail on (``flwr-distill stats``)."""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr_distill.base.text import counted, listed
from flwr_distill.server.page.drawings import dot_plot
from flwr_distill.server.page.layout import SCROLLING
from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.strategies.common.sections import Figure, Section, Table
from flwr_distill.task.cells import BRIGHTNESS_CELLS, CLASS, NUMBERS, OWN
from flwr_distill.task.labels import in_order

MAX_TABLES = 30
MAX_NODES = 100
MAX_CELLS = 60
"""Tables, and nodes and cells in each drawing; the file has all."""
LEGEND = (
    "A node counts its data itself. Its policy rounds each count down to a multiple of a floor, "
    "so that what is not shown may be none or a few, and may add noise. statistics.json has all "
    "numbers."
)
_ORDER = (*BRIGHTNESS_CELLS, *NUMBERS)


def faults_of_data(run: RunFiles) -> Section | None:
    """What would fail, above all else; None if the run asked for no statistics."""
    if not run.statistics:
        return None
    warnings = run.statistics["warnings"]
    if not warnings:
        return Section("What would fail", ["Nothing, by what nodes counted."])
    return Section("What would fail", list(warnings), alarm=True)


def held_by_nodes(run: RunFiles) -> Section | None:
    """Table of the nodes, and a drawing of each table of counts."""
    if not run.statistics:
        return None
    nodes = run.statistics["nodes"]
    rows = [
        [own["name"], f"{_samples(own):,}", _in_words(own), str(own["floor"]), _noise(own)]
        for own in nodes
    ]
    table = Table(["node", "#samples", "classes", "#floor", "noise"], rows)
    drawn = [own for own in nodes if own["tables"]][:MAX_NODES]
    names = list(dict.fromkeys(name for own in drawn for name in own["tables"]))[:MAX_TABLES]
    names.sort(key=lambda name: name != CLASS)
    classes = run.statistics["classes"]
    figures = [_figure(name, drawn, classes) for name in names]
    return Section("What nodes hold", [LEGEND], [table], figures)


def _figure(name: str, nodes: Sequence[Mapping[str, Any]], classes: Sequence[str]) -> Figure:
    there = {cell for own in nodes for cell in own["tables"].get(name, {})}
    known = (*classes, *_ORDER) if name == CLASS else _ORDER
    cells = [cell for cell in dict.fromkeys(known) if cell in there]
    cells += in_order(there - {*cells, *OWN})
    cells += [cell for cell in OWN if cell in there]
    left = len(cells) - MAX_CELLS
    counts = {
        own["name"]: [own["tables"].get(name, {}).get(cell, 0) for cell in cells[:MAX_CELLS]]
        for own in nodes
    }
    # Names in drawings are short: ranges are named by where they begin.
    drawing = dot_plot(counts, lambda place: cells[place].partition(" to ")[0], what=name)
    largest = max(max(of_node) for of_node in counts.values())
    caption = f"A column for each node; the largest dot is {counted(largest, 'sample')}."
    if any(cell in _ORDER for cell in cells):
        caption += " Rows are named by where their range begins."
    if left > 0:
        caption += f" {left} more rows are not drawn."
    return Figure(name, caption, SCROLLING.format(drawing), wide=len(nodes) > len(BRIGHTNESS_CELLS))


def _samples(own: Mapping[str, Any]) -> int:
    return max((sum(cells.values()) for cells in own["tables"].values()), default=0)


def _in_words(own: Mapping[str, Any]) -> str:
    if own["problem"]:
        return f"none: {own['problem']}"
    cells = own["tables"].get(CLASS, {})
    return listed([f"{name} {count:,}" for name, count in cells.items()]) if cells else "not shown"


def _noise(own: Mapping[str, Any]) -> str:
    return f"epsilon {own['epsilon']:g}" if own["epsilon"] else "none"
