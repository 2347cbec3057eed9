"""What a run would fail on, or learn badly from, by the counts of nodes' data; with the remedy."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from statistics import median

from flwr_distill.base.text import listed
from flwr_distill.task.cells import (
    ABSENT,
    BRIGHTNESS,
    BRIGHTNESS_CELLS,
    CLASS,
    MISSING,
    MODE,
    OWN,
    SIZE,
    UNUSABLE,
    WRONG,
    Tables,
    column_table,
)

Nodes = Mapping[str, Tables]
MAX_LINES = 100
"""Warnings in all: nodes may name any columns and classes."""
FAR = 3
"""Tenths of brightness between nodes that need a reason."""
GREY = ("1", "L", "LA", "I;16", "I", "F")
_COLUMN = column_table("")


def data_warnings(nodes: Nodes, classes: Sequence[str]) -> list[str]:
    """What is wrong with nodes' data, a line each; `classes` are the run's, perhaps unknown."""
    lines = chain(
        _other_classes(nodes, classes),
        _columns(nodes),
        _unusable(nodes),
        _channels(nodes),
        _swapped_colours(nodes),
        _brightness(nodes),
        _sizes(nodes),
        _classes_of_nobody(nodes, classes),
    )
    return list(islice(lines, MAX_LINES))


def _other_classes(nodes: Nodes, classes: Sequence[str]) -> Iterator[str]:
    if not classes:
        return
    by_names = _names_by(
        nodes, lambda tables: tuple(c for c in tables.get(CLASS, {}) if c not in (*classes, *OWN))
    )
    for others, names in by_names.items():
        yield (
            f"{names}: other classes than the run's, {listed(others)} (rename them, or list all "
            "names in private.classes)"
        )


def _columns(nodes: Nodes) -> Iterator[str]:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node, tables in nodes.items():
        for table, cells in tables.items():
            if not (table.startswith(_COLUMN) or table == CLASS):
                continue
            name = table.removeprefix(_COLUMN) if table != CLASS else "of the classes"
            for problem in _problems(cells):
                found[name, problem].append(node)
    for (name, problem), at in found.items():
        yield f"{listed(at)}: column {name} {problem}"


def _problems(cells: Mapping[str, int]) -> Iterator[str]:
    if ABSENT in cells:
        yield "is not there (rename it, or have private.columns name others)"
    elif MISSING in cells and len(cells) == 1:
        yield "is empty (fill it, or leave it out of private.columns, on all nodes)"
    elif MISSING in cells:
        yield "has rows without a value (fill or drop them: a run refuses the table)"
    if WRONG in cells:
        yield (
            "has values that a run refuses (correct them, or state all categories: "
            "flwr-distill data check shows them to the owner)"
        )


def _unusable(nodes: Nodes) -> Iterator[str]:
    at = [name for name, tables in nodes.items() if UNUSABLE in tables.get(CLASS, {})]
    if at:
        yield (
            f"{listed(at)}: files or rows cannot be read (flwr-distill data check shows them to "
            "the owner)"
        )


def _channels(nodes: Nodes) -> Iterator[str]:
    """Nodes whose images are grey where most nodes' have colours, and the other way round."""
    kinds = {}
    for name, tables in nodes.items():
        if modes := _without_own(tables.get(MODE, {})):
            grey = sum(count for mode, count in modes.items() if mode in GREY)
            kinds[name] = "grey" if 2 * grey > sum(modes.values()) else "of colours"
    yield from _odd_ones(kinds, "images are {own}, and most nodes' {usual}", "store them alike")


def _swapped_colours(nodes: Nodes) -> Iterator[str]:
    """Nodes where red and blue differ as they do elsewhere, but the other way round."""
    leans: dict[str, float] = {}
    for name, tables in nodes.items():
        levels = [_level(tables.get(colour, {})) for colour in ("red", "blue")]
        if None not in levels:
            leans[name] = levels[0] - levels[1]  # type: ignore[operator]
    for name, lean in leans.items():
        others = [other for key, other in leans.items() if key != name]
        if others and abs(lean) >= 1 and lean * median(others) <= -abs(lean):
            yield (
                f"{name}: red and blue may have changed places, by brightness beside other nodes' "
                "(store images as RGB)"
            )


def _brightness(nodes: Nodes) -> Iterator[str]:
    levels = {name: _level(tables.get(BRIGHTNESS, {})) for name, tables in nodes.items()}
    known = {name: level for name, level in levels.items() if level is not None}
    if len(known) < 2:
        return
    for name, level in known.items():
        usual = median(other for key, other in known.items() if key != name)
        if abs(level - usual) >= FAR:
            word = "darker" if level < usual else "brighter"
            yield (
                f"{name}: images are much {word} than other nodes' (scale them by the same rule on "
                "all nodes)"
            )


def _sizes(nodes: Nodes) -> Iterator[str]:
    usual = {}
    for name, tables in nodes.items():
        if sizes := _without_own(tables.get(SIZE, {})):
            usual[name] = max(sizes, key=sizes.__getitem__)
    text = "images are {own}, and most nodes' {usual}"
    yield from _odd_ones(usual, text, "a run converts all to private.shape; crop them alike")


def _classes_of_nobody(nodes: Nodes, classes: Sequence[str]) -> Iterator[str]:
    there = {cell for tables in nodes.values() for cell in tables.get(CLASS, {})}
    if there and (missing := [name for name in classes if name not in there]):
        yield (
            f"No node shows samples of {listed(missing)}: there are none, or too few on each node "
            "to be shown (leave them out of private.classes, or find nodes that have them)"
        )


def _odd_ones(kinds: Mapping[str, str], text: str, remedy: str) -> Iterator[str]:
    """Lines on nodes that are not of the kind of more than half of all."""
    for usual, votes in Counter(kinds.values()).most_common(1):
        by_kind = defaultdict(list)
        for name, kind in kinds.items():
            by_kind[kind].append(name)
        for kind, names in by_kind.items():
            if kind != usual and 2 * votes > len(kinds):
                yield f"{listed(names)}: {text.format(own=kind, usual=usual)} ({remedy})"
            elif kind != usual:
                others = listed(by_kind[usual])
                own = text.format(own=kind, usual=usual).replace("most nodes'", f"{others}'s")
                yield f"{listed(names)}: {own} ({remedy})"


def _names_by(
    nodes: Nodes, key: Callable[[Tables], tuple[str, ...]]
) -> Mapping[tuple[str, ...], str]:
    names: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, tables in nodes.items():
        if found := key(tables):
            names[found].append(name)
    return {found: listed(own) for found, own in names.items()}


def _without_own(cells: Mapping[str, int]) -> dict[str, int]:
    return {cell: count for cell, count in cells.items() if cell not in OWN}


def _level(cells: Mapping[str, int]) -> int | None:
    """Place of the middle image's brightness, in tenths; None without images."""
    total, below = sum(_without_own(cells).values()), 0
    for place, cell in enumerate(BRIGHTNESS_CELLS):
        below += cells.get(cell, 0)
        if total and 2 * below >= total:
            return place
    return None
