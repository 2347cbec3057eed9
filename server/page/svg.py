"""SVG elements, and the page's colours for them."""

from collections.abc import Sequence

from markupsafe import Markup

COLOURS = 10


def colour(index: int | None) -> str:
    """CSS class for the index-th colour; grey for None."""
    return "s-none" if index is None else f"s{index % COLOURS}"


def colour_beside_main(index: int) -> str:
    """CSS class for the index-th colour, none of them like that of ``main``."""
    return colour(1 + index % (COLOURS - 1))


def svg(width: float, height: float, parts: Sequence[Markup], fixed: bool = False) -> Markup:
    """Wrap elements in a drawing; `fixed` keeps its width, else it scales with the page."""
    size = Markup(' width="{}"').format(width) if fixed else ""
    return Markup('<svg viewBox="0 0 {} {}"{} role="img">{}</svg>').format(
        width, height, size, Markup().join(parts)
    )


def text(x: float, y: float, content: object, style: str = "tick", anchor: str = "end") -> Markup:
    """Text that ends at x; `anchor` ``start`` or ``middle`` lets it begin or centre there."""
    return Markup('<text x="{}" y="{}" class="{}" text-anchor="{}">{}</text>').format(
        x, y, style, anchor, content
    )


def line(x1: float, y1: float, x2: float, y2: float, style: str = "grid") -> Markup:
    """Draw a straight line."""
    return Markup('<line x1="{}" y1="{}" x2="{}" y2="{}" class="{}"/>').format(
        x1, y1, x2, y2, style
    )
