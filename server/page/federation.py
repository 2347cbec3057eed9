"""Who took part: clusters, their heads or leaders, and the samples of each node."""

from markupsafe import Markup

from flwr_distill.base.text import counted
from flwr_distill.server.page.drawings import cluster_nodes, cluster_star, dot_plot, leader_grid
from flwr_distill.server.page.layout import scrolling
from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.server.page.words import between
from flwr_distill.strategies.common.sections import Figure, Section

MOST_IN_HALF = 14
"""With more nodes or rounds, a drawing takes the full width of the page."""


def topology(run: RunFiles) -> Section | None:
    """Clusters and who led them; None if the strategy has no clusters."""
    clusters = run.topology.get("clusters")
    if not clusters:
        return None
    groups = run.topology.get("groups") or [cluster_nodes(cluster) for cluster in clusters]
    colour_of = {node: index for index, group in enumerate(groups) for node in group}
    stars = [cluster_star(c.get("head"), c["members"], colour_of) for c in clusters]
    sizes = [len(cluster_nodes(cluster)) for cluster in clusters]
    nodes = counted(sizes[0], "node") if len(sizes) == 1 else f"{between(sizes)} nodes"
    led = any(cluster.get("head") is not None for cluster in clusters)
    caption = f"At the end of the run: {counted(len(clusters), 'cluster')}, of {nodes}"
    caption += ", each with its head or leader (filled) in the middle." if led else "."
    if run.topology.get("groups"):
        colours = counted(len(groups), "homogeneous group")
        caption += f" Colours are the {colours}: nodes with similar labels."
    drawing = Markup('<div class="clusters">{}</div>').format(Markup().join(stars))
    figures = [Figure("Clusters", caption, drawing, wide=sum(sizes) > MOST_IN_HALF)]
    heads = run.topology.get("heads", {})
    if led and len({tuple(sorted(those)) for those in heads.values()}) > 1:
        figures.append(
            Figure(
                "Who led",
                "A row for each node that was ever a head or leader, a column for each round: "
                "filled when it was one.",
                scrolling(leader_grid(run.topology)),
                wide=len(heads) > MOST_IN_HALF,
            )
        )
    return Section("Who worked with whom", figures=figures)


def partition(run: RunFiles) -> Section | None:
    """Samples by node and class; None if the settings do not determine them."""
    if not run.partition:
        return None
    classes = [sum(count > 0 for count in counts) for counts in run.partition.values()]
    sizes = [sum(counts) for counts in run.partition.values()]
    largest = max(max(counts) for counts in run.partition.values())
    caption = (
        f"A column for each node, a row for each class; the largest dot is {largest} samples. "
        f"Nodes hold {between(classes)} classes and {between(sizes)} samples, held-out samples "
        "included."
    )
    drawing = scrolling(dot_plot(run.partition, run.class_name))
    figure = Figure("Samples", caption, drawing, wide=len(sizes) > MOST_IN_HALF)
    text = (
        "Computed from the settings, which say how the data set is split. Class counts are "
        "private: nodes were not asked for them, and private data sets are not shown."
    )
    return Section("What nodes hold", [text], figures=[figure])
