"""The picture of a partition."""

import numpy as np
import pytest

from flwr_distill.task.partition.picture import partition_picture

COUNTS = np.array([[40, 0, 10], [0, 0, 90]])


def dots(figure):
    """Areas of the dots by (node, class), and what the legend says: {label: area}."""
    (axes,) = figure.axes
    drawn, *samples_of_sizes = axes.collections
    found = {
        (int(x), int(y)): area
        for (x, y), area in zip(drawn.get_offsets(), drawn.get_sizes(), strict=True)
    }
    return found, {dot.get_label(): dot.get_sizes()[0] for dot in samples_of_sizes}


def test_every_class_on_every_node_is_a_dot_with_an_area_in_proportion_to_its_samples():
    found, legend = dots(partition_picture(COUNTS, "a title"))
    assert found.keys() == {(0, 0), (0, 2), (1, 2)}
    assert found[1, 2] / found[0, 0] == pytest.approx(90 / 40)
    assert found[1, 2] / found[0, 2] == pytest.approx(90 / 10)
    assert legend == {"10": found[0, 2], "40": found[0, 0], "90": found[1, 2]}


@pytest.mark.parametrize("num_nodes", [1, 10, 100, 1000])
@pytest.mark.parametrize("num_classes", [1, 10, 100])
def test_pictures_stay_of_a_size_to_look_at_and_dots_visible(num_nodes, num_classes):
    counts = np.ones((num_nodes, num_classes), dtype=np.int64)
    counts[0, 0] = 5000
    figure = partition_picture(counts, "a title")
    width, height = figure.get_size_inches()
    assert 3 < width < 24
    assert 2 < height < 12
    found, _ = dots(figure)
    assert min(found.values()) >= 1
    assert max(found.values()) >= 100 * (num_nodes * num_classes > 1)
    (axes,) = figure.axes
    assert axes.get_xlim() == (-0.5, num_nodes - 0.5)


def test_dots_do_not_touch_where_there_is_room():
    figure = partition_picture(np.full((20, 10), 7), "a title")
    (axes,) = figure.axes
    column = axes.get_position().width * figure.get_size_inches()[0] * 72 / 20
    assert max(dots(figure)[0].values()) ** 0.5 < column
