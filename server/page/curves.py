"""Line charts as inline SVG."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from flwr_distill.server.page.svg import line, svg, text

WIDTH, HEIGHT = 380, 236
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 22, 30  # margins
MOST_DOTS = 40

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A curve: its points by increasing x, at least one.

    ``style`` is a CSS class of the page: ``main``, ``s0`` to ``s9``, or ``faint``.
    """

    label: str
    points: Sequence[Point]
    style: str = "main"


def finite(points: Iterable[Point]) -> list[Point]:
    """Drop points that cannot be drawn, such as the loss of a model that diverged."""
    return [(x, y) for x, y in points if math.isfinite(y)]


def line_chart(
    series: Sequence[Series], x_label: str, y_label: str, y_max: float | None = None
) -> Markup:
    """Draw curves over each other, later ones on top; the y axis starts at 0."""
    xs = [x for curve in series for x, _ in curve.points]
    ys = [y for curve in series for _, y in curve.points]
    x_ticks = _ticks(max(xs), whole=all(float(x).is_integer() for x in xs))
    y_ticks = _ticks(y_max or max(ys))
    x_end, y_end = max(xs) or 1, y_max or y_ticks[-1]

    def place(x: float, y: float) -> Point:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / x_end
        return round(across, 1), round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / y_end, 1)

    parts = [
        text(4, 12, y_label, "axis", "start"),
        text(WIDTH - RIGHT, HEIGHT - 4, x_label, "axis"),
    ]
    for tick in y_ticks:
        y = place(0, tick)[1]
        parts += [line(LEFT, y, WIDTH - RIGHT, y), text(LEFT - 6, y + 3.5, f"{tick:g}")]
    for tick in x_ticks:
        if tick <= x_end:
            x = place(tick, 0)[0]
            parts.append(text(x, HEIGHT - BOTTOM + 14, f"{tick:g}", anchor="middle"))
    parts += [_curve(curve, [place(x, y) for x, y in curve.points], x_label) for curve in series]
    return svg(WIDTH, HEIGHT, parts)


def _curve(curve: Series, places: Sequence[Point], x_label: str) -> Markup:
    dots = []
    if curve.style != "faint" and len(places) <= MOST_DOTS:
        dots = [
            Markup('<circle cx="{}" cy="{}" r="2.6"><title>{}</title></circle>').format(
                x, y, f"{curve.label}, {x_label} {at:g}: {value:.4g}"
            )
            for (x, y), (at, value) in zip(places, curve.points, strict=True)
        ]
    return Markup('<g class="curve {}"><title>{}</title><polyline points="{}"/>{}</g>').format(
        curve.style,
        f"{curve.label}: {curve.points[-1][1]:.4g} at the end",
        " ".join(f"{x},{y}" for x, y in places),
        Markup().join(dots),
    )


def _ticks(end: float, whole: bool = False) -> list[float]:
    """Round numbers from 0 to `end` or just beyond."""
    locator = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], integer=whole)
    return [float(tick) for tick in locator.tick_values(0, end or 1) if tick >= 0]
