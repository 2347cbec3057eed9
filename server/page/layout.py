"""What a page is made of, and the page from it."""

from collections.abc import Sequence

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from server.page.curves import Series, line_chart
from server.page.template import PAGE, STYLE
from strategies.common.sections import Figure, Section


def page(
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    numbers: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the HTML of a page; whatever is not `Markup` is escaped.

    Parameters
    ----------
    title, subtitle : str
        Its head.
    sections : Sequence[Section]
        From top to bottom.
    numbers : Sequence[tuple[str, str]] (default: ())
        Name and value of what stands first.
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
    """Return curves with a legend of those that are not faint."""
    legend = [(curve.style, curve.label) for curve in series if curve.style != "faint"]
    drawing = line_chart(series, x_label, y_label, y_max)
    return Figure(title, caption, drawing, legend if len(series) > 1 else ())


def scrolling(drawing: Markup) -> Markup:
    """Let a wide drawing scroll by itself, where the page is narrow."""
    return Markup('<div class="scroll">{}</div>').format(drawing)
