"""A picture of a partition: one dot per class and node, with area by number of samples."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

POINTS = 72
CELL = 0.32
WIDEST, TALLEST = 20.0, 10.0
LEFT, RIGHT, BOTTOM, TOP = 0.7, 1.3, 0.6, 0.45
"""Inches: preferred cell, maximum size of the axes, and margins."""
MIN_LARGEST = 10.0
LEAST = 1.5
"""Points: minimum diameters of the largest dot and of any dot."""


def partition_picture(counts: NDArray[np.int64], title: str) -> Figure:
    """Draw a partition from the samples of each class on each node, int64 (nodes, classes).

    A dot's area is proportional to its samples. The largest fills its cell; with many nodes, cells
    are narrow and dots overlap.
    """
    num_nodes, num_classes = counts.shape
    width = float(np.clip(CELL * num_nodes, 3, WIDEST))
    height = float(np.clip(CELL * num_classes, 1.5, TALLEST))
    cell = POINTS * min(CELL, width / num_nodes, height / num_classes)
    size = LEFT + width + RIGHT, BOTTOM + height + TOP
    figure = Figure(figsize=size)
    axes = figure.add_axes(
        (LEFT / size[0], BOTTOM / size[1], width / size[0], height / size[1]),
        xlabel="node",
        ylabel="class",
        xlim=(-0.5, num_nodes - 0.5),
        ylim=(num_classes - 0.5, -0.5),
    )
    axes.set_title(title, fontsize="medium", loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    nodes, classes = counts.nonzero()
    samples = counts[nodes, classes]
    largest = max(0.9 * cell, MIN_LARGEST)

    def area(number: NDArray[np.int64]) -> NDArray[np.float64]:
        points: NDArray[np.float64] = largest**2 * number / samples.max()
        return points.clip(LEAST**2)

    axes.scatter(
        nodes, classes, area(samples), "C0", alpha=0.65, linewidths=0, clip_on=False, zorder=3
    )
    for number in np.unique(np.quantile(samples, [0, 0.5, 1], method="nearest")):
        axes.scatter([], [], area(number), "C0", alpha=0.65, linewidths=0, label=str(number))
    axes.legend(
        title="samples", loc="upper left", bbox_to_anchor=(1, 1), frameon=False, labelspacing=1
    )
    return figure
