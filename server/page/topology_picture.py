"""A picture of who led whom: a row for each node, by cluster, and a column for each round."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from server.page.drawings import by_number, cluster_nodes

MOST_LABELLED = 60
"""More nodes are not named, for names would overlap; more rounds do not widen the picture."""


def topology_picture(topology: Mapping[str, Any]) -> Figure:
    """Draw the heads of each round: a filled cell where a node was one.

    Parameters
    ----------
    topology : Mapping[str, Any]
        Content of ``topology.json``: ``clusters``, and ``heads`` by round. Nodes that were heads
        and have left come last, in grey.

    Returns
    -------
    Figure
        To be saved.
    """
    cluster_of = {
        node: index
        for index, cluster in enumerate(topology["clusters"])
        for node in sorted(cluster_nodes(cluster), key=by_number)
    }
    rounds = topology["heads"]
    gone = {head for heads in rounds.values() for head in heads} - cluster_of.keys()
    nodes = [*cluster_of, *sorted(gone, key=by_number)]
    row = {node: index for index, node in enumerate(nodes)}

    width, height = 2.5 + 0.3 * min(len(rounds), MOST_LABELLED), 1 + 0.28 * len(nodes)
    figure = Figure(figsize=(max(width, 5), min(height, 30)), layout="constrained")
    axes = figure.subplots()
    for node, index in row.items():
        colour = _colour(cluster_of.get(node))
        axes.barh(index, len(rounds), left=0.5, height=0.9, color=colour, alpha=0.15)
        led = [(int(number) - 0.45, 0.9) for number, heads in rounds.items() if node in heads]
        axes.broken_barh(led, (index - 0.45, 0.9), color=colour)
    for above, below in pairwise(nodes):
        if cluster_of.get(above) != cluster_of.get(below):
            axes.axhline(row[below] - 0.5, color="black", linewidth=0.8)
    axes.set(xlabel="round", ylabel="node, by cluster", xlim=(0.5, len(rounds) + 0.5))
    axes.set_ylim(len(nodes) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(nodes) <= MOST_LABELLED:
        axes.set_yticks(range(len(nodes)), nodes)
    axes.set_title("filled: head or leader of its cluster in that round", fontsize="medium")
    return figure


def _colour(cluster: int | None) -> str:
    return "grey" if cluster is None else f"C{cluster % 10}"
