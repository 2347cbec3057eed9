"""PNG of who led when: a row for each node, by cluster, and a column for each round."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flwr_distill.server.page.drawings import cluster_by_node
from flwr_distill.server.page.svg import COLOURS

MOST_LABELLED = 60
"""With more nodes, names would overlap and are left out; more rounds do not widen the picture."""


def topology_picture(topology: Mapping[str, Any]) -> Figure:
    """Draw the heads of each round, from the content of ``topology.json``.

    Heads that have left come last, in grey.
    """
    rounds, clusters = topology["heads"], cluster_by_node(topology)
    nodes = list(clusters)
    width, height = 2.5 + 0.3 * min(len(rounds), MOST_LABELLED), 1 + 0.28 * len(nodes)
    figure = Figure(figsize=(max(width, 5), min(height, 30)), layout="constrained")
    axes = figure.subplots()
    for index, (node, cluster) in enumerate(clusters.items()):
        colour = "grey" if cluster is None else f"C{cluster % COLOURS}"
        axes.barh(index, len(rounds), left=0.5, height=0.9, color=colour, alpha=0.15)
        led = [(int(number) - 0.45, 0.9) for number, heads in rounds.items() if node in heads]
        axes.broken_barh(led, (index - 0.45, 0.9), color=colour)
        if index and cluster != clusters[nodes[index - 1]]:
            axes.axhline(index - 0.5, color="black", linewidth=0.8)
    axes.set(xlabel="round", ylabel="node, by cluster", xlim=(0.5, len(rounds) + 0.5))
    axes.set_ylim(len(nodes) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(nodes) <= MOST_LABELLED:
        axes.set_yticks(range(len(nodes)), nodes, parse_math=False)  # a name may hold $
    axes.set_title("filled: head or leader of its cluster in that round", fontsize="medium")
    return figure
