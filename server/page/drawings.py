"""Drawings: curves, clusters, who led when, and samples by node, as SVG; one as PNG."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flwr_distill.server.page.run_files import short

COLOURS = 10

WIDTH, HEIGHT = 380, 236  # of a chart
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 22, 30  # margins
MAX_DOTS = 40
LARGEST = 1e300
"""Of a chart's values, by amount: a node may report any, and axes must not overflow."""

NODE = 13  # radius of a node, and height of its row
CLASS_ROW = 18
LABEL = 46  # width of the row names
MAX_LABEL = 6
MAX_NAMED = 60
"""With more nodes in a picture, names would overlap; more rounds do not widen it."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A curve: its points by increasing x, at least one.

    ``style`` is a CSS class of the page: ``main``, ``s0`` to ``s9``, or ``faint``.
    """

    label: str
    points: Sequence[Point]
    style: str = "main"


def colour(index: int | None) -> str:
    """CSS class for the index-th colour; grey for None."""
    return "s-none" if index is None else f"s{index % COLOURS}"


def colour_beside_main(index: int) -> str:
    """CSS class for the index-th of the colours that differ from ``main``."""
    return colour(1 + index % (COLOURS - 1))


def finite(points: Iterable[Point]) -> list[Point]:
    """Drop points that cannot be drawn, such as the loss of a model that diverged."""
    return [(x, y) for x, y in points if math.isfinite(y)]


def line_chart(
    series: Sequence[Series], x_label: str, y_label: str, y_max: float | None = None
) -> Markup:
    """Draw curves over each other, later ones on top; the y axis starts at 0, or below."""
    xs = [x for curve in series for x, _ in curve.points]
    ys = [_bounded(y) for curve in series for _, y in curve.points]
    x_ticks = _ticks(max(xs), whole=all(float(x).is_integer() for x in xs))
    y_ticks = _ticks(y_max or max(0.0, *ys), min(0.0, *ys))
    x_end, y_start, y_end = max(xs) or 1, y_ticks[0], y_max or y_ticks[-1]
    y_unit = (HEIGHT - TOP - BOTTOM) / (y_end - y_start)

    def place(x: float, y: float) -> Point:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / x_end
        return round(across, 1), round(HEIGHT - BOTTOM - y_unit * (_bounded(y) - y_start), 1)

    parts = [
        _text(4, 12, y_label, "axis", "start"),
        _text(WIDTH - RIGHT, HEIGHT - 4, x_label, "axis"),
    ]
    for tick in y_ticks:
        y = place(0, tick)[1]
        parts += [_line(LEFT, y, WIDTH - RIGHT, y), _text(LEFT - 6, y + 3.5, f"{tick:g}")]
    for tick in x_ticks:
        if tick <= x_end:
            x = place(tick, 0)[0]
            parts.append(_text(x, HEIGHT - BOTTOM + 14, f"{tick:g}", anchor="middle"))
    parts += [_curve(curve, [place(x, y) for x, y in curve.points], x_label) for curve in series]
    return _svg(WIDTH, HEIGHT, parts)


def cluster_star(head: str | None, members: Sequence[str], colour_of: Mapping[str, int]) -> Markup:
    """Draw a cluster: members in a circle, linked to the head in the middle if there is one."""
    radius = _radius(len(members), head is not None)
    middle = radius + NODE + 3
    parts, nodes = [], []
    for index, member in enumerate(members):
        angle = 2 * math.pi * index / len(members) - math.pi / 2
        x = round(middle + radius * math.cos(angle), 1)
        y = round(middle + radius * math.sin(angle), 1)
        if head is not None:
            parts.append(_line(x, y, middle, middle, "link"))
        nodes.append(_node(member, x, y, colour(colour_of.get(member)), "member"))
    if head is None:
        parts.append(_element("circle", cx=middle, cy=middle, r=middle, class_="cluster"))
    else:
        nodes.append(_node(head, middle, middle, colour(colour_of.get(head)), "head"))
    return _svg(2 * middle, 2 * middle, [*parts, *nodes], fixed=True)


def leader_grid(topology: Mapping[str, Any]) -> Markup:
    """Draw who led when: a row for each node that ever led, a column for each round.

    `topology` is the content of ``topology.json``. Nodes that have left come last, in grey.
    """
    rounds = topology["heads"]
    leaders = {head for heads in rounds.values() for head in heads}
    rows = {node: index for node, index in cluster_by_node(topology).items() if node in leaders}
    cell = _cell(len(rounds))

    def bar(x: float, y: float, width: float, style: str, content: str = "") -> Markup:
        box = {"x": x, "y": y, "width": width, "height": NODE - 1, "class": style}
        return _element("rect", content, **box)

    parts = []
    for row, (node, cluster) in enumerate(rows.items()):
        style, y = colour(cluster), row * NODE
        parts.append(_text(LABEL - 5, y + 9.5, _label(node)))
        parts.append(bar(LABEL, y, cell * len(rounds), f"{style} faded"))
        for column, (number, heads) in enumerate(rounds.items()):
            if node in heads:
                x = round(LABEL + column * cell + 0.5, 1)
                title = _element("title", f"{node} led in round {number}")
                parts.append(bar(x, y, cell - 1, style, title))
    return _table_drawing(parts, list(rounds), cell, len(rows) * NODE, "round")


def dot_plot(
    counts: Mapping[str, Sequence[int]], class_name: Callable[[int], str], what: str = "class"
) -> Markup:
    """Draw samples by node (columns) and class (rows); a dot's area is the number of samples.

    Class names are cut to fit; those at the dots are whole. Rows may be of something else, `what`.
    """
    largest = max(max(of_node) for of_node in counts.values()) or 1
    num_classes = len(next(iter(counts.values())))
    cell = _cell(len(counts))
    ys = [label * CLASS_ROW + CLASS_ROW / 2 for label in range(num_classes)]
    parts = []
    for label, y in enumerate(ys):
        parts.append(_text(LABEL - 5, y + 3.5, _label(class_name(label))))
        parts.append(_line(LABEL, y, LABEL + cell * len(counts), y))
    for column, (node, of_node) in enumerate(counts.items()):
        x = round(LABEL + (column + 0.5) * cell, 1)
        for label, count in enumerate(of_node):
            if count:
                radius = max(1.0, min(cell, CLASS_ROW) * 0.48 * math.sqrt(count / largest))
                title = _element("title", f"{node}: {count} of {what} {class_name(label)}")
                circle = {"cx": x, "cy": ys[label], "r": round(radius, 1), "class": "dot"}
                parts.append(_element("circle", title, **circle))
    return _table_drawing(parts, list(counts), cell, num_classes * CLASS_ROW, "node")


def confusion_map(matrix: Sequence[Sequence[int]], class_name: Callable[[int], str]) -> Markup:
    """Draw a confusion matrix: a row for each true class, a column for each predicted one.

    A cell is the darker, the larger its share of its row; it shows its count where there is room.
    """
    names = [class_name(label) for label in range(len(matrix))]
    cell = _cell(len(matrix))
    parts = []
    for true, counts in enumerate(matrix):
        y, total = round(true * cell, 1), sum(counts)
        parts.append(_text(LABEL - 5, round(y + cell / 2 + 3.5, 1), _label(names[true])))
        for predicted, count in enumerate(counts):
            x = round(LABEL + predicted * cell, 1)
            share = count / total if total else 0.0
            text = f"{count} of {total} of class {names[true]}, predicted as {names[predicted]}"
            place = {"x": x, "y": y, "width": cell - 1, "height": cell - 1, "class": "main"}
            opacity = {"fill-opacity": round(0.04 + 0.76 * share, 2)}
            parts.append(_element("rect", _element("title", text), **place, **opacity))
            if count and cell > NODE + NODE:
                middle = round(x + cell / 2, 1), round(y + cell / 2 + 3.5, 1)
                parts.append(_text(*middle, str(count), "count", "middle"))
    return _table_drawing(parts, names, cell, round(cell * len(matrix), 1), "predicted")


def topology_picture(topology: Mapping[str, Any]) -> Figure:
    """Draw the heads of each round, from ``topology.json``; those that have left last, in grey."""
    rounds, clusters = topology["heads"], cluster_by_node(topology)
    nodes = list(clusters)
    width, height = 2.5 + 0.3 * min(len(rounds), MAX_NAMED), 1 + 0.28 * len(nodes)
    figure = Figure(figsize=(max(width, 5), min(height, 30)), layout="constrained")
    axes = figure.subplots()
    for index, (node, cluster) in enumerate(clusters.items()):
        style = "grey" if cluster is None else f"C{cluster % COLOURS}"
        axes.barh(index, len(rounds), left=0.5, height=0.9, color=style, alpha=0.15)
        led = [(int(number) - 0.45, 0.9) for number, heads in rounds.items() if node in heads]
        axes.broken_barh(led, (index - 0.45, 0.9), color=style)
        if index and cluster != clusters[nodes[index - 1]]:
            axes.axhline(index - 0.5, color="black", linewidth=0.8)
    axes.set(xlabel="round", ylabel="node, by cluster", xlim=(0.5, len(rounds) + 0.5))
    axes.set_ylim(len(nodes) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(nodes) <= MAX_NAMED:
        axes.set_yticks(range(len(nodes)), nodes, parse_math=False)  # a name may contain $
    axes.set_title("filled: head or leader of its cluster in that round", fontsize="medium")
    return figure


def cluster_by_node(topology: Mapping[str, Any]) -> dict[str, int | None]:
    """Index of each node's cluster, in the order of clusters; last, heads that left, with None."""
    clusters = {
        node: index
        for index, cluster in enumerate(topology["clusters"])
        for node in sorted(cluster_nodes(cluster), key=_by_number)
    }
    leaders = {head for heads in topology["heads"].values() for head in heads}
    gone = sorted(leaders - clusters.keys(), key=_by_number)
    return clusters | dict.fromkeys(gone)


def cluster_nodes(cluster: Mapping[str, Any]) -> list[str]:
    """Names of a cluster's nodes, the head first if there is one."""
    head = cluster.get("head")
    return [*([] if head is None else [head]), *cluster["members"]]


def _by_number(name: str) -> tuple[int, str]:
    """Sort key that puts node 2 before node 10."""
    return len(name), name


def _element(tag: str, *content: str, **attributes: object) -> Markup:
    """``<tag a="b">content</tag>``, escaped; ``class_`` is the attribute ``class``."""
    pairs = Markup().join(
        Markup(' {}="{}"').format(name.rstrip("_"), value) for name, value in attributes.items()
    )
    if not content:
        return Markup("<{}{}/>").format(tag, pairs)
    return Markup("<{0}{1}>{2}</{0}>").format(tag, pairs, Markup().join(content))


def _svg(width: float, height: float, parts: Sequence[Markup], fixed: bool = False) -> Markup:
    """Wrap elements in a drawing; `fixed` keeps its width, else it scales with the page."""
    size = {"width": width} if fixed else {}
    return _element("svg", *parts, viewBox=f"0 0 {width} {height}", **size, role="img")


def _text(x: float, y: float, content: str, style: str = "tick", anchor: str = "end") -> Markup:
    """Text that ends at x; `anchor` ``start`` or ``middle`` lets it begin or centre there."""
    return _element("text", content, x=x, y=y, class_=style, **{"text-anchor": anchor})


def _line(x1: float, y1: float, x2: float, y2: float, style: str = "grid") -> Markup:
    return _element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=style)


def _curve(curve: Series, places: Sequence[Point], x_label: str) -> Markup:
    dots = []
    if curve.style != "faint" and len(places) <= MAX_DOTS:
        for (x, y), (at, value) in zip(places, curve.points, strict=True):
            title = _element("title", f"{curve.label}, {x_label} {at:g}: {value:.4g}")
            dots.append(_element("circle", title, cx=x, cy=y, r="2.6"))
    title = _element("title", f"{curve.label}: {curve.points[-1][1]:.4g} at the end")
    path = _element("polyline", points=" ".join(f"{x},{y}" for x, y in places))
    return _element("g", title, path, *dots, class_=f"curve {curve.style}")


def _bounded(y: float) -> float:
    return min(max(y, -LARGEST), LARGEST)


def _ticks(end: float, start: float = 0.0, whole: bool = False) -> list[float]:
    """Round numbers from `start`, which is 0 or just below, to `end` or just beyond."""
    locator = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], integer=whole)
    ticks = locator.tick_values(start, end or 1 if start == 0 else end)
    return [float(tick) for tick in ticks if tick >= 0 or start < 0]


def _radius(num_members: int, led: bool) -> float:
    """Radius of the members' circle, so that no two nodes overlap."""
    apart = 1.15 * NODE / math.sin(math.pi / num_members) if num_members > 1 else 0.0
    return round(max(apart, 2.6 * NODE if led and num_members else 0.0), 1)


def _node(name: str, x: float, y: float, colour_class: str, role: str) -> Markup:
    title = _element("title", f"{name}, {role}")
    circle = _element("circle", cx=x, cy=y, r=NODE)
    label = _element("text", _label(name), x=x, y=y + 3.5)
    return _element("g", title, circle, label, class_=f"node {colour_class} {role}")


def _label(name: str) -> str:
    """A node's name or a round, to fit into a drawing: ``node-12`` -> ``12``."""
    name = short(name).removeprefix("node-").removeprefix("node ")
    return name if len(name) <= MAX_LABEL else f"{name[: MAX_LABEL - 1]}…"


def _cell(columns: int) -> float:
    """Column width: few columns fill the page, many make the drawing wide."""
    return round(min(28.0, max(9.0, 330 / columns)), 1)


def _table_drawing(
    parts: Sequence[Markup], columns: Sequence[str], cell: float, height: float, what: str
) -> Markup:
    """Add column names below, as many as fit, and wrap all in an SVG."""
    every = math.ceil(30 / cell)
    names = [
        _text(round(LABEL + (index + 0.5) * cell, 1), height + 13, _label(name), anchor="middle")
        for index, name in enumerate(columns)
        if index % every == 0
    ]
    axis = _text(LABEL - 5, height + 13, what, "axis")
    width = round(LABEL + cell * len(columns) + 4, 1)
    return _svg(width, height + 18, [*parts, *names, axis], fixed=True)
