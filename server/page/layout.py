"""Builds the HTML page from sections."""

from collections.abc import Sequence

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from flwr_distill.server.page.curves import Series, line_chart
from flwr_distill.server.page.template import PAGE, STYLE
from flwr_distill.strategies.common.sections import Figure, Section


def page(
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    numbers: Sequence[tuple[str, str]] = (),
) -> str:
    """Render a page; everything except `Markup` is escaped.

    `numbers` are pairs of name and value, shown first.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(PAGE).render(
        title=title,
        subtitle=subtitle,
        sections=sections,
        numbers=numbers,
        style=Markup(STYLE),
    )


def chart(
    title: str,
    caption: str,
    series: Sequence[Series],
    y_label: str,
    *,
    x_label: str = "round",
    y_max: float | None = None,
) -> Figure:
    """Line chart with a legend; faint curves are left out of it."""
    legend = [(curve.style, curve.label) for curve in series if curve.style != "faint"]
    drawing = line_chart(series, x_label, y_label, y_max)
    return Figure(title, caption, drawing, legend if len(series) > 1 else ())


def scrolling(drawing: Markup) -> Markup:
    """Let a wide drawing scroll on narrow pages."""
    return Markup('<div class="scroll">{}</div>').format(drawing)
