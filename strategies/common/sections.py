"""What a report is made of: sections of text, tables and figures, whatever page shows them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from markupsafe import Markup


@dataclass(frozen=True)
class Figure:
    """A drawing with its title, its legend and a caption that says what one sees.

    Parameters
    ----------
    title, caption : str
        Above and below.
    drawing : Markup
        SVG or an image.
    legend : Sequence[tuple[str, str]] (default: ())
        Style and label of what is drawn.
    wide : bool (default: False)
        Whether it takes the page's width.
    """

    title: str
    caption: str
    drawing: Markup
    legend: Sequence[tuple[str, str]] = ()
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """A table.

    Parameters
    ----------
    columns : Sequence[str]
        Those of numbers begin with ``#``.
    rows : Sequence[Sequence[str]]
        Cells.
    bars : Sequence[float] (default: ())
        Share in [0, 1] for each row, drawn as a bar at its end.
    folded : str (default: "")
        Title behind which the table waits to be opened.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    bars: Sequence[float] = ()
    folded: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page: text, links, tables, figures, and last the tables that are folded.

    Links are a file, relative to the page, and a label each. A section that is an `alarm` stands
    above all others, in red.
    """

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    alarm: bool = False
    links: Sequence[tuple[str, str]] = ()


class RunFiles(Protocol):
    """A run as its files tell it, for panels of a report."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings, in nested tables."""

    @property
    def journal(self) -> list[dict[str, Any]]:
        """Entries of the run's journal: phases with the numbers of nodes, and warnings."""

    def artifact(self, file: str) -> bytes:
        """Content of a file that the strategy left; empty if there is none."""

    def name(self, node: str) -> str:
        """Name of a node, from its Flower id."""
