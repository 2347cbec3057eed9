"""Tables and heat map of the arena: printed, as a page, as Markdown, as a picture."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Picture
from rich.console import Console

from benchmarks.shown import printed, svg_of
from flwr_distill.server.page.layout import page
from flwr_distill.strategies.common.sections import Figure, Section, Table

GOAL = 0.8
"""Accuracy to which rounds are counted."""


@dataclass(frozen=True)
class Cell:
    """A strategy with a skew: means over the seeds.

    Parameters
    ----------
    strategy, skew : str
        What ran.
    accuracy : float or None
        At the end; None without a global model.
    after : dict[int, float]
        Accuracy by number of rounds.
    rounds_to_goal : int or None
        None where 80 % were not reached.
    server_bytes, link_bytes : float
        Both ways; between nodes.
    node_seconds : float
        Of a node, in all rounds.
    mean_node, worst_node : float
        Mean and lowest of the nodes' accuracies on what they hold out.
    seeds : int
        Number of runs.
    """

    strategy: str
    skew: str
    accuracy: float | None
    after: dict[int, float]
    rounds_to_goal: int | None
    server_bytes: float
    link_bytes: float
    node_seconds: float
    mean_node: float
    worst_node: float
    seeds: int

    def as_json(self) -> dict[str, Any]:
        """All of it, and the bytes of server and links together."""
        return {**asdict(self), "bytes": self.server_bytes + self.link_bytes}


MEASURES: tuple[tuple[str, Callable[[Cell], str]], ...] = (
    ("accuracy after 5 rounds (%)", lambda cell: _percent(cell.after.get(5))),
    ("accuracy after 10 rounds (%)", lambda cell: _percent(cell.after.get(10))),
    ("accuracy after 20 rounds (%)", lambda cell: _percent(cell.after.get(20))),
    ("rounds to 80 %", lambda cell: str(cell.rounds_to_goal or "-")),
    ("mean of the nodes' accuracies (%)", lambda cell: _percent(cell.mean_node)),
    ("worst node's accuracy (%)", lambda cell: _percent(cell.worst_node)),
    ("MB through the server", lambda cell: f"{cell.server_bytes / 1e6:.2f}"),
    ("MB between nodes", lambda cell: f"{cell.link_bytes / 1e6:.2f}"),
    ("seconds of a node", lambda cell: f"{cell.node_seconds:.1f}"),
    ("seeds", lambda cell: str(cell.seeds)),
)


def tables(cells: Sequence[Cell]) -> list[tuple[str, Table]]:
    """A table of strategies and skews for each measure that was taken."""
    made = []
    for title, text in MEASURES:
        rows = [
            [strategy, *(text(cell) if cell else "-" for cell in row)]
            for strategy, row in _grid(cells)
        ]
        if any(value != "-" for row in rows for value in row[1:]):
            made.append((title, Table(["strategy", *(f"#{skew}" for skew in _skews(cells))], rows)))
    return made


def print_tables(cells: Sequence[Cell]) -> None:
    """Print all tables."""
    for title, table in tables(cells):
        Console().print(printed(table, title))


def write_tables(cells: Sequence[Cell], folder: Path) -> None:
    """Write ``arena.html``, ``arena.md`` and ``arena.png``."""
    picture = heat_map(cells)
    picture.savefig(folder / "arena.png", dpi=120)
    figure = Figure(
        "Accuracy at the end",
        "Darker is better, from the worst to the best of a column; the best is in bold.",
        svg_of(picture),
        wide=True,
    )
    sections = [Section("Arena", figures=[figure])]
    sections += [Section(title, tables=[table]) for title, table in tables(cells)]
    html = page("Arena", "every strategy with every skew", sections)
    (folder / "arena.html").write_text(html, encoding="utf-8")
    (folder / "arena.md").write_text("\n".join(map(_markdown, tables(cells))), encoding="utf-8")


def heat_map(cells: Sequence[Cell]) -> Picture:
    """Accuracy at the end of every strategy with every skew, shaded within each column."""
    rows, skews = _grid(cells), _skews(cells)
    picture = Picture(figsize=(2 + 0.75 * len(skews), 1.2 + 0.3 * len(rows)), layout="constrained")
    axes = picture.subplots()
    axes.set_xticks(range(len(skews)), skews, rotation=40, ha="right")
    axes.set_yticks(range(len(rows)), [strategy for strategy, _ in rows])
    axes.tick_params(length=0)
    shades = [[0.0] * len(skews) for _ in rows]
    for column in range(len(skews)):
        held = {place: row[column] for place, (_, row) in enumerate(rows)}
        values = {
            place: cell.accuracy
            for place, cell in held.items()
            if cell is not None and cell.accuracy is not None
        }
        lowest, highest = min(values.values(), default=0.0), max(values.values(), default=0.0)
        for place, value in values.items():
            shade = (value - lowest) / (highest - lowest) if highest > lowest else 1.0
            shades[place][column] = shade
            axes.text(
                column,
                place,
                _percent(value),
                ha="center",
                va="center",
                fontsize="small",
                color="white" if shade > 0.6 else "black",
                weight="bold" if value == highest else "normal",
            )
    axes.imshow(shades, cmap="Blues", vmin=0, vmax=1.25, aspect="auto")
    return picture


def _grid(cells: Sequence[Cell]) -> list[tuple[str, list[Cell | None]]]:
    places = {(cell.strategy, cell.skew): cell for cell in cells}
    strategies = dict.fromkeys(cell.strategy for cell in cells)
    return [(name, [places.get((name, skew)) for skew in _skews(cells)]) for name in strategies]


def _skews(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.skew for cell in cells))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _markdown(titled: tuple[str, Table]) -> str:
    title, table = titled
    heads = [column.lstrip("#") for column in table.columns]
    rules = ["---:" if column.startswith("#") else "---" for column in table.columns]
    lines = [heads, rules, *table.rows]
    return f"## {title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)
