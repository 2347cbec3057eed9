"""Tables and drawings of a benchmark, for a terminal and a page."""

import io

from markupsafe import Markup
from matplotlib.figure import Figure
from rich.table import Table as Printed

from flwr_distill.strategies.common.sections import Table


def printed(table: Table, title: str | None = None) -> Printed:
    """A table of a page, for the terminal."""
    shown = Printed(*(column.lstrip("#") for column in table.columns), title=title)
    for row in table.rows:
        shown.add_row(*row)
    return shown


def svg_of(picture: Figure) -> Markup:
    """A picture, as part of a page of HTML."""
    drawing = io.StringIO()
    picture.savefig(drawing, format="svg")
    svg = drawing.getvalue()
    return Markup(svg[svg.index("<svg") :])
