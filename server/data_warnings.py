"""What a run would fail on, or learn badly from, by the counts of nodes' data; with the remedy."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice

from flwr_distill.base.text import listed
from flwr_distill.task.cells import (
    ABSENT,
    BRIGHTNESS,
    BRIGHTNESS_CELLS,
    CLASS,
    MISSING,
    MODE,
    NUMBERS,
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
FAR_OFF = 18
"""Ranges of numbers between nodes, nine to a power of ten, that another unit explains."""
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
        _units(nodes),
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
    leans: dict[str, int] = {}
    for name, tables in nodes.items():
        levels = [_level(tables.get(colour, {}), BRIGHTNESS_CELLS) for colour in ("red", "blue")]
        if None not in levels:
            leans[name] = levels[0] - levels[1]  # type: ignore[operator]
    for name, usual in _of_others(leans).items():
        lean = leans[name]
        if abs(lean) >= 1 and lean * usual <= -abs(lean):
            yield (
                f"{name}: red and blue may have changed places, by brightness beside other nodes' "
                "(store images as RGB)"
            )


def _units(nodes: Nodes) -> Iterator[str]:
    """Nodes whose middle value of a column is of another order of magnitude than the others'."""
    places: dict[str, dict[str, int]] = defaultdict(dict)
    for node, tables in nodes.items():
        for table, cells in tables.items():
            if table.startswith(_COLUMN) and (place := _level(cells, NUMBERS)) is not None:
                places[table.removeprefix(_COLUMN)][node] = place
    for name, by_node in places.items():
        for node, usual in _of_others(by_node).items():
            if abs(by_node[node] - usual) >= FAR_OFF:
                yield (
                    f"{node}: column {name} may be in another unit than other nodes' (use the same "
                    "on all nodes)"
                )


def _brightness(nodes: Nodes) -> Iterator[str]:
    levels = {
        name: _level(tables.get(BRIGHTNESS, {}), BRIGHTNESS_CELLS) for name, tables in nodes.items()
    }
    known = {name: level for name, level in levels.items() if level is not None}
    for name, usual in _of_others(known).items():
        if abs(known[name] - usual) >= FAR:
            word = "darker" if known[name] < usual else "brighter"
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


def _of_others(values: Mapping[str, int]) -> dict[str, float]:
    """Median of all other nodes' values for each node, if there are others."""
    order = sorted(values, key=values.__getitem__)
    left = len(order) - 1
    medians = {}
    for place, name in enumerate(order if left else ()):
        middle = ((left - 1) // 2, left // 2)
        pair = [values[order[at if at < place else at + 1]] for at in middle]
        medians[name] = sum(pair) / 2
    return medians


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


def _level(cells: Mapping[str, int], ranges: Sequence[str]) -> int | None:
    """Place of the middle sample among ranges; None if it is in none."""
    total, below = sum(cells.get(cell, 0) for cell in ranges), 0
    for place, cell in enumerate(ranges):
        below += cells.get(cell, 0)
        if total and 2 * below >= total:
            return place
    return None
