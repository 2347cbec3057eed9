"""What a report is made of: sections of text, tables and figures, whatever page shows them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from markupsafe import Markup


@dataclass(frozen=True)
class Figure:
    """A drawing with its title, its legend and a caption that says what one sees."""

    title: str
    caption: str
    drawing: Markup
    """SVG or an image."""
    legend: Sequence[tuple[str, str]] = ()
    """Style and label of what is drawn."""
    wide: bool = False
    """Whether it takes the page's width."""


@dataclass(frozen=True)
class Table:
    """A table."""

    columns: Sequence[str]
    """Those of numbers begin with ``#``."""
    rows: Sequence[Sequence[str]]
    bars: Sequence[float] = ()
    """Share in [0, 1] for each row, drawn as a bar at its end."""
    folded: str = ""
    """Title behind which the table waits to be opened."""


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
    """A run by its files, for panels of a report."""

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
