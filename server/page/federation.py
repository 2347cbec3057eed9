"""Who took part: clusters and their leaders, and what nodes hold."""

from markupsafe import Markup

from server.page.drawings import cluster_nodes, cluster_star, dot_plot, leader_grid
from server.page.layout import scrolling
from server.page.run_files import RunFiles
from server.page.words import between
from strategies.common.sections import Figure, Section

MOST_IN_HALF = 14
"""More nodes or rounds than these take a drawing the page's width."""


def topology(run: RunFiles) -> Section | None:
    """Return clusters and leaders; None where the strategy has no clusters."""
    clusters = run.topology.get("clusters")
    if not clusters:
        return None
    groups = run.topology.get("groups") or [cluster_nodes(cluster) for cluster in clusters]
    colour_of = {node: index for index, group in enumerate(groups) for node in group}
    stars = [cluster_star(c.get("head"), c["members"], colour_of) for c in clusters]
    sizes = [len(cluster_nodes(cluster)) for cluster in clusters]
    led = any(cluster.get("head") is not None for cluster in clusters)
    caption = f"At the end of the run: {len(clusters)} clusters, of {between(sizes)} nodes"
    caption += ", each with its head or leader, filled, in the middle." if led else "."
    if run.topology.get("groups"):
        caption += f" Colours are the {len(groups)} homogeneous groups: nodes of like labels."
    drawing = Markup('<div class="clusters">{}</div>').format(Markup().join(stars))
    figures = [Figure("Clusters", caption, drawing, wide=sum(sizes) > MOST_IN_HALF)]
    heads = run.topology.get("heads", {})
    if led and len({tuple(sorted(those)) for those in heads.values()}) > 1:
        figures.append(
            Figure(
                "Who led",
                "A row for each node that was ever head or leader, a column for each round: filled "
                "where it was.",
                scrolling(leader_grid(run.topology)),
                wide=len(heads) > MOST_IN_HALF,
            )
        )
    return Section("Who worked with whom", figures=figures)


def partition(run: RunFiles) -> Section | None:
    """Return who holds how much of each class; None where the settings do not tell."""
    if not run.partition:
        return None
    held = [sum(count > 0 for count in of_node) for of_node in run.partition.values()]
    sizes = [sum(of_node) for of_node in run.partition.values()]
    most = max(max(of_node) for of_node in run.partition.values())
    caption = (
        f"A column for each node, a row for each class; the largest dot stands for {most} samples. "
        f"Nodes hold {between(held)} classes and {between(sizes)} samples, what they keep for "
        "evaluation among them."
    )
    drawing = scrolling(dot_plot(run.partition))
    figure = Figure("Samples", caption, drawing, wide=len(held) > MOST_IN_HALF)
    text = (
        "Worked out from the settings, which say how the data set is split. Nodes were not asked: "
        "how many samples of a class a node holds is its own affair, and of nodes with data of "
        "their own nothing is drawn here."
    )
    return Section("What nodes hold", [text], figures=[figure])
