"""Drawings as inline SVG: clusters, who led when, how classes are spread over nodes."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from flwr_distill.server.page.run_files import short
from flwr_distill.server.page.svg import colour, line, svg, text

NODE = 13  # radius of a node, and height of its row
LABEL = 46  # width of the row names
LONGEST_LABEL = 6


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
            parts.append(line(x, y, middle, middle, "link"))
        nodes.append(_node(member, x, y, colour(colour_of.get(member)), "member"))
    if head is None:
        parts.append(Markup('<circle cx="{0}" cy="{0}" r="{0}" class="cluster"/>').format(middle))
    else:
        nodes.append(_node(head, middle, middle, colour(colour_of.get(head)), "head"))
    return svg(2 * middle, 2 * middle, [*parts, *nodes], fixed=True)


def _radius(num_members: int, led: bool) -> float:
    """Radius of the members' circle, so that no two nodes overlap."""
    apart = 1.15 * NODE / math.sin(math.pi / num_members) if num_members > 1 else 0.0
    return round(max(apart, 2.6 * NODE if led and num_members else 0.0), 1)


def _node(name: str, x: float, y: float, colour_class: str, role: str) -> Markup:
    return Markup(
        '<g class="node {} {}"><title>{}, {}</title><circle cx="{}" cy="{}" r="{}"/>'
        '<text x="{}" y="{}">{}</text></g>'
    ).format(colour_class, role, name, role, x, y, NODE, x, y + 3.5, _label(name))


def leader_grid(topology: Mapping[str, Any]) -> Markup:
    """Draw who led when: a row for each node that ever led, a column for each round.

    `topology` is the content of ``topology.json``. Nodes that have left come last, in grey.
    """
    rounds = topology["heads"]
    leaders = {head for heads in rounds.values() for head in heads}
    rows = {node: index for node, index in cluster_by_node(topology).items() if node in leaders}
    cell = _cell(len(rounds))
    bar = Markup('<rect x="{}" y="{}" width="{}" height="{}" class="{}">{}</rect>')
    parts = []
    for row, (node, cluster) in enumerate(rows.items()):
        style, y = colour(cluster), row * NODE
        parts.append(text(LABEL - 5, y + 9.5, _label(node)))
        parts.append(bar.format(LABEL, y, cell * len(rounds), NODE - 1, f"{style} faded", ""))
        for column, (number, heads) in enumerate(rounds.items()):
            if node in heads:
                x = round(LABEL + column * cell + 0.5, 1)
                title = Markup("<title>{} led in round {}</title>").format(node, number)
                parts.append(bar.format(x, y, cell - 1, NODE - 1, style, title))
    return _table_drawing(parts, list(rounds), cell, len(rows) * NODE, "round")


def dot_plot(counts: Mapping[str, Sequence[int]], class_name: Callable[[int], str]) -> Markup:
    """Draw samples by node (columns) and class (rows); a dot's area is the number of samples.

    Class names are cut to fit; those at the dots are whole.
    """
    largest = max(max(of_node) for of_node in counts.values()) or 1
    num_classes = len(next(iter(counts.values())))
    cell, height = _cell(len(counts)), 18
    parts = []
    for label in range(num_classes):
        y = label * height + height / 2
        parts.append(text(LABEL - 5, y + 3.5, _label(class_name(label))))
        parts.append(line(LABEL, y, LABEL + cell * len(counts), y))
    for column, (node, of_node) in enumerate(counts.items()):
        for label, count in enumerate(of_node):
            if count:
                radius = max(1.0, min(cell, height) * 0.48 * math.sqrt(count / largest))
                parts.append(
                    Markup(
                        '<circle cx="{}" cy="{}" r="{}" class="dot"><title>{}: {} of class {}'
                        "</title></circle>"
                    ).format(
                        round(LABEL + (column + 0.5) * cell, 1),
                        label * height + height / 2,
                        round(radius, 1),
                        node,
                        count,
                        class_name(label),
                    )
                )
    return _table_drawing(parts, list(counts), cell, num_classes * height, "node")


def cluster_by_node(topology: Mapping[str, Any]) -> dict[str, int | None]:
    """Index of each node's cluster, in the order of clusters; last, heads that left, with None."""
    clusters = {
        node: index
        for index, cluster in enumerate(topology["clusters"])
        for node in sorted(cluster_nodes(cluster), key=by_number)
    }
    leaders = {head for heads in topology["heads"].values() for head in heads}
    gone = sorted(leaders - clusters.keys(), key=by_number)
    return clusters | dict.fromkeys(gone)


def cluster_nodes(cluster: Mapping[str, Any]) -> list[str]:
    """Names of a cluster's nodes, the head first if there is one."""
    head = cluster.get("head")
    return [*([] if head is None else [head]), *cluster["members"]]


def by_number(name: str) -> tuple[int, str]:
    """Sort key that puts node 2 before node 10."""
    return len(name), name


def _label(name: str) -> str:
    """A node's name or a round, to fit into a drawing: ``node-12`` -> ``12``."""
    name = short(name).removeprefix("node-").removeprefix("node ")
    return name if len(name) <= LONGEST_LABEL else f"{name[: LONGEST_LABEL - 1]}…"


def _cell(columns: int) -> float:
    """Column width: few columns fill the page, many make the drawing wide."""
    return round(min(28.0, max(9.0, 330 / columns)), 1)


def _table_drawing(
    parts: Sequence[Markup], columns: Sequence[str], cell: float, height: float, what: str
) -> Markup:
    """Add column names below, as many as fit, and wrap all in an SVG."""
    every = math.ceil(30 / cell)
    names = [
        text(round(LABEL + (index + 0.5) * cell, 1), height + 13, _label(name), anchor="middle")
        for index, name in enumerate(columns)
        if index % every == 0
    ]
    axis = text(LABEL - 5, height + 13, what, "axis")
    width = round(LABEL + cell * len(columns) + 4, 1)
    return svg(width, height + 18, [*parts, *names, axis], fixed=True)
