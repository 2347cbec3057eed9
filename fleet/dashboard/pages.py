"""Renders snapshots as parts of HTML pages; everything that is not ours is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from flwr_distill.base.text import listed
from flwr_distill.fleet.dashboard.alarms import alarms
from flwr_distill.fleet.dashboard.runs import Run
from flwr_distill.fleet.dashboard.watch import Snapshot
from flwr_distill.server.page.drawings import Series, line_chart
from flwr_distill.server.page.words import data_size, percent

FOLDER = Path(__file__).parent
PARTS = ("alarms", "live", "queue", "nodes", "runs", "health")
"""Parts of the first page, in their order."""
MAX_POINTS = 200
"""Points of a curve; longer ones are thinned."""
MAX_RUNS = 30
MAX_ROWS = 200
"""Nodes that a page lists; more are counted."""


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(FOLDER / "pages")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {
        "clock": clock,
        "curve": curve,
        "duration": duration,
        "listed": listed,
        "percent": percent,
        "size": data_size,
        "short": short,
    }
    return environment


def render(name: str, **content: Any) -> Markup:
    """Render a template of the folder ``pages``."""
    return Markup(_environment().get_template(f"{name}.html").render(content))


def parts(snapshot: Snapshot) -> dict[str, str]:
    """Parts of the first page by name."""
    content = {"snapshot": snapshot, "alarms": alarms(snapshot), "zone": zone()}
    return {name: render(name, **content, most=MAX_ROWS, most_runs=MAX_RUNS) for name in PARTS}


def run_parts(run: Run, log: tuple[Sequence[Any], str], token: str) -> dict[str, str]:
    """Parts of a run's page; `token` is for the forms of its actions."""
    lines, problem = log
    return {
        "run": render("run", run=run),
        "actions": render("actions", run=run, token=token),
        "problems": render("problems", run=run),
        "log": render("log", lines=lines, problem=problem),
    }


def short(run_id: str) -> str:
    """The first digits of a run's id."""
    return run_id[:6]


def curve(run: Run) -> Markup:
    """Drawing of a run's accuracy so far; empty without any."""
    curves: list[tuple[str, str, Sequence[tuple[float, float]]]] = [
        ("on nodes", "s1", run.node_curve),
        ("accuracy", "main", run.server_curve),
    ]
    series = [
        Series(label, [(x, 100 * y) for x, y in _thinned(points)], style)
        for label, style, points in curves
        if points
    ]
    return line_chart(series, "round", "accuracy, %", 100) if series else Markup()


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    step = max(1, -(-len(points) // MAX_POINTS))
    return [*points[:-1:step], points[-1]]


def duration(seconds: float | None) -> str:
    """``42 s``, ``3 min``, ``2.5 h`` or ``4 days``; ``-`` if unknown."""
    if seconds is None:
        return "-"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 129_600 else f"{seconds / 86_400:.0f} days"


def clock(moment: float) -> str:
    """A time on this machine's clock, with its day unless that is today; empty if it is unknown."""
    if not moment:
        return ""
    then = datetime.fromtimestamp(moment)
    is_today = then.date() == datetime.now().date()
    return then.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M")


def zone() -> str:
    """Time zone of this machine's clock, as in ``UTC+05:30``: a browser may be in another."""
    return f"UTC{datetime.now().astimezone().isoformat()[-6:]}"


def whole_page(title: str, name: str, contents: Mapping[str, str], **rest: Any) -> str:
    """A page of parts, each in a section that the browser replaces when it changes."""
    return str(
        render(
            "layout", title=title, page=render(name, title=title, contents=contents, **rest), **rest
        )
    )
